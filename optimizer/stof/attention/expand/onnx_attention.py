# SPDX-License-Identifier: Apache-2.0
"""ONNX ``Attention`` of opsets 23 to 25 in primitive nodes (facts: the operator's specification of onnx 1.23)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from stof.attention.expand.expand import Request
from stof.attention.expand.primitives import (
    Band,
    Core,
    Mask,
    added,
    attend,
    band,
    float_type,
    known_shape,
    known_size,
    lowest_as_inf,
    merge_heads,
    positions,
    size,
    split_heads,
)
from stof.errors import UnsupportedError
from stof.graph.node_builder import Builder
from stof.symbolic import Int

_ATTRIBUTES = (
    *("is_causal", "kv_num_heads", "left_window_size", "q_num_heads", "qk_matmul_output_mode", "right_window_size"),
    *("scale", "softcap", "softmax_precision"),
)
_MODES = ("the scaled scores", "the capped scores", "the masked scores", "the attention weights")


def lower_attention(request: Request) -> None:
    """Appends the nodes that compute what the node's outputs hold.

    Raises:
        UnsupportedError: with the reason why it cannot be.
    """
    request.only(_ATTRIBUTES, 7, 4)
    _Attention(request).lower()


class _Attention:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.builder: Builder = request.builder
        self.symbolic = request.symbolic
        self.attributes = request.attributes

    def lower(self) -> None:
        b, request = self.builder, self.request
        if request.output(3) and request.is_used(3):
            mode = int(self.attributes.get("qk_matmul_output_mode", 0))
            words = _MODES[mode] if 0 <= mode < len(_MODES) else f"mode {mode}"
            raise UnsupportedError(f"its output qk_matmul_output ({words} [B, H, S, T]) is used")
        query, key, value = (request.input(i) for i in range(3))
        shapes = [known_shape(self.symbolic, t, r, (3, 4)) for t, r in ((query, "Q"), (key, "K"), (value, "V"))]
        if len({len(s) for s in shapes}) > 1:
            raise UnsupportedError("Q, K and V have different ranks")
        packed = len(shapes[0]) == 3
        heads, groups = self._heads(shapes, packed)
        if heads % groups:
            raise UnsupportedError(f"{heads} query heads are no multiple of {groups} key heads")
        widths = [self._width(s, n, packed) for s, n in zip(shapes, (heads, groups, groups), strict=True)]
        dtype = float_type(self.symbolic, query)
        if packed:
            query, key, value = (
                split_heads(b, t, n) for t, n in zip((query, key, value), (heads, groups, groups), strict=True)
            )
        present, past, keys = self._present(key, value, shapes[1][1 if packed else 2])
        offset, lengths = self._offset(query, past)
        masks = [*self._masks(keys), *band(b, query, present[0], self._limits(), offset)]
        if lengths is not None:
            masks.append(Mask(b.add("Less", [positions(b, size(b, present[0], 2)), lengths]), boolean=True))
        core = Core(
            query,
            *present,
            heads,
            groups,
            float(self.attributes.get("scale", 1.0 / np.sqrt(widths[0]))),
            dtype,
            float(self.attributes.get("softcap", 0.0)),
            masks,
            guard=True,
        )
        result = attend(b, core, request.name)
        if packed:
            result = merge_heads(b, result, heads * widths[2])
        request.give(0, result)
        for i in (1, 2):
            request.give(i, present[i - 1])

    def _heads(self, shapes: list[tuple[Int, ...]], packed: bool) -> tuple[int, int]:
        if packed:
            found = [int(self.attributes.get(n, 0)) for n in ("q_num_heads", "kv_num_heads")]
            if min(found) < 1:
                raise UnsupportedError(f"q_num_heads and kv_num_heads are {found}, expected 1 or more for Q of rank 3")
            return found[0], found[1]
        return known_size(shapes[0][1], "the number of query heads"), known_size(shapes[1][1], "that of key heads")

    def _width(self, shape: tuple[Int, ...], heads: int, packed: bool) -> int:
        whole = known_size(shape[-1], "the head size")
        if packed and whole % heads:
            raise UnsupportedError(f"{whole} channels are no multiple of {heads} heads")
        return whole // heads if packed else whole

    def _present(self, key: str, value: str, keys: Int) -> tuple[tuple[str, str], str, Int]:
        """Keys and values with those of the past in front, past keys ("" without), and how many keys."""
        b, request = self.builder, self.request
        past = request.past(4, 5)
        if not past[0]:
            return (key, value), "", keys
        if request.input(6):
            raise UnsupportedError("it has past_key and nonpad_kv_seqlen, which exclude each other")
        shape = known_shape(self.symbolic, past[0], "past_key", (4,))
        joined = b.add("Concat", [past[0], key], axis=2), b.add("Concat", [past[1], value], axis=2)
        return joined, past[0], keys + shape[2]

    def _offset(self, query: str, past: str) -> tuple[str | None, str | None]:
        """The position of the first query, and the number of valid keys [B, 1, 1, 1] where a vector gives it."""
        b, given = self.builder, self.request.input(6)
        if past:
            return size(b, past, 2), None
        if not given:
            return None, None
        known_shape(self.symbolic, given, "nonpad_kv_seqlen", (1,))
        lengths = b.unsqueeze(given, [1, 2, 3])
        return b.add("Sub", [lengths, size(b, query, 2)]), lengths

    def _limits(self) -> Band:
        left, right = (int(self.attributes.get(f"{side}_window_size", -1)) for side in ("left", "right"))
        if min(left, right) < -1:
            raise UnsupportedError(f"window sizes {left} and {right}, expected -1 or more")
        if self.attributes.get("is_causal", 0):
            right = 0
        return Band(None if left < 0 else left, None if right < 0 else right)

    def _masks(self, keys: Int) -> list[Mask]:
        b, tensor = self.builder, self.request.input(3)
        if not tensor:
            return []
        shape = known_shape(self.symbolic, tensor, "attn_mask", (1, 2, 3, 4))
        kind = self.symbolic.dtype(tensor)
        boolean = kind == TensorProto.BOOL
        if not boolean:
            tensor = added(b, lowest_as_inf(b, self.symbolic, tensor, kind), kind)
        if shape[-1] != keys and (self.request.opset >= 24 or None not in (shape[-1].constant, keys.constant)):
            tensor = self._lengthened(tensor, shape, keys, boolean)
        if boolean:  # added, it can stay a bias where it is data that no expression describes
            tensor = b.add("Where", [tensor, b.constant(0, np.float32), b.constant(-np.inf, np.float32)])
        return [Mask(tensor)]

    def _lengthened(self, tensor: str, shape: tuple[Int, ...], keys: Int, boolean: bool) -> str:
        """A mask that ends before the keys forbids what is beyond it."""
        b = self.builder
        if shape[-1].constant == 1 or (keys - shape[-1]).constant is None:
            if not self.request.input(6) and shape[-1].constant != 1:
                return tensor  # sizes of other names: the same, as without lengths a mask has them all
            raise UnsupportedError(
                f"attn_mask {tensor!r} has {shape[-1]} columns beside {keys} keys: whether it is spread or ends before them "
                "cannot be told"
            )
        missing = (keys - shape[-1]).constant
        assert missing is not None
        if missing < 0:
            raise UnsupportedError(f"attn_mask {tensor!r} has {shape[-1]} columns, more than {keys} keys")
        # Pad has no kernel for all types in every runtime.
        whole = [size(b, tensor, i) for i in range(len(shape) - 1)]
        rest = b.add("Concat", [*whole, b.constant([missing])], axis=0) if whole else b.constant([missing])
        fill = np.zeros(1, np.bool_) if boolean else np.full(1, -np.inf, np.float32)
        rest = b.add("ConstantOfShape", [rest], value=onnx.numpy_helper.from_array(fill))
        return b.add("Concat", [tensor, rest], axis=-1)
