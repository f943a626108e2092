# SPDX-License-Identifier: Apache-2.0
"""What a pattern costs: the share of pairs that it keeps, of keys that groups read, and whether the cache can shrink."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stof.errors import ArgumentError
from stof.sparsify.patterns import Pattern

LENGTH = 32768  # tokens at which densities are given, or as many as a table has
_ROWS = 48  # queries of a density
_FIRST_ROWS = 160  # queries, the first ones, that are looked at besides
_SMALL = 512  # tokens of a square in which every pair is looked at
_LONGEST = 16384  # tokens over which single columns are followed
_COLUMNS = 96


@dataclass(frozen=True)
class PatternFacts:
    """What the report says of a pattern.

    Attributes:
        length: tokens of a prompt that densities are of.
        density: allowed pairs over causal ones, or over all where the pattern is not causal; the mean of all heads.
        read_density: the same for the keys that some query head of a group attends.
        is_per_kv_head: the query heads of each group attend the same keys, so that both densities are equal.
        is_cache_efficient: a key that one query drops is attended by no later one, in what was looked at.
        is_causal: whether the pattern is.
    """

    length: int
    density: float
    read_density: float
    is_per_kv_head: bool
    is_cache_efficient: bool
    is_causal: bool = True


def measure_pattern(pattern: Pattern) -> PatternFacts:
    """Looks at samples of the pattern.

    Raises:
        ArgumentError: when a query has no key.
    """
    heads = pattern.heads
    reads_heads = "h" in pattern.condition.reads
    groups = range(heads.G) if reads_heads else range(1)
    members = range(heads.group) if reads_heads else range(1)
    whole = min(LENGTH, pattern.horizon or LENGTH)
    rows = np.unique(np.linspace(0, whole - 1, _ROWS).astype(np.int64))
    pairs = float((rows + 1).sum()) if pattern.is_causal else float(rows.size * whole)
    kept = read = 0.0
    is_same, is_efficient = True, pattern.is_causal
    rng = np.random.default_rng(0)
    length = min(_LONGEST, max(2 * _SMALL, 2 * pattern.reach), whole)
    columns = np.unique(np.concatenate([np.arange(8), rng.integers(0, length, _COLUMNS)]).clip(0, length - 1))
    small, every, first = np.arange(min(_SMALL, whole)), np.arange(length), np.arange(min(_FIRST_ROWS, whole))
    for g in groups:
        union: np.ndarray | None = None
        start: np.ndarray | None = None
        for member in members:
            head = g * heads.group + member
            sample = allowed_pairs(pattern, head, rows, np.arange(whole), count=whole)
            square = allowed_pairs(pattern, head, first, first, count=whole)
            _check_rows(pattern, head, rows, sample)
            _check_rows(pattern, head, first, square)
            kept += float(sample.sum())
            if union is not None and start is not None:
                is_same = is_same and bool((sample == union).all() and (square == start).all())
            start = square
            union = sample if union is None else union | sample
            if is_efficient:
                is_efficient = all(
                    _never_returns(allowed_pairs(pattern, head, x, keys, count=len(x)), keys)
                    for x, keys in ((small, small), (every, columns))
                )
        assert union is not None
        read += float(union.sum())
    count = len(groups) * len(members)
    density, read_density = kept / pairs / count, read / pairs / len(groups)
    return PatternFacts(whole, density, read_density, is_same, is_efficient, pattern.is_causal)


def allowed_pairs(
    pattern: Pattern, head: int, queries: np.ndarray, keys: np.ndarray, *, past: int = 0, count: int = 0
) -> np.ndarray:
    """Which keys each query of a head attends, bool [queries, keys].

    Args:
        pattern: of the attention.
        head: h.
        queries: positions.
        keys: likewise.
        past: P, the position of the run's first query.
        count: S, the queries of the run; 0: those up to the last of ``queries``.
    """
    count = count or int(queries[-1]) + 1 - past
    values = {"h": np.int64(head), "q": queries[:, None], "k": keys[None], **pattern.tables}
    values |= {"S": np.int64(count), "P": np.int64(past)}
    causal = (keys[None] <= queries[:, None]) | (not pattern.is_causal)
    return np.asarray(np.broadcast_to(pattern.condition.evaluate(values), causal.shape) & causal)


def _check_rows(pattern: Pattern, head: int, rows: np.ndarray, allowed: np.ndarray) -> None:
    empty = ~allowed.any(-1)
    if empty.any():
        raise ArgumentError(
            f"--sparsify: query {int(rows[empty][0])} of head {head} has no key under {pattern.label!r}; "
            "let each query attend at least its own key (k == q)"
        )


def _never_returns(allowed: np.ndarray, keys: np.ndarray) -> bool:
    """Whether a key [.., columns] that a query [rows, ..] drops stays dropped, for queries from the key on."""
    later = np.arange(len(allowed))[1:, None] > keys[None]
    return not bool((allowed[1:] & ~allowed[:-1] & later).any())
