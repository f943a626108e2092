# SPDX-License-Identifier: Apache-2.0
"""A cache site: an attention node that reads and writes a KV cache, with the facts that decisions need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.cached_attention.block_layout import BlockLayout
from stof.sparsify.sparsity import DeclaredPattern
from stof.symbolic import Int

MICROSOFT, GROUP_QUERY, SPARSE = "com.microsoft", "GroupQueryAttention", "SparseAttention"
OP = "StofCachedAttention"
# The inputs of GroupQueryAttention; StofCachedAttention has the same at the same indices.
INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "seqlens_k", "total_sequence_length"),
    *("cos_cache", "sin_cache", "position_ids", "attention_bias", "head_sink", "k_scale", "v_scale"),
    *("q_norm_weight", "k_norm_weight"),
)
OUTPUTS = ("output", "present_key", "present_value")
INPUT_INDEX = {name: i for i, name in enumerate(INPUTS)}
# All inputs of StofCachedAttention.
OP_INPUTS = (*INPUTS, "query_seqlens", "table0", "table1", "table2", "table3")
# Where SparseAttention has the inputs of GroupQueryAttention; its lengths count keys, not the last key.
SPARSE_INDEX = {
    **{name: i for i, name in enumerate(INPUTS[:5])},
    **{"total_sequence_length": 7, "seqlens_k": 8, "cos_cache": 9, "sin_cache": 10},
}
SPARSE_ROWS, SPARSE_COLUMNS = 5, 6  # the inputs of SparseAttention with its layouts
# The element types of quantized caches, with their names for people.
QUANTIZED = {int(TensorProto.INT8): "int8", int(TensorProto.FLOAT8E4M3FN): "fp8"}


@dataclass(frozen=True)
class CacheSite:
    """A node that can be replaced.

    Attributes:
        name: for options, plans and reports.
        node: the GroupQueryAttention or SparseAttention.
        num_heads: H.
        kv_num_heads: G.
        head_size: D.
        dtype: ONNX element type T of query, and of caches that are not quantized.
        window: W, the keys that a query attends to at most; 0: all before it.
        sliding: the cache holds the last positions only (``sliding_window_cache``).
        rotary_size: R, the elements of a head that are rotated; 0: none, or not known before the run.
        batch: B.
        queries: S.
        capacity: rows C of the past.
        total: total_sequence_length where it follows from sizes.
        layout: the blocks that the heads of a SparseAttention attend; None: all.
        declared: the pattern that --sparsify puts on it; its bias is an input of the node. None: none.
        quantized: the element type of quantized caches; 0: they have that of query.
        scales: of quantized keys and values, "tensor" or "channel": what has a scale of its own.
    """

    name: str
    node: onnx.NodeProto
    num_heads: int
    kv_num_heads: int
    head_size: int
    dtype: int
    window: int
    sliding: bool
    rotary_size: int
    batch: Int
    queries: Int
    capacity: Int
    total: Int | None
    layout: BlockLayout | None = None
    declared: DeclaredPattern | None = None
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
        """The ONNX element type of the caches."""
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
        found = [self.input(name) for name in INPUTS]
        if not self.does_rotary:
            found[INPUT_INDEX["cos_cache"]] = found[INPUT_INDEX["sin_cache"]] = ""
        layouts = ["", ""]
        if self.layout is not None:
            layouts = [input_of(self.node, i) for i in (SPARSE_ROWS, SPARSE_COLUMNS)]
        return [*found, "", "", *layouts, ""]

    @property
    def attributes(self) -> dict[str, Any]:
        """The node's attributes by name; strings as bytes."""
        return attributes_of(self.node)

    @property
    def is_packed(self) -> bool:
        """Whether query, key and value lie in one tensor."""
        return not self.input("key")

    @property
    def does_rotary(self) -> bool:
        """Whether new queries and keys are rotated."""
        return bool(self.attributes.get("do_rotary", 0))

    @property
    def has_zero_sink(self) -> bool:
        """Whether the node adds one to the denominator of each softmax (``smooth_softmax``), as a sink of zeros does."""
        return self.attributes.get("smooth_softmax", 0) == 1 and not self.input("head_sink")

    @property
    def scale(self) -> float:
        """The factor of the scores; 0: 1/sqrt(D)."""
        return float(self.attributes.get("scale", 0.0))

    @property
    def softcap(self) -> float:
        """The soft limit of the scores; 0: none."""
        return float(self.attributes.get("softcap", 0.0))

    @property
    def norm_epsilon(self) -> float:
        """What the RMS norms of queries and keys add to the mean square."""
        return float(self.attributes.get("qk_norm_epsilon", 1e-6))

    @property
    def mask(self) -> str:
        """The mask expression in absolute positions."""
        if self.layout is not None:
            return self.layout.mask
        if self.declared is not None:
            return self.declared.pattern.mask.text
        return f"k <= q and q - k < {self.window}" if self.window else "k <= q"

    @property
    def table_inputs(self) -> list[str]:
        """The tensors of the mask's tables, in the order of ``table0``."""
        tables = {} if self.declared is None else self.declared.tables
        return [tables[name] for name in sorted(tables)]

    @property
    def mask_tables(self) -> Mapping[str, np.ndarray]:
        """The tables that the mask reads, by name."""
        if self.layout is not None:
            return {} if self.layout.table is None else {"table0": self.layout.table}
        return {} if self.declared is None else self.declared.pattern.tables

    @property
    def reach(self) -> int:
        """Keys beyond which the mask shows what it forbids: the window, or those of a declared pattern; 0: none."""
        return self.window if self.declared is None else self.declared.pattern.reach

    @property
    def heads(self) -> str:
        """The head counts for people."""
        return f"{self.num_heads} heads" + (f" on {self.kv_num_heads}" if self.kv_num_heads != self.num_heads else "")

    @property
    def features(self) -> tuple[str, ...]:
        """What the node does besides attention, for people."""
        rotary = f"rotary of {self.rotary_size}" if self.rotary_size else "rotary"
        interleaved = ", interleaved" if self.attributes.get("rotary_interleaved", 0) else ""
        found = {
            "packed QKV": self.is_packed,
            "q/k norm": bool(self.input("q_norm_weight")),
            rotary + interleaved: self.does_rotary,
            "sinks": bool(self.input("head_sink")),
            "smooth softmax": self.has_zero_sink,
            f"softcap {self.softcap:g}": bool(self.softcap),
            "bias": bool(self.input("attention_bias")),
            "sliding-window cache": self.sliding,
            self._quantization: bool(self.quantized),
        }
        blocks = () if self.layout is None else self.layout.describe(self.num_heads, self.kv_num_heads)
        return (*(name for name, holds in found.items() if holds), *blocks)

    @property
    def _quantization(self) -> str:
        keys, values = self.scales
        scales = f"scales per {keys}" if keys == values else f"scales of keys per {keys}, of values per {values}"
        return f"{QUANTIZED.get(self.quantized, '')} cache, {scales}"


def input_of(node: onnx.NodeProto, index: int) -> str:
    """An input's tensor; empty where it is absent."""
    return str(node.input[index]) if index < len(node.input) else ""


def output_of(node: onnx.NodeProto, index: int) -> str:
    """An output's tensor; empty where the node does not write it."""
    return str(node.output[index]) if index < len(node.output) else ""


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """A node's attributes by name; strings as bytes."""
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def count_held_rows(lengths: np.ndarray, capacity: int, window: int) -> np.ndarray:
    """How many rows [B] a sliding-window cache of ``capacity`` rows holds after ``lengths`` [B] positions."""
    step = capacity - window + 1
    moved = lengths - step * -(-(lengths - capacity) // step)
    return np.asarray(np.where(lengths <= capacity, lengths, moved))
