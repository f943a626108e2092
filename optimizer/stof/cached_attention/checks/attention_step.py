# SPDX-License-Identifier: Apache-2.0
"""What one step over a contiguous cache and one over pages have in common: heads, mask, rotary embedding, norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from stof.arguments.precisions import RoundedOperands
from stof.cached_attention.node_site import NodeSite
from stof.sparsify.patterns import Pattern


@dataclass(frozen=True, kw_only=True)
class AttentionStep:
    """How the new tokens of a step attend.

    Attributes:
        num_heads: H.
        kv_num_heads: G.
        window: W, the keys that a query attends to at most; 0: all.
        scale: of the scores; 0: 1/sqrt(D).
        softcap: 0: none.
        cos: [M, R / 2]; None: no rotary embedding.
        sin: likewise.
        interleaved: rotates neighbours, not halves.
        rotary_offset: the first rotated element of a head; 0 but for pages.
        sink: [H].
        query_norm: [D].
        key_norm: likewise.
        epsilon: of the norms.
        pattern: a declared condition on (h, q, k) besides; None: none.
        tables: what the operator's mask looks up, from table0 on; nothing here reads them.
        precision: to which the operands of both products are rounded; None: they are not.
    """

    num_heads: int
    kv_num_heads: int
    window: int = 0
    scale: float = 0.0
    softcap: float = 0.0
    cos: np.ndarray | None = None
    sin: np.ndarray | None = None
    interleaved: bool = False
    rotary_offset: int = 0
    sink: np.ndarray | None = None
    query_norm: np.ndarray | None = None
    key_norm: np.ndarray | None = None
    epsilon: float = 1e-6
    pattern: Pattern | None = None
    tables: tuple[np.ndarray, ...] = ()
    precision: RoundedOperands | None = None

    @property
    def attention(self) -> dict[str, Any]:
        """The fields of this class, for a step over another kind of cache."""
        return {f.name: getattr(self, f.name) for f in fields(AttentionStep)}


def attention_of_site(site: NodeSite, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The fields of :class:`AttentionStep` for a site.

    Args:
        site: the site.
        arrays: the inputs of its node by their names in the schema.
    """
    return {
        "num_heads": site.num_heads,
        "kv_num_heads": site.kv_num_heads,
        "window": site.window,
        "scale": site.scale,
        "softcap": site.softcap,
        "cos": arrays.get("cos_cache"),
        "sin": arrays.get("sin_cache"),
        "interleaved": site.is_interleaved,
        "sink": arrays.get("head_sink"),
        "query_norm": arrays.get("q_norm_weight"),
        "key_norm": arrays.get("k_norm_weight"),
        "epsilon": site.norm_epsilon,
        "pattern": None if site.declared is None else site.declared.pattern,
        "tables": tuple(table for _, table in sorted(site.mask_tables.items())),
    }
