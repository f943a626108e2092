# SPDX-License-Identifier: Apache-2.0
"""What attention over a KV cache asks of kernels, which its cost model estimates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from stof.cached_attention.block_layout import BlockLayout
from stof.cached_attention.paged.site import PagedSite
from stof.cached_attention.site import CacheSite
from stof.mask.expression import MaskExpression
from stof.symbolic import Int


@dataclass(frozen=True, kw_only=True)
class CacheProblem:
    """Attention over a cache as a kernel sees it. The node and the names of its tensors are for emission alone.

    Attributes:
        mask: which pairs attend, in absolute positions.
        num_heads: H.
        kv_num_heads: G.
        head_size: D.
        dtype: ONNX element type of query.
        cache_dtype: of the caches.
        window: the keys that a query attends to at most; 0: all before it.
        is_paged: keys and values lie in pages.
        is_sliding: the cache holds the last positions only.
        batch: B; None for pages.
        capacity: rows of the past; None for pages.
        layout: the blocks that the heads of a SparseAttention attend; None: all.
        read_density: the share of the cache that a declared pattern reads; None: none is declared.
    """

    mask: MaskExpression
    num_heads: int
    kv_num_heads: int
    head_size: int
    dtype: int
    cache_dtype: int
    window: int
    is_paged: bool = False
    is_sliding: bool = False
    batch: Int | None = None
    capacity: Int | None = None
    layout: BlockLayout | None = None
    read_density: float | None = None

    @classmethod
    def of(cls, site: CacheSite | PagedSite) -> CacheProblem:
        """The problem of a site."""
        facts = cls(
            mask=site.mask,
            num_heads=site.num_heads,
            kv_num_heads=site.kv_num_heads,
            head_size=site.head_size,
            dtype=site.dtype,
            cache_dtype=site.cache_dtype,
            window=site.window,
            is_paged=isinstance(site, PagedSite),
            read_density=None if site.declared is None else site.declared.facts.read_density,
        )
        if isinstance(site, PagedSite):
            return facts
        return replace(facts, is_sliding=site.sliding, batch=site.batch, capacity=site.capacity, layout=site.layout)

    @property
    def is_quantized(self) -> bool:
        """Whether the caches have another element type than query."""
        return self.cache_dtype != self.dtype
