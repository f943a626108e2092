# SPDX-License-Identifier: Apache-2.0
"""A cache site: an attention node that reads and writes a contiguous KV cache, with the facts that decisions need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from stof.cached_attention.block_layout import BlockLayout
from stof.cached_attention.node_site import NodeSite
from stof.graph.node_fields import input_of
from stof.mask.expression import MaskExpression
from stof.symbolic import Int

GROUP_QUERY, SPARSE = "GroupQueryAttention", "SparseAttention"
OP = "StofCachedAttention"
# The inputs of GroupQueryAttention; StofCachedAttention has the same at the same indices.
INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"),
    *("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale"),
    *("q_norm_weight", "k_norm_weight"),
)
OUTPUTS = ("output", "present_key", "present_value")
INPUT_INDEX = {name: i for i, name in enumerate(INPUTS)}
# All inputs and outputs of StofCachedAttention. The last ones are for choose pages.
PAST_BOUNDS, PRESENT_BOUNDS = "past_page_bounds", "present_page_bounds"
OP_INPUTS = (*INPUTS, "query_seqlens", "table0", "table1", "table2", "table3", PAST_BOUNDS)
OP_OUTPUTS = (*OUTPUTS, PRESENT_BOUNDS)
# Where SparseAttention has the inputs of GroupQueryAttention; its lengths count keys, not the last key.
SPARSE_INDEX = {
    **{name: i for i, name in enumerate(INPUTS[:5])},
    **{"total_sequence_length": 7, "seqlens_k": 8, "cos_cache": 9, "sin_cache": 10},
}
SPARSE_ROWS, SPARSE_COLUMNS = 5, 6  # the inputs of SparseAttention with its layouts
# The element types of quantized caches, with their names for people.
QUANTIZED = {int(TensorProto.INT8): "int8", int(TensorProto.FLOAT8E4M3FN): "fp8"}


@dataclass(frozen=True, kw_only=True)
class CacheSite(NodeSite):
    """A GroupQueryAttention or SparseAttention over contiguous caches [B, G, C, D]. A declared pattern's bias is an input of it.

    Attributes:
        sliding: the cache holds the last positions only (``sliding_window_cache``).
        batch: B.
        queries: S.
        capacity: rows C of the past.
        total: total_sequence_length where it follows from sizes.
        layout: the blocks that the heads of a SparseAttention attend; None: all.
        quantized: the element type of quantized caches; 0: they have that of query.
        scales: of quantized keys and values, "tensor" or "channel": what has a scale of its own.
    """

    sliding: bool
    batch: Int
    queries: Int
    capacity: Int
    total: Int | None
    layout: BlockLayout | None = None
    quantized: int = 0
    scales: tuple[str, str] = ("", "")

    def input(self, name: str) -> str:
        """The tensor of an input by its name in ``INPUTS``; empty where it is absent."""
        if name == "attention_bias" and self.declared is not None:
            return self.declared.own_bias  # the other one is the pattern
        index = INPUT_INDEX[name] if self.layout is None else SPARSE_INDEX.get(name)
        return "" if index is None else input_of(self.node, index)

    @property
    def cache_dtype(self) -> int:
        return self.quantized or self.dtype

    @property
    def uncounted_keys(self) -> int:
        """The valid keys of a sequence minus its element of ``seqlens_k``."""
        return 1 if self.layout is None else 0

    @property
    def read_inputs(self) -> list[str]:
        """The node's tensors in the order of ``OP_INPUTS``, empty where one is absent or the node does not read it.

        The layouts of a SparseAttention are table1 and table2: the function body reads them, the mask does not.
        """
        tensors = [self.input(name) for name in INPUTS]
        if not self.does_rotary:
            tensors[INPUT_INDEX["cos_cache"]] = tensors[INPUT_INDEX["sin_cache"]] = ""
        layouts = ["", ""]
        if self.layout is not None:
            layouts = [input_of(self.node, i) for i in (SPARSE_ROWS, SPARSE_COLUMNS)]
        return [*tensors, "", "", *layouts, "", ""]

    @property
    def has_zero_sink(self) -> bool:
        """Whether the node adds one to the denominator of each softmax (``smooth_softmax``), as a sink of zeros does."""
        return self.attributes.get("smooth_softmax", 0) == 1 and not self.input("head_sink")

    @property
    def mask(self) -> MaskExpression:
        return super().mask if self.layout is None else self.layout.mask

    @property
    def mask_tables(self) -> Mapping[str, np.ndarray]:
        if self.layout is None:
            return super().mask_tables
        return {} if self.layout.table is None else {"table0": self.layout.table}

    @property
    def features(self) -> tuple[str, ...]:
        features = {
            "smooth softmax": self.has_zero_sink,
            "bias": bool(self.input("attention_bias")),
            "sliding-window cache": self.sliding,
            self._quantization: bool(self.quantized),
        }
        blocks = () if self.layout is None else self.layout.describe(self.num_heads, self.kv_num_heads)
        return (*super().features, *(name for name, holds in features.items() if holds), *blocks)

    @property
    def operator_attributes(self) -> dict[str, int | float | str]:
        return super().operator_attributes | {"sliding_window_cache": self.window if self.sliding else 0}

    @property
    def _quantization(self) -> str:
        keys, values = self.scales
        scales = f"scales per {keys}" if keys == values else f"scales of keys per {keys}, of values per {values}"
        return f"{QUANTIZED.get(self.quantized, '')} cache, {scales}"


def count_held_rows(lengths: np.ndarray, capacity: int, window: int) -> np.ndarray:
    """How many rows [B] a sliding-window cache of ``capacity`` rows holds after ``lengths`` [B] positions."""
    step = capacity - window + 1
    moved = lengths - step * -(-(lengths - capacity) // step)
    return np.asarray(np.where(lengths <= capacity, lengths, moved))
