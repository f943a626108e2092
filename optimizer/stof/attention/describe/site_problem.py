# SPDX-License-Identifier: Apache-2.0
"""What one attention asks of kernels. Equal problems have the same kernels, times and estimates, wherever they stand."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from stof.attention.expand.working_copy import stands_for_fused
from stof.mask.expression import MaskExpression
from stof.mask.site import AttentionSite, EmptyRows, LiftedMask, arrays_of

WEIGHT_BY_RANGE = "weight by range"  # among ``roundings``


@dataclass(frozen=True)
class SiteProblem:
    """An attention as a kernel sees it. Names and layouts of tensors are for emission alone, and no part of it.

    Attributes:
        mask: which pairs attend.
        tables: constants that the mask indexes: name, dtype, shape and bytes.
        operands: roles of what the mask reads at run time, in the order of the operator's inputs.
        empty_rows: what fully masked rows give.
        num_heads: H.
        kv_num_heads: G.
        head_size: D.
        value_head_size: Dv.
        dtype: ONNX element type of query.
        scale: of the scores.
        softcap: of the scores; 0: none.
        query_offset: 1: the queries are the last S of T positions.
        has_bias: a tensor is added to the scores.
        has_relative_bias: a table by distance is added to the scores.
        has_sink: each row's softmax has a logit more.
        relative_terms: role, index, heads of the relative table (H or 1), whether its rows have a row bias.
        has_relative_factor: the table by distance is multiplied by a number of each query.
        replaces_fused_node: the baseline is one fused node of the runtime.
        roundings: roles of what is rounded to 8 bits, and element types of the codes of query, key and value; empty: nothing is.
    """

    mask: MaskExpression
    tables: tuple[tuple[str, str, tuple[int, ...], bytes], ...]
    operands: tuple[str, ...]
    empty_rows: EmptyRows
    num_heads: int
    kv_num_heads: int
    head_size: int
    value_head_size: int
    dtype: int
    scale: float
    softcap: float = 0.0
    query_offset: int = 0
    has_bias: bool = False
    has_relative_bias: bool = False
    has_sink: bool = False
    relative_terms: tuple[tuple[str, str, int, bool], ...] = ()
    has_relative_factor: bool = False
    replaces_fused_node: bool = False
    roundings: tuple[str, ...] = ()

    @classmethod
    def of(cls, site: AttentionSite, mask: LiftedMask) -> SiteProblem:
        """The problem of a site with its mask."""
        return cls(
            mask.expression,
            mask.tables,
            tuple(o.role for o in mask.operands),
            mask.empty_rows,
            site.num_heads,
            site.kv_num_heads,
            site.head_size,
            site.value_head_size,
            site.dtype,
            site.scale,
            site.softcap,
            site.query_offset,
            has_bias=bool(mask.bias),
            has_relative_bias=mask.relative is not None,
            has_sink=site.sink is not None,
            relative_terms=tuple((t.role, t.index.text, t.heads, bool(t.table.shift)) for t in mask.relative_terms),
            has_relative_factor=mask.relative_factor is not None,
            replaces_fused_node=stands_for_fused(site),
            roundings=_rounded_roles(site),
        )

    @property
    def table_arrays(self) -> dict[str, np.ndarray]:
        """The tables by their names."""
        return arrays_of(self.tables)

    @property
    def has_kernel_choice(self) -> bool:
        """Whether several kernels can run it: biases, softcap and scales that are not positive have one kernel."""
        return not (
            self.relative_terms or self.has_bias or self.has_relative_bias or self.softcap > 0 or self.scale <= 0
        )

    @property
    def cache_key(self) -> dict[str, object]:
        """The problem in the tuning cache. Earlier versions wrote the same text: what they measured is found again."""
        return {
            "op": "StofAttention",
            "mask": self.mask.text,
            "tables": [[n, t, list(s), hashlib.sha256(data).hexdigest()] for n, t, s, data in self.tables],
            "operands": sorted(self.operands),
            "empty_rows": self.empty_rows.value,
            "heads": [self.num_heads, self.kv_num_heads],
            "sizes": [self.head_size, self.value_head_size],
            "dtype": self.dtype,
            "softcap": self.softcap,
            "query_offset": self.query_offset,
            # Earlier versions have no such problems.
            **({"relative_terms": [list(t) for t in self.relative_terms]} if self.relative_terms else {}),
            **({"relative_factor": True} if self.has_relative_factor else {}),
            **({"roundings": list(self.roundings)} if self.roundings else {}),
        }


def _rounded_roles(site: AttentionSite) -> tuple[str, ...]:
    if site.roundings is None:
        return ()
    by_range = [WEIGHT_BY_RANGE] if site.roundings.is_weight_by_range else []
    return (*site.roundings.operands, *by_range, *map(str, site.roundings.code_types))
