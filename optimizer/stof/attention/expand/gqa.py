# SPDX-License-Identifier: Apache-2.0
"""``GroupQueryAttention`` of domain com.microsoft in primitive nodes.

Facts: the operator's schema in ONNX Runtime 1.31, and what its CPU provider computes. Only nodes are expanded of whose
cache every row is full (``seqlens_k`` comes from sizes alone), or that have no cache: with rows of different length, new
keys stand at different places in each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

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
from stof.symbolic import Int, integer
from stof.symbolic.algebra.piecewise import to_int
from stof.symbolic.algebra.terms import var

_KNOWN = frozenset(
    {"num_heads", "kv_num_heads", "softcap", "do_rotary", "rotary_interleaved", "causal", "scale", "local_window_size"}
)
_REFUSED = {11: "head_sink", 12: "k_scale", 13: "v_scale", 14: "q_norm_weight", 15: "k_norm_weight"}


def lower_grouped(request: Request) -> None:
    """Appends the nodes that compute what the node's outputs hold.

    Raises:
        UnsupportedError: with the reason why it cannot be.
    """
    request.only({a.name for a in request.node.attribute}, 16, 4)
    _Grouped(request).lower()


class _Grouped:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.builder: Builder = request.builder
        self.symbolic = request.symbolic
        self.attributes = request.attributes
        self.heads, self.groups = (int(self.attributes.get(n, 0)) for n in ("num_heads", "kv_num_heads"))

    def lower(self) -> None:
        b, request = self.builder, self.request
        self._refuse()
        dtype = float_type(self.symbolic, request.input(0))
        shape = known_shape(self.symbolic, request.input(0), "query", (3,))
        packed = not request.input(1)
        whole = self.heads + 2 * self.groups if packed else self.heads
        width = known_size(shape[2].divide(integer(whole)), "the head size")
        query, key, value = self._packed(width) if packed else (request.input(i) for i in range(3))
        if not packed:
            rows = known_shape(self.symbolic, key, "key", (3,))[1]
            if rows != shape[1]:
                raise UnsupportedError(f"query has {shape[1]} positions, key {rows}")
        past = self._past()
        lengths = self._lengths(shape, past)
        self._check_window(lengths)
        offset = size(b, request.input(3), 2) if past != integer(0) else None
        if self.attributes.get("do_rotary"):
            if lengths is not None:
                raise UnsupportedError("it rotates by positions that depend on seqlens_k, which is data of a run")
            query, key = (self._rotated(t, n, width, offset) for t, n in ((query, self.heads), (key, self.groups)))
        query = split_heads(b, query, self.heads)
        present = split_heads(b, key, self.groups), split_heads(b, value, self.groups)
        if past != integer(0):
            cached = (request.input(3), request.input(4))
            present = (
                b.add("Concat", [cached[0], present[0]], axis=2),
                b.add("Concat", [cached[1], present[1]], axis=2),
            )
        masks = [*self._bias(), *band(b, query, present[0], self._limits(), offset)]
        if lengths is not None:
            ends = b.unsqueeze(b.add("Cast", [lengths], to=TensorProto.INT64), [1, 2, 3])
            places = positions(b, size(b, present[0], 2))
            masks.append(Mask(b.add("LessOrEqual", [places, ends]), boolean=True))
        core = Core(
            query,
            present[0],
            present[1],
            self.heads,
            self.groups,
            float(self.attributes.get("scale", 0.0)) or 1.0 / float(np.sqrt(width)),
            dtype,
            float(self.attributes.get("softcap", 0.0)),
            masks,
            guard=True,
        )
        request.give(0, merge_heads(b, attend(b, core, request.name), self.heads * width))
        for i in (1, 2):
            request.give(i, present[i - 1])

    def _refuse(self) -> None:
        if min(self.heads, self.groups) < 1 or self.heads % self.groups:
            raise UnsupportedError(f"{self.heads} query heads are no multiple of {self.groups} key heads")
        other = sorted(n for n, v in self.attributes.items() if n not in _KNOWN and not _is_default(n, v))
        if other:
            raise UnsupportedError(f"its attribute {other[0]} is {self.attributes[other[0]]!r}, which is not expanded")
        for i, name in _REFUSED.items():
            if self.request.input(i):
                raise UnsupportedError(f"it has input {name}, which is not expanded")
        if self.request.output(3) and self.request.is_used(3):
            raise UnsupportedError("its output output_qk [B, H, S, T] is used")

    def _packed(self, width: int) -> tuple[str, str, str]:
        b = self.builder
        outputs = [b.name() for _ in range(3)]
        sizes = b.constant([self.heads * width, self.groups * width, self.groups * width])
        b.nodes.append(helper.make_node("Split", [self.request.input(0), sizes], outputs, name=outputs[0], axis=2))
        return outputs[0], outputs[1], outputs[2]

    def _past(self) -> Int:
        """The length of the cache before this step, 0 without one."""
        given = self.request.past(3, 4)
        if not given[0]:
            return integer(0)
        shape = known_shape(self.symbolic, given[0], "past_key", (4,))
        known_shape(self.symbolic, given[1], "past_value", (4,))
        return shape[2]

    def _lengths(self, query: tuple[Int, ...], past: Int) -> str | None:
        """The last key of each row [B] where it is data of a run; None where every row is full."""
        total, tensor = query[1] + past, self.request.input(5)
        found = self.symbolic.value(self.request.input(6))
        elements = None if found is None else found.elements()
        if elements is None or len(elements) != 1 or to_int(elements[0]) != total:
            raise UnsupportedError(
                f"total_sequence_length {self.request.input(6)!r} is not told by sizes to be {total}, the length of past and "
                "query"
            )
        known_shape(self.symbolic, tensor, "seqlens_k", (1,))
        value = self.symbolic.value(tensor)
        if value is not None and to_int(value.at((var("row"),))) == total - integer(1):
            return None
        if past != integer(0):
            raise UnsupportedError(
                f"seqlens_k {tensor!r} is data of a run, not told by sizes to be {total} - 1: rows of its cache may have "
                "different lengths, and their new keys different places"
            )
        return tensor

    def _check_window(self, lengths: str | None) -> None:
        """Queries behind the end of their row have a window that ends with themselves in one kernel of the runtime's.

        In the other, which computes softcaps and nodes that write no cache, it ends with the row's last key.
        """
        other = self.attributes.get("softcap") or not (self.request.output(1) and self.request.output(2))
        if lengths is not None and self._limits().left is not None and other:
            raise UnsupportedError(
                f"it has a window, seqlens_k {lengths!r} that is data of a run, and a softcap or no cache that it writes: "
                "queries behind the end of their row attend to the last keys of the row then"
            )

    def _rotated(self, tensor: str, heads: int, width: int, offset: str | None) -> str:
        """Query or key after ONNX Runtime's own rotary operator, which takes the same tables."""
        b, request = self.builder, self.request
        table = known_shape(self.symbolic, request.input(7), "cos_cache", (2,))
        part = 2 * known_size(table[1], "the width of cos_cache")
        places = request.input(9)
        if not places:
            places = offset if offset is not None else b.constant([0])
        attributes: dict[str, Any] = {
            "interleaved": int(self.attributes.get("rotary_interleaved", 0)),
            "num_heads": heads,
        }
        if part != width:
            attributes["rotary_embedding_dim"] = part
        inputs = [tensor, places, request.input(7), request.input(8)]
        return b.add("RotaryEmbedding", inputs, domain="com.microsoft", **attributes)

    def _limits(self) -> Band:
        window = int(self.attributes.get("local_window_size", -1))
        causal = bool(self.attributes.get("causal", 1))
        if window == 0 or (window > 0 and not causal):
            raise UnsupportedError(
                f"local_window_size is {window} with causal {int(causal)}, which no runtime computes"
            )
        return Band(window - 1 if window > 0 else None, 0 if causal else None)

    def _bias(self) -> list[Mask]:
        tensor = self.request.input(10)
        if not tensor:
            return []
        known_shape(self.symbolic, tensor, "attention_bias", (4,))
        kind = self.symbolic.dtype(tensor)
        return [Mask(added(self.builder, lowest_as_inf(self.builder, self.symbolic, tensor, kind), kind))]


def _is_default(name: str, value: object) -> bool:
    """Whether an attribute says what nodes without it mean."""
    if name in ("k_quant_type", "v_quant_type"):
        return value in (b"", b"NONE")
    if name == "qk_norm_epsilon":
        return True  # of a normalization whose weights are not given
    return value in (0, -1)
