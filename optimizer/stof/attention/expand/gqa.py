# SPDX-License-Identifier: Apache-2.0
"""Expands ``GroupQueryAttention`` of domain com.microsoft to primitive nodes.

Sources: the operator's schema in ONNX Runtime 1.31, and results of its CPU provider. A node with a cache is expanded only
where every row of the cache is full (``seqlens_k`` follows from shapes): otherwise new keys stand at a different position
in each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, helper

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
from stof.symbolic import Int, integer
from stof.symbolic.algebra.piecewise import to_int
from stof.symbolic.algebra.terms import var

_KNOWN = frozenset(
    {"num_heads", "kv_num_heads", "softcap", "do_rotary", "rotary_interleaved", "causal", "scale", "local_window_size"}
)
_REFUSED = {11: "head_sink", 12: "k_scale", 13: "v_scale", 14: "q_norm_weight", 15: "k_norm_weight"}


def expand_group_query(fused: FusedNode) -> None:
    """Appends primitive nodes that compute the outputs of a GroupQueryAttention.

    Raises:
        UnsupportedError: when the node cannot be expanded, with the reason.
    """
    fused.check_signature({a.name for a in fused.node.attribute}, 16, 4)
    _GroupQueryExpander(fused).expand()


class _GroupQueryExpander:
    def __init__(self, fused: FusedNode) -> None:
        self.fused = fused
        self.builder: Builder = fused.builder
        self.symbolic = fused.symbolic
        self.attributes = fused.attributes
        self.heads, self.groups = (int(self.attributes.get(n, 0)) for n in ("num_heads", "kv_num_heads"))

    def expand(self) -> None:
        b, fused = self.builder, self.fused
        self._refuse_unsupported()
        dtype = require_float_type(self.symbolic, fused.input(0))
        shape = require_shape(self.symbolic, fused.input(0), "query", (3,))
        packed = not fused.input(1)
        whole = self.heads + 2 * self.groups if packed else self.heads
        width = require_size(shape[2].divide(integer(whole)), "the head size")
        query, key, value = self._split_packed(width) if packed else (fused.input(i) for i in range(3))
        if not packed:
            rows = require_shape(self.symbolic, key, "key", (3,))[1]
            if rows != shape[1]:
                raise UnsupportedError(f"query has {shape[1]} positions, key {rows}")
        past = self._past_length()
        lengths = self._lengths(shape, past)
        self._check_window(lengths)
        offset = axis_size(b, fused.input(3), 2) if past != integer(0) else None
        if self.attributes.get("do_rotary"):
            if lengths is not None:
                raise UnsupportedError(
                    "it rotates by positions that depend on seqlens_k, which is known at run time only"
                )
            query, key = (self._rotate(t, n, width, offset) for t, n in ((query, self.heads), (key, self.groups)))
        query = split_heads(b, query, self.heads)
        present = split_heads(b, key, self.groups), split_heads(b, value, self.groups)
        if past != integer(0):
            present = prepend_past(b, (fused.input(3), fused.input(4)), present)
        masks = [*self._bias_masks(), *band_masks(b, query, present[0], self._band(), offset)]
        if lengths is not None:
            ends = b.unsqueeze(b.add("Cast", [lengths], to=TensorProto.INT64), [1, 2, 3])
            key_positions = positions(b, axis_size(b, present[0], 2))
            masks.append(ScoreMask(b.add("LessOrEqual", [key_positions, ends]), boolean=True))
        core = AttentionCore(
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
        fused.set_output(0, merge_heads(b, append_attention(b, core, fused.name), self.heads * width))
        for i in (1, 2):
            fused.set_output(i, present[i - 1])

    def _refuse_unsupported(self) -> None:
        check_groups(self.heads, self.groups)
        other = sorted(n for n, v in self.attributes.items() if n not in _KNOWN and not _is_default(n, v))
        if other:
            raise UnsupportedError(f"its attribute {other[0]} is {self.attributes[other[0]]!r}, which is not expanded")
        for i, name in _REFUSED.items():
            if self.fused.input(i):
                raise UnsupportedError(f"it has input {name}, which is not expanded")
        if self.fused.output(3) and self.fused.is_used(3):
            raise UnsupportedError("its output output_qk [B, H, S, T] is used")

    def _split_packed(self, width: int) -> tuple[str, str, str]:
        b = self.builder
        outputs = [b.name() for _ in range(3)]
        sizes = b.constant([self.heads * width, self.groups * width, self.groups * width])
        b.nodes.append(helper.make_node("Split", [self.fused.input(0), sizes], outputs, name=outputs[0], axis=2))
        return outputs[0], outputs[1], outputs[2]

    def _past_length(self) -> Int:
        """The length of the cache before this step, 0 without one."""
        past = self.fused.past(3, 4)
        if not past[0]:
            return integer(0)
        shape = require_shape(self.symbolic, past[0], "past_key", (4,))
        require_shape(self.symbolic, past[1], "past_value", (4,))
        return shape[2]

    def _lengths(self, query: tuple[Int, ...], past: Int) -> str | None:
        """The tensor [B] of each row's last key where it is a run-time operand; None where every row is full."""
        total, tensor = query[1] + past, self.fused.input(5)
        total_value = self.symbolic.value(self.fused.input(6))
        elements = None if total_value is None else total_value.elements()
        if elements is None or len(elements) != 1 or to_int(elements[0]) != total:
            raise UnsupportedError(
                f"total_sequence_length {self.fused.input(6)!r} is not known to be {total}, the length of past and "
                "query"
            )
        require_shape(self.symbolic, tensor, "seqlens_k", (1,))
        value = self.symbolic.value(tensor)
        if value is not None and to_int(value.at((var("row"),))) == total - integer(1):
            return None
        if past != integer(0):
            raise UnsupportedError(
                f"seqlens_k {tensor!r} is known at run time only, not from shapes to be {total} - 1: rows of its cache may have "
                "different lengths, and their new keys different positions"
            )
        return tensor

    def _check_window(self, lengths: str | None) -> None:
        """Refuses nodes on which the runtime's kernels differ: windows of queries beyond the end of their row.

        One kernel ends such a window at the query itself. The other one, for softcaps and for nodes that write no cache,
        ends it at the row's last key.
        """
        other = self.attributes.get("softcap") or not (self.fused.output(1) and self.fused.output(2))
        if lengths is not None and self._band().left is not None and other:
            raise UnsupportedError(
                f"it has a window, seqlens_k {lengths!r} known at run time only, and a softcap or no cache that it writes: "
                "queries beyond the end of their row then attend to the last keys of the row"
            )

    def _rotate(self, tensor: str, heads: int, width: int, offset: str | None) -> str:
        """Query or key after ONNX Runtime's RotaryEmbedding, which takes the same tables."""
        b, fused = self.builder, self.fused
        table = require_shape(self.symbolic, fused.input(7), "cos_cache", (2,))
        part = 2 * require_size(table[1], "the width of cos_cache")
        position_ids = fused.input(9)
        if not position_ids:
            position_ids = offset if offset is not None else b.constant([0])
        attributes: dict[str, Any] = {
            "interleaved": int(self.attributes.get("rotary_interleaved", 0)),
            "num_heads": heads,
        }
        if part != width:
            attributes["rotary_embedding_dim"] = part
        inputs = [tensor, position_ids, fused.input(7), fused.input(8)]
        return b.add("RotaryEmbedding", inputs, domain="com.microsoft", **attributes)

    def _band(self) -> Band:
        window = int(self.attributes.get("local_window_size", -1))
        causal = bool(self.attributes.get("causal", 1))
        if window == 0 or (window > 0 and not causal):
            raise UnsupportedError(
                f"local_window_size is {window} with causal {int(causal)}, which no runtime computes"
            )
        return Band(window - 1 if window > 0 else None, 0 if causal else None)

    def _bias_masks(self) -> list[ScoreMask]:
        tensor = self.fused.input(10)
        if not tensor:
            return []
        require_shape(self.symbolic, tensor, "attention_bias", (4,))
        return [ScoreMask(additive_mask(self.builder, self.symbolic, tensor))]


def _is_default(name: str, value: object) -> bool:
    """Whether an attribute has the value that its absence means."""
    if name in ("k_quant_type", "v_quant_type"):
        return value in (b"", b"NONE")
    if name == "qk_norm_epsilon":
        return True  # belongs to a normalization whose weights are refused
    return value in (0, -1)
