# SPDX-License-Identifier: Apache-2.0
"""A paged site: a PagedAttention node, with the facts that decisions need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from stof.cached_attention.site import MICROSOFT, attributes_of, input_of
from stof.sparsify.sparsity import DeclaredPattern
from stof.symbolic import Int

__all__ = [
    "INPUTS",
    "INPUT_INDEX",
    "MICROSOFT",
    "OP",
    "OP_INPUTS",
    "OUTPUTS",
    "PAGED",
    "PagedNode",
    "PagedSite",
    "input_of",
]

PAGED = "PagedAttention"
OP = "StofPagedAttention"
# The inputs of PagedAttention; StofPagedAttention has the same at the same indices.
INPUTS = (
    *("query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens", "block_table"),
    *("cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight", "k_scale", "v_scale"),
    "attention_metadata",
)
OUTPUTS = ("output", "key_cache_out", "value_cache_out")
INPUT_INDEX = {name: i for i, name in enumerate(INPUTS)}
# All inputs of StofPagedAttention.
OP_INPUTS = (*INPUTS, "table0", "table1", "table2", "table3")


@dataclass(frozen=True)
class PagedNode:
    """A PagedAttention with what it computes by.

    Attributes:
        name: for options, plans and reports.
        node: the PagedAttention.
        num_heads: H.
        kv_num_heads: G.
        head_size: D.
        dtype: ONNX element type T of query and caches.
        window: W, the keys that a query attends to at most; 0: all before it.
        rotary_size: R, the elements of a head that are rotated; 0: none, or not known before the run.
    """

    name: str
    node: onnx.NodeProto
    num_heads: int
    kv_num_heads: int
    head_size: int
    dtype: int
    window: int
    rotary_size: int

    def input(self, name: str) -> str:
        """The tensor of an input by its name in ``INPUTS``; empty where it is absent."""
        return input_of(self.node, INPUT_INDEX[name])

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
    def rotary_offset(self) -> int:
        """The first rotated element of a head."""
        return int(self.attributes.get("rotary_offset", 0)) if self.does_rotary else 0

    @property
    def is_interleaved(self) -> bool:
        """Whether neighbours are rotated, not halves."""
        return bool(self.attributes.get("rotary_interleaved", 0))

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


@dataclass(frozen=True)
class PagedSite(PagedNode):
    """A node that can be replaced, with its sizes.

    Attributes:
        tokens: N.
        batch: B, the number of sequences.
        blocks: of the cache.
        block_size: rows of a block.
        columns: of the block table.
        declared: the pattern that --sparsify puts on it, and the names that its tables get; the node has no input for it.
    """

    tokens: Int
    batch: Int
    blocks: Int
    block_size: Int
    columns: Int
    declared: DeclaredPattern | None = None

    @property
    def cache_dtype(self) -> int:
        """The ONNX element type of the caches."""
        return self.dtype

    @property
    def read_inputs(self) -> list[str]:
        """The tensors of ``OP_INPUTS``, empty where absent."""
        tables = self.table_inputs
        given = [input_of(self.node, i) for i in range(len(INPUTS))]
        return [*given, *tables, *[""] * (len(OP_INPUTS) - len(INPUTS) - len(tables))]

    @property
    def mask(self) -> str:
        """The mask expression in absolute positions."""
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
        interleaved = ", interleaved" if self.is_interleaved else ""
        block = f" of {self.block_size.constant} rows" if self.block_size.constant else ""
        found = {
            f"pages{block}": True,
            "packed QKV": self.is_packed,
            "q/k norm": bool(self.input("q_norm_weight")),
            rotary + interleaved: self.does_rotary,
            "sinks": bool(self.input("head_sink")),
            f"softcap {self.softcap:g}": bool(self.softcap),
            "slot mapping": bool(self.input("slot_mapping")),
        }
        return tuple(name for name, holds in found.items() if holds)
