# SPDX-License-Identifier: Apache-2.0
"""Patterns as boolean masks [heads, S, T], straight from their definitions: nothing here reads a mask expression."""

from __future__ import annotations

import math

import numpy as np


def s2(
    heads: int, size: int, local: int, stride: int, block: int, *, offset: int = 0, relative: bool = False,
    homogeneous: bool = False, dense_heads: int = 0,
) -> np.ndarray:  # fmt: skip
    """S2-Attention over blocks (i, j), one loop an axis."""
    found = np.zeros((heads, size, size), bool)
    step = 0 if homogeneous else max(1, stride // heads)
    for h in range(heads):
        for i in range(-(-size // block)):
            for j in range(i + 1):
                if h >= heads - dense_heads or i - j < local:
                    keep = True
                elif relative:
                    keep = max(0, i - j - local + 1) % stride == 0
                else:
                    keep = (j + h * step + offset) % stride == 0
                found[h, i * block : (i + 1) * block, j * block : (j + 1) * block] = keep
    return found & np.tri(size, dtype=bool)


def window(heads: int, size: int, length: int, sink: int = 0) -> np.ndarray:
    found = np.zeros((heads, size, size), bool)
    for q in range(size):
        found[:, q, max(0, q - length + 1) : q + 1] = True
        found[:, q, : min(sink, q + 1)] = True
    return found


def triangle(heads: int, size: int, sink: int, length: int, last: int, *, first: int = 0, end: int = 0) -> np.ndarray:
    """Of a run whose queries are at positions from ``first`` to ``end``, 0: to the last one."""
    found = window(heads, size, length, sink)
    for q in range(max(first, (end or size) - last), end or size):
        found[:, q, : q + 1] = True
    return found


def radial(heads: int, size: int, tokens: int, sink: int) -> np.ndarray:
    """Radial Attention over frames, pair by pair; bidirectional."""
    found = np.zeros((heads, size, size), bool)
    for q in range(size):
        for k in range(size):
            frames = abs(q // tokens - k // tokens)
            octave = 2 ** math.floor(math.log2(max(frames, 1)))
            apart = abs(q % tokens - k % tokens)
            if octave <= tokens:
                keep = apart + 1 <= tokens / octave
            else:
                keep = apart == 0 and frames % math.ceil(octave / tokens) == 0
            found[:, q, k] = keep or k // tokens < sink
    return found


def blocks(table: np.ndarray, size: int, block: int) -> np.ndarray:
    """A table [heads, M, N]; positions behind it are dense."""
    found = np.ones((len(table), size, size), bool)
    for h, i, j in np.ndindex(*table.shape):
        found[h, i * block : (i + 1) * block, j * block : (j + 1) * block] = table[h, i, j]
    return found & np.tri(size, dtype=bool)


def vertical_slash(columns: list[list[int]], diagonals: list[list[int]], size: int) -> np.ndarray:
    found = np.zeros((len(columns), size, size), bool)
    for h in range(len(columns)):
        for q in range(size):
            found[h, q, [k for k in columns[h] if k <= q]] = True
            found[h, q, [q - d for d in [0, *diagonals[h]] if d <= q]] = True
    return found


def dense(heads: int, size: int) -> np.ndarray:
    return np.broadcast_to(np.tri(size, dtype=bool), (heads, size, size)).copy()


def to_query_heads(mask: np.ndarray, heads: int) -> np.ndarray:
    """The mask of KV heads for the query heads of each group."""
    return np.repeat(mask, heads // len(mask), axis=0)


def attention(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, mask: np.ndarray, lengths: list[int]
) -> np.ndarray:
    """fp64 attention of the last S tokens of sequences.

    Args:
        query: [B, S, H·D].
        keys: [B, G, C, D], in which the rows below ``lengths`` are valid.
        values: likewise.
        mask: [H, most, most] over absolute positions.
        lengths: of each sequence, with the new tokens; a shorter prompt than S has padding behind it.
    """
    batch, count, width = query.shape
    heads, groups, size = len(mask), keys.shape[1], keys.shape[3]
    assert width == heads * size
    found = np.zeros((batch, count, heads, size))
    for b, length in enumerate(lengths):
        first = max(0, length - count)
        for h in range(heads):
            g = h // (heads // groups)
            for i in range(length - first):
                some = np.flatnonzero(mask[h, first + i, :length])
                row = query[b, i, h * size : (h + 1) * size].astype(np.float64)
                scores = keys[b, g, some].astype(np.float64) @ row / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                found[b, i, h] = (weights / weights.sum()) @ values[b, g, some].astype(np.float64)
    return found.reshape(batch, count, width)
