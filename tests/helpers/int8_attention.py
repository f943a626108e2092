# SPDX-License-Identifier: Apache-2.0
"""Inputs for the fp64 model of attention with 8-bit operands, and attention without them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stof.attention.checks.eight_bit_model import KeyValueHead, Scheme


@dataclass(frozen=True)
class Inputs:
    """Queries [S, D], keys and values [T, D] of one head."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def attend(inputs: Inputs, scheme: Scheme, allowed: np.ndarray | None = None) -> np.ndarray:
    """The output [S, D] of the scheme. ``allowed`` [S, T] is the mask; every row has a key."""
    return KeyValueHead.of(inputs.key, inputs.value, scheme).attend(inputs.query, allowed=allowed)


def exact(inputs: Inputs, allowed: np.ndarray | None = None) -> np.ndarray:
    """Attention."""
    scores = inputs.query @ inputs.key.T / np.sqrt(inputs.query.shape[1])
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(weights @ inputs.value / weights.sum(1, keepdims=True))


def draw(family: str, queries: int, keys: int, size: int, seed: int) -> Inputs:
    """Gaussian inputs; with 30 added to four channels of the keys; or whose first key is a sink.

    A sink lies along a direction that all queries share and takes most of the weight; its value is small.
    """
    rng = np.random.default_rng(seed)
    query, key, value = (rng.standard_normal((rows, size)) for rows in (queries, keys, keys))
    if family == "offset":
        key[:, rng.choice(size, 4, replace=False)] += 30
    if family == "sink":
        direction = rng.standard_normal(size)
        direction /= np.linalg.norm(direction)
        query += 6 * direction
        key[0] = 20 * np.sqrt(size / 128) * direction
        value[0] *= 0.1
    return Inputs(query, key, value)


def relative_rms(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.sqrt(((found - wanted) ** 2).mean() / (wanted**2).mean()))
