# SPDX-License-Identifier: Apache-2.0
"""One decoder step in fp64 NumPy, written from docs/reference/cached-attention.md alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Allowed = Callable[[int, int, npt.NDArray[np.int64], npt.NDArray[np.int64]], npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class DecoderStep:
    """What a step is asked for. Arrays are fp64; `allowed(b, h, q, k)` says which keys a query attends.

    Attributes:
        query: [B, S, H, D]; key, value: [B, S, G, D].
        past: the valid keys and values of each sequence, a list of B pairs [G, n, D].
        lengths: [B], valid keys after the step.
        is_first_prompt: the new tokens of every sequence begin at position 0.
        cos, sin: [positions, R / 2], or None.
    """

    query: Array
    key: Array
    value: Array
    past: list[tuple[Array, Array]]
    lengths: npt.NDArray[np.int64]
    is_first_prompt: bool
    allowed: Allowed
    scale: float
    softcap: float = 0.0
    cos: Array | None = None
    sin: Array | None = None
    is_interleaved: bool = False
    position_ids: npt.NDArray[np.int64] | None = None
    query_norm: Array | None = None
    key_norm: Array | None = None
    epsilon: float = 1e-6
    bias: Array | None = None  # [B, H, S, keys]
    sink: Array | None = None  # [H]


def _normalize(x: Array, weight: Array | None, epsilon: float) -> Array:
    if weight is None:
        return x
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight


def _rotate(x: Array, cos: Array, sin: Array, is_interleaved: bool) -> Array:
    """x: [S, heads, D]; cos, sin: [S, R / 2]."""
    half = cos.shape[1]
    c, s = cos[:, None, :], sin[:, None, :]
    out = x.copy()
    if is_interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out[..., 0 : 2 * half : 2] = first * c - second * s
        out[..., 1 : 2 * half : 2] = second * c + first * s
    else:
        first, second = x[..., :half], x[..., half : 2 * half]
        out[..., :half] = first * c - second * s
        out[..., half : 2 * half] = second * c + first * s
    return out


def run_step(step: DecoderStep) -> tuple[Array, list[tuple[Array, Array]]]:
    """The output [B, S, H, D], NaN in rows of padding, and all keys and values of each sequence, [G, keys, D]."""
    batch, length, heads, _size = step.query.shape
    groups = step.key.shape[2]
    output = np.full(step.query.shape, np.nan)
    present = []
    for b in range(batch):
        start = 0 if step.is_first_prompt else int(step.lengths[b]) - length
        count = min(length, int(step.lengths[b]) - start)  # the others are padding
        query = _normalize(step.query[b], step.query_norm, step.epsilon)
        key = _normalize(step.key[b], step.key_norm, step.epsilon)
        if step.cos is not None and step.sin is not None:
            at = start + np.arange(length) if step.position_ids is None else step.position_ids[b]
            query = _rotate(query, step.cos[at], step.sin[at], step.is_interleaved)
            key = _rotate(key, step.cos[at], step.sin[at], step.is_interleaved)
        keys = np.concatenate([step.past[b][0], key[:count].transpose(1, 0, 2)], 1)
        values = np.concatenate([step.past[b][1], step.value[b][:count].transpose(1, 0, 2)], 1)
        present.append((keys, values))
        positions = np.arange(keys.shape[1])
        for h in range(heads):
            g = h // (heads // groups)
            scores = step.scale * query[:count, h] @ keys[g].T
            if step.softcap > 0:
                scores = step.softcap * np.tanh(scores / step.softcap)
            if step.bias is not None:
                scores = scores + step.bias[b, h, :count, : keys.shape[1]]
            rows = start + np.arange(count)
            mask = step.allowed(b, h, rows[:, None], positions[None, :]) & (positions[None, :] <= rows[:, None])
            scores = np.where(mask, scores, -np.inf)
            top = scores.max(-1, keepdims=True)
            top = np.where(np.isfinite(top), top, 0.0)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            if step.sink is not None:
                total = total + np.exp(step.sink[h] - top)
            output[b, :count, h] = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0) @ values[g]
    return output, present
