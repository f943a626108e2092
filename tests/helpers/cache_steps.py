# SPDX-License-Identifier: Apache-2.0
"""One step of attention over a KV cache in fp64: caches after the step, and results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Step:
    """A step of B sequences: ``new`` tokens behind ``past`` ones, by sequence where they differ.

    Attributes:
        new: S.
        past: keys before the step, the largest of all sequences.
        batch: B.
    """

    new: int
    past: int
    batch: int = 2

    def lengths(self, rng: np.random.Generator) -> np.ndarray:
        """Keys before the step of each sequence: the first has all."""
        found = rng.integers(0, self.past, self.batch, endpoint=True)
        found[0] = self.past
        return found


STEPS = tuple(Step(s, p) for s in (1, 3, 16, 300) for p in (0, 1, 517))


def append(cache: np.ndarray, new: np.ndarray, first: np.ndarray, *, circular: bool = False) -> np.ndarray:
    """A cache [B, G, C, D] with new rows [B, G, S, D] behind ``first`` [B] others."""
    found = cache.copy()
    for b, start in enumerate(first):
        rows = start + np.arange(new.shape[2])
        found[b][:, rows % cache.shape[2] if circular else rows] = new[b]
    return found


def attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    allowed: np.ndarray,
    *,
    bias: np.ndarray | float = 0.0,
    softcap: float = 0.0,
) -> np.ndarray:
    """Attention of query [B, H, S, D] over keys and values [B, G, T, D], fp64 [B, H, S, Dv].

    Args:
        query: the queries.
        key: the keys.
        value: the values.
        allowed: the pairs, bool, as it broadcasts to [B, H, S, T]. A query without a key gives 0.
        bias: is added to the scores.
        softcap: of the scores before that; 0: none.
    """
    repeat = query.shape[1] // key.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), repeat, axis=1) for x in (key, value))
    scores = query.astype(np.float64) @ keys.swapaxes(-1, -2) / np.sqrt(query.shape[-1])
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(allowed, scores + bias, -np.inf)
    largest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(largest), largest, 0.0))
    total = weights.sum(axis=-1, keepdims=True)
    found: np.ndarray = (weights / np.where(total == 0, 1.0, total)) @ values
    return found


def split_heads(packed: np.ndarray, heads: int) -> np.ndarray:
    """[B, S, H * D] as [B, H, S, D]."""
    return packed.reshape(*packed.shape[:2], heads, -1).swapaxes(1, 2)


def merge_heads(split: np.ndarray) -> np.ndarray:
    """[B, H, S, D] as [B, S, H * D]."""
    return split.swapaxes(1, 2).reshape(split.shape[0], split.shape[2], -1)


def are_close(found: np.ndarray, wanted: np.ndarray, dtype: type) -> bool:
    """Whether results of fp32 or fp16 are those of fp64, up to rounding."""
    tolerance = 2e-5 if dtype is np.float32 else 4e-3
    return found.shape == wanted.shape and np.allclose(found.astype(np.float64), wanted, rtol=tolerance, atol=tolerance)
