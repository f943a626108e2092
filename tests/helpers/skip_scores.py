# SPDX-License-Identifier: Apache-2.0
"""Inputs whose scores differ by blocks of keys, and how far ``skip_threshold`` may move an output."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 64


def set_levels(rng: np.random.Generator, query: npt.NDArray[Any], key: npt.NDArray[Any], spread: float = 20.0) -> None:
    """Has scores of a block of keys lie about one level, between -spread and spread; the head size is 64.

    query, key: [..., heads, rows, 64] of any leading axes, changed in place: element 0 of each row.
    """
    assert query.shape[-1] == key.shape[-1] == 64
    query[..., 0] = 4
    blocks = -(-key.shape[-2] // BLOCK)
    levels = rng.uniform(-spread, spread, (*key.shape[:-2], blocks)) * 2  # 4 * level / sqrt(64)
    key[..., 0] = np.repeat(levels, BLOCK, -1)[..., : key.shape[-2]]


def attend_exactly(
    query: npt.NDArray[Any], key: npt.NDArray[Any], value: npt.NDArray[Any], allowed: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    """Attention in fp64 over all tiles. query: [H, S, 64]; key, value: [G, T, 64]; allowed: [S, T]."""
    group = query.shape[0] // key.shape[0]
    keys, values = (np.repeat(x.astype(np.float64), group, 0) for x in (key, value))
    scores = np.where(allowed, query.astype(np.float64) @ keys.swapaxes(-1, -2) / 8, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights @ values / weights.sum(-1, keepdims=True))


def most_moved(threshold: float, value: npt.NDArray[Any]) -> float:
    """How far an output may be from the exact one: the mass left out is at most threshold times what is kept."""
    return 2 * threshold / (1 + threshold) * float(np.nanmax(np.abs(value.astype(np.float64))))
