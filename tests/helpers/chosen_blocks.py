# SPDX-License-Identifier: Apache-2.0
"""Choose blocks by its definition in docs/reference/operators.md: which keys ``block_threshold`` keeps, in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 128
POOLED_QUERIES = POOLED_KEYS = 8
NEAR = 0.02  # estimates so near the threshold may be rounded to either side


@dataclass(frozen=True)
class Chosen:
    """What the rows of one sequence attend.

    Attributes:
        kept: [H, S, T], allowed pairs of blocks that are not left out.
        near: [H, S], rows of query blocks in which rounding decides about a key block.
        counted: pairs of rows and existing keys in candidate blocks.
        skipped: those of them that were left out, blocks that rounding decides about not counted.
    """

    kept: npt.NDArray[np.bool_]
    near: npt.NDArray[np.bool_]
    counted: int
    skipped: int


def set_levels(rng: np.random.Generator, query: npt.NDArray[Any], key: npt.NDArray[Any], spread: float = 20.0) -> None:
    """Has some key blocks stand out for some queries; the head size is 64.

    query, key: [..., heads, rows, 64] of any leading axes, changed in place: element 0 of each row.
    """
    rows, keys = query.shape[-2], key.shape[-2]
    signs = rng.choice([-4.0, 4.0], (*query.shape[:-2], -(-rows // 50)))
    query[..., 0] = np.repeat(signs, 50, -1)[..., :rows]
    levels = rng.uniform(-spread, spread, (*key.shape[:-2], -(-keys // 32))) * 2  # 4 * level / sqrt(64)
    key[..., 0] = np.repeat(levels, 32, -1)[..., :keys]


def _pool(rows: npt.NDArray[Any], size: int, exists: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Means of the existing rows, in the type of the rows: [rows, D] -> [means, D], NaN where there is none."""
    found = []
    for first in range(0, len(rows), size):
        own = rows[first : first + size][exists[first : first + size]].astype(np.float32)
        found.append(own.mean(0).astype(rows.dtype) if len(own) else np.full(rows.shape[1], np.nan))
    return np.array(found, np.float64)


def choose(
    query: npt.NDArray[Any],
    key: npt.NDArray[Any],
    allowed: npt.NDArray[np.bool_],
    threshold: float,
    *,
    position: int = 0,
    pad: npt.NDArray[np.bool_] | None = None,
) -> Chosen:
    """The key blocks of each query block of a sequence, with scale 1/8.

    query: [H, S, 64]; key: [G, T, 64]; allowed: [S, T], by mask and lengths; position: P; pad: [T], True for keys that
    exist.
    """
    (H, S, _), (G, T, _) = query.shape, key.shape
    exists = np.full(T, True) if pad is None else pad
    keys = [_pool(key[g], POOLED_KEYS, exists) for g in range(G)]
    kept = np.broadcast_to(allowed & exists, (H, S, T)).copy()
    near, counted, skipped = np.full((H, S), False), 0, 0
    for h in range(H):
        for first in range(0, S, BLOCK):
            last = min(first + BLOCK, S)
            queries = _pool(query[h, first:last], POOLED_QUERIES, np.full(last - first, True))
            estimates = queries @ keys[h // (H // G)].T / 8
            blocks = [slice(k, min(k + BLOCK, T)) for k in range(0, T, BLOCK)]
            candidates = [bool(allowed[first:last, b].any()) for b in blocks]
            of_block = [estimates[:, b.start // POOLED_KEYS : -(-b.stop // POOLED_KEYS)] for b in blocks]
            seen = [np.nan_to_num(e, nan=-np.inf) for e, c in zip(of_block, candidates, strict=True) if c]
            max_estimate = np.concatenate(seen, 1).max(1, keepdims=True) if seen else np.zeros((len(estimates), 1))
            for b, e, c in zip(blocks, of_block, candidates, strict=True):
                if not c or not exists[b].any():
                    continue
                pairs = (last - first) * (b.stop - b.start)
                counted += pairs
                is_diagonal = b.start < position + last and b.stop > position + first
                below = float(np.nan_to_num(e - max_estimate, nan=-np.inf).max())
                margin = below - np.log(threshold)
                if b.start == 0 or is_diagonal or margin >= NEAR or below == 0:
                    continue
                if margin > -NEAR:
                    near[h, first:last] = True
                else:
                    skipped += pairs
                    kept[h, first:last, b] = False
    return Chosen(kept, near, counted, skipped)


def attend(
    query: npt.NDArray[Any], key: npt.NDArray[Any], value: npt.NDArray[Any], kept: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Attention in fp64 with scale 1/8; rows without a key give 0. kept: [H, S, T]."""
    group = query.shape[0] // key.shape[0]
    keys, values = (np.repeat(x.astype(np.float64), group, 0) for x in (key, value))
    scores = np.where(kept, query.astype(np.float64) @ keys.swapaxes(-1, -2) / 8, -np.inf)
    most = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0))
    return np.asarray(weights @ values / np.maximum(weights.sum(-1, keepdims=True), 1e-300))
