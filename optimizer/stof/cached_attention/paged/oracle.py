# SPDX-License-Identifier: Apache-2.0
"""StofPagedAttention in NumPy, in fp64 or another type: the contract of docs/reference/paged-attention.md for one step.

Each sequence is a step over a contiguous cache, which is gathered from its blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stof.cached_attention.checks.attention_step import AttentionStep
from stof.cached_attention.checks.oracle import CacheStep, compute_step


@dataclass(frozen=True, kw_only=True)
class PagedStep(AttentionStep):
    """One step of B sequences. Arrays have the layouts of the contract; all floats one type T.

    Attributes:
        query: [N, H·D], or packed [N, (H + 2G)·D], and then ``key`` and ``value`` are None.
        key: [N, G·D].
        value: likewise.
        key_cache: [blocks, block_size, G, D].
        value_cache: likewise.
        cumulative: [B + 1].
        past: [B].
        table: [B, columns].
    """

    query: np.ndarray
    key: np.ndarray | None
    value: np.ndarray | None
    key_cache: np.ndarray
    value_cache: np.ndarray
    cumulative: np.ndarray
    past: np.ndarray
    table: np.ndarray

    def rows_of(self, sequence: int, count: int) -> np.ndarray:
        """The rows of the cache, seen as [rows, G, D], at the first positions of a sequence."""
        size = self.key_cache.shape[1]
        positions = np.arange(count)
        return np.asarray(self.table[sequence][positions // size].astype(np.int64) * size + positions % size)


@dataclass(frozen=True)
class PagedStepResult:
    """Output [N, H·D], and the caches [blocks, block_size, G, D]; rows without a new key are as before."""

    output: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray


def compute_paged_step(
    step: PagedStep, dtype: type[np.floating[Any]] = np.float64, storage: np.dtype | None = None
) -> PagedStepResult:
    """The results of a step without slot_mapping.

    Args:
        step: its inputs.
        dtype: what is computed in.
        storage: the type that rotated queries, keys and the output are rounded to; None: they are not.
    """
    groups = step.kv_num_heads
    size = step.key_cache.shape[3]
    output = np.zeros((len(step.query), step.num_heads * size), dtype)
    caches = [x.astype(dtype).reshape(-1, groups, size) for x in (step.key_cache, step.value_cache)]
    for b, before in enumerate(step.past):
        begin, end = int(step.cumulative[b]), int(step.cumulative[b + 1])
        if begin == end:
            continue
        total = int(before) + end - begin
        rows = step.rows_of(b, total)
        past = [np.ascontiguousarray(x[rows].swapaxes(0, 1))[None] for x in caches]
        one = CacheStep(
            query=step.query[None, begin:end],
            key=None if step.key is None else step.key[None, begin:end],
            value=None if step.value is None else step.value[None, begin:end],
            past_key=past[0],
            past_value=past[1],
            lengths=np.array([total], np.int64),
            total=total,
            **step.attention,
        )
        result = compute_step(one, dtype, storage)
        output[begin:end] = result.output[0]
        for cache, present in zip(caches, (result.key, result.value), strict=True):
            cache[rows[int(before) :]] = present[0, :, int(before) : total].swapaxes(0, 1)
    shape = step.key_cache.shape
    return PagedStepResult(output, caches[0].reshape(shape), caches[1].reshape(shape))
