# SPDX-License-Identifier: Apache-2.0
"""A paged site: a PagedAttention node, with the facts that decisions need."""

from __future__ import annotations

from dataclasses import dataclass

from stof.cached_attention.node_site import NodeSite
from stof.graph.node_fields import input_of
from stof.symbolic import Int

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


@dataclass(frozen=True, kw_only=True)
class PagedNode(NodeSite):
    """A PagedAttention with what it computes by; its caches are [blocks, block_size, G, D]."""

    def input(self, name: str) -> str:
        """The tensor of an input by its name in ``INPUTS``; empty where it is absent."""
        return input_of(self.node, INPUT_INDEX[name])

    @property
    def read_inputs(self) -> list[str]:
        """The tensors of ``OP_INPUTS``, empty where absent."""
        return [input_of(self.node, i) if i < len(INPUTS) else "" for i in range(len(OP_INPUTS))]

    @property
    def rotary_offset(self) -> int:
        """The first rotated element of a head."""
        return int(self.attributes.get("rotary_offset", 0)) if self.does_rotary else 0

    @property
    def operator_attributes(self) -> dict[str, int | float | str]:
        return super().operator_attributes | {"rotary_offset": self.rotary_offset}


@dataclass(frozen=True, kw_only=True)
class PagedSite(PagedNode):
    """A PagedAttention that can be replaced, with its sizes. The node has no input for a declared pattern.

    Attributes:
        tokens: N.
        batch: B, the number of sequences.
        blocks: of the cache.
        block_size: rows of a block.
        columns: of the block table.
    """

    tokens: Int
    batch: Int
    blocks: Int
    block_size: Int
    columns: Int

    @property
    def read_inputs(self) -> list[str]:
        tables = self.table_inputs
        return [*super().read_inputs[: len(INPUTS)], *tables, *[""] * (len(OP_INPUTS) - len(INPUTS) - len(tables))]

    @property
    def features(self) -> tuple[str, ...]:
        block = f" of {self.block_size.constant} rows" if self.block_size.constant else ""
        slots = ("slot mapping",) if self.input("slot_mapping") else ()
        return (f"pages{block}", *super().features, *slots)
