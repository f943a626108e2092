# SPDX-License-Identifier: Apache-2.0
"""Expands ONNX ``Attention`` of opsets 23 to 25 to primitive nodes (source: the specification in onnx 1.23)."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from stof.attention.expand.primitives import (
    AttentionCore,
    Band,
    ScoreMask,
    additive_mask,
    append_attention,
    axis_size,
    band_masks,
    check_groups,
    merge_heads,
    positions,
    prepend_past,
    require_float_type,
    require_shape,
    require_size,
    split_heads,
)
from stof.attention.expand.working_copy import FusedNode
from stof.errors import UnsupportedError
from stof.graph.node_builder import Builder
from stof.symbolic import Int

_ATTRIBUTES = (
    *("is_causal", "kv_num_heads", "left_window_size", "q_num_heads", "qk_matmul_output_mode", "right_window_size"),
    *("scale", "softcap", "softmax_precision"),
)
_WINDOWS = frozenset({"left_window_size", "right_window_size"})
_WINDOWS_SINCE = 25  # the opset
_MODES = ("the scaled scores", "the capped scores", "the masked scores", "the attention weights")


def expand_onnx_attention(fused: FusedNode) -> None:
    """Appends primitive nodes that compute the outputs of an Attention.

    Raises:
        UnsupportedError: when the node cannot be expanded, with the reason.
    """
    fused.check_signature(_ATTRIBUTES, 7, 4)
    _OnnxAttentionExpander(fused).expand()


class _OnnxAttentionExpander:
    def __init__(self, fused: FusedNode) -> None:
        self.fused = fused
        self.builder: Builder = fused.builder
        self.symbolic = fused.symbolic

    def expand(self) -> None:
        b, fused = self.builder, self.fused
        if fused.output(3) and fused.is_used(3):
            mode = fused.integer("qk_matmul_output_mode", 0)
            words = _MODES[mode] if 0 <= mode < len(_MODES) else f"mode {mode}"
            raise UnsupportedError(f"its output qk_matmul_output ({words} [B, H, S, T]) is used")
        query, key, value = (fused.input(i) for i in range(3))
        shapes = [require_shape(self.symbolic, t, r, (3, 4)) for t, r in ((query, "Q"), (key, "K"), (value, "V"))]
        if len({len(s) for s in shapes}) > 1:
            raise UnsupportedError("Q, K and V have different ranks")
        packed = len(shapes[0]) == 3
        heads, groups = self._heads(shapes, packed)
        check_groups(heads, groups)
        fused.precision("softmax_precision", TensorProto.FLOAT)
        widths = [self._width(s, n, packed) for s, n in zip(shapes, (heads, groups, groups), strict=True)]
        dtype = require_float_type(self.symbolic, query)
        if packed:
            query, key, value = (
                split_heads(b, t, n) for t, n in zip((query, key, value), (heads, groups, groups), strict=True)
            )
        present, past, keys = self._present(key, value, shapes[1][1 if packed else 2])
        offset, lengths = self._offset(query, past)
        band = self._band()
        masks = [*self._masks(keys), *band_masks(b, query, present[0], band, offset)]
        if lengths is not None and band.right != 0:  # a query's own key is a valid one
            masks.append(ScoreMask(b.add("Less", [positions(b, axis_size(b, present[0], 2)), lengths]), boolean=True))
        core = AttentionCore(
            query,
            *present,
            heads,
            groups,
            fused.number("scale", 1.0 / np.sqrt(widths[0])),
            dtype,
            self._softcap(),
            masks,
            guard=True,
        )
        result = append_attention(b, core, fused.name)
        if packed:
            result = merge_heads(b, result, heads * widths[2])
        fused.set_output(0, result)
        for i in (1, 2):
            fused.set_output(i, present[i - 1])

    def _softcap(self) -> float:
        softcap = self.fused.number("softcap", 0.0)
        if softcap < 0:
            raise UnsupportedError(f"softcap is {softcap:g}, expected 0 (none) or more")
        return softcap

    def _heads(self, shapes: list[tuple[Int, ...]], packed: bool) -> tuple[int, int]:
        if packed:
            counts = [self.fused.integer(n, 0) for n in ("q_num_heads", "kv_num_heads")]
            if min(counts) < 1:
                raise UnsupportedError(f"q_num_heads and kv_num_heads are {counts}, expected 1 or more for Q of rank 3")
            return counts[0], counts[1]
        return require_size(shapes[0][1], "the number of query heads"), require_size(
            shapes[1][1], "the number of key heads"
        )

    def _width(self, shape: tuple[Int, ...], heads: int, packed: bool) -> int:
        whole = require_size(shape[-1], "the head size")
        if packed and whole % heads:
            raise UnsupportedError(f"{whole} channels are no multiple of {heads} heads")
        return whole // heads if packed else whole

    def _present(self, key: str, value: str, keys: Int) -> tuple[tuple[str, str], str, Int]:
        """Keys and values with the past in front, the past keys ("" without a past), and the number of keys."""
        b, fused = self.builder, self.fused
        past = fused.past(4, 5)
        if not past[0]:
            return (key, value), "", keys
        if fused.input(6):
            raise UnsupportedError("it has past_key and nonpad_kv_seqlen, which exclude each other")
        shape = require_shape(self.symbolic, past[0], "past_key", (4,))
        return prepend_past(b, past, (key, value)), past[0], keys + shape[2]

    def _offset(self, query: str, past: str) -> tuple[str | None, str | None]:
        """The position of the first query, and the number of valid keys [B, 1, 1, 1] where a vector gives it."""
        b, seqlen = self.builder, self.fused.input(6)
        if past:
            return axis_size(b, past, 2), None
        if not seqlen:
            return None, None
        require_shape(self.symbolic, seqlen, "nonpad_kv_seqlen", (1,))
        lengths = b.unsqueeze(seqlen, [1, 2, 3])
        return b.add("Sub", [lengths, axis_size(b, query, 2)]), lengths

    def _band(self) -> Band:
        fused = self.fused
        if fused.opset < _WINDOWS_SINCE and (given := sorted(_WINDOWS & set(fused.attributes))):
            raise UnsupportedError(
                f"it has attribute {given[0]!r}, which opset {fused.opset} of the model does not have; it is of "
                f"opset {_WINDOWS_SINCE}"
            )
        left, right = (fused.integer(f"{side}_window_size", -1) for side in ("left", "right"))
        if min(left, right) < -1:
            raise UnsupportedError(f"window sizes {left} and {right}, expected -1 or more")
        causal = fused.integer("is_causal", 0)
        if causal not in (0, 1):
            raise UnsupportedError(f"is_causal is {causal}, expected 0 or 1")
        if causal:
            right = 0
        return Band(None if left < 0 else left, None if right < 0 else right)

    def _masks(self, keys: Int) -> list[ScoreMask]:
        b, tensor = self.builder, self.fused.input(3)
        if not tensor:
            return []
        shape = require_shape(self.symbolic, tensor, "attn_mask", (1, 2, 3, 4))
        boolean = self.symbolic.dtype(tensor) == TensorProto.BOOL
        if not boolean:
            tensor = additive_mask(b, self.symbolic, tensor)
        if shape[-1] != keys and (self.fused.opset >= 24 or None not in (shape[-1].constant, keys.constant)):
            tensor = self._extend_mask(tensor, shape, keys, boolean)
        if boolean:  # a mask that no expression describes can stay as a bias when it is added
            tensor = b.add("Where", [tensor, b.constant(0, np.float32), b.constant(-np.inf, np.float32)])
        return [ScoreMask(tensor)]

    def _extend_mask(self, tensor: str, shape: tuple[Int, ...], keys: Int, boolean: bool) -> str:
        """Extends a mask that has fewer columns than there are keys: it forbids the keys beyond its end."""
        b = self.builder
        if shape[-1].constant == 1 or (keys - shape[-1]).constant is None:
            if not self.fused.input(6) and shape[-1].constant != 1:
                return tensor  # without lengths a mask covers all keys: sizes of different names are equal
            raise UnsupportedError(
                f"attn_mask {tensor!r} has {shape[-1]} columns beside {keys} keys: it is not known whether it broadcasts or "
                "ends before them"
            )
        missing = (keys - shape[-1]).constant
        assert missing is not None
        if missing < 0:
            raise UnsupportedError(f"attn_mask {tensor!r} has {shape[-1]} columns, more than {keys} keys")
        # Not Pad: some runtimes lack its kernel for some types.
        whole = [axis_size(b, tensor, i) for i in range(len(shape) - 1)]
        rest = b.add("Concat", [*whole, b.constant([missing])], axis=0) if whole else b.constant([missing])
        fill = np.zeros(1, np.bool_) if boolean else np.full(1, -np.inf, np.float32)
        rest = b.add("ConstantOfShape", [rest], value=onnx.numpy_helper.from_array(fill))
        return b.add("Concat", [tensor, rest], axis=-1)
