# SPDX-License-Identifier: Apache-2.0
"""Which query rows and heads of a large site are computed in fp64: a full score tensor in fp64 would be too large and slow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

MOST_SCORES = 1 << 22  # of a site that is computed whole, and of a sample
_LEAST_ROWS = 48  # of a sample before heads are left out
_EDGES = (64, 128)  # query rows of tiles of the kernels
_TOP_SHARE = 0.25  # of the rows: those that are farthest off, and as many without a key


@dataclass(frozen=True)
class RowSample:
    """Some query rows and heads of a site, in ascending order; the batch is whole."""

    rows: np.ndarray
    heads: np.ndarray

    def pick(self, array: np.ndarray) -> np.ndarray:
        """The sampled part of what broadcasts to [B, H, S, ...], of at most four axes."""
        part: np.ndarray = np.expand_dims(array, tuple(range(4 - array.ndim)))
        _, heads, rows = part.shape[:3]
        part = part if heads == 1 else part[:, self.heads]
        return part if rows == 1 else part[:, :, self.rows]


def choose_rows(away: np.ndarray, empty: np.ndarray, keys: int, most: int = MOST_SCORES) -> RowSample | None:
    """The rows and heads of a site to compute; None: all of them, of a site that is not large.

    The first and the last row, rows at the edges of tiles, those that are farthest off, rows without a key, and random ones.

    Args:
        away: how far the op is off the original's nodes, by row [B, H, S]; infinite where only one of them is finite.
        empty: whether a row [B, H, S] may have no key.
        keys: T.
        most: scores of a sample.
    """
    batch, heads, length = away.shape
    if away.size * keys <= most:
        return None
    per_row = batch * keys
    rows = min(length, max(most // (per_row * heads), _LEAST_ROWS))
    some_heads = min(heads, max(1, most // (per_row * rows)))
    rows = min(rows, max(4, most // (per_row * some_heads)))
    rng = np.random.default_rng([heads, length, keys])
    worst = away.max(axis=(0, 2))
    chosen = _fill(some_heads, [[int(worst.argmax()), 0, heads - 1], rng.permutation(heads)])
    return RowSample(_choose(away[:, chosen], empty[:, chosen], rows, rng), chosen)


def _choose(away: np.ndarray, empty: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    length = away.shape[2]
    worst, share = away.max(axis=(0, 1)), max(1, int(_TOP_SHARE * count))
    edges = sorted({r for tile in _EDGES for r in (tile - 1, tile, (length - 1) // tile * tile - 1) if r < length})
    groups: list[Iterable[int]] = [
        [0, length - 1],
        np.argsort(-worst, kind="stable")[:share],
        edges,
        rng.permutation(np.flatnonzero(empty.any(axis=(0, 1))))[:share],
        rng.permutation(length),
    ]
    return _fill(count, groups)


def _fill(count: int, groups: Iterable[Iterable[int]]) -> np.ndarray:
    indices: dict[int, None] = {}
    for group in groups:
        for i in group:
            if len(indices) < count and i >= 0:
                indices[int(i)] = None
    return np.array(sorted(indices), np.int64)
