# SPDX-License-Identifier: Apache-2.0
"""Attention with 8-bit operands in fp64 (docs/design/attention-8bit.md), with each choice of its scheme as an option."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LEAST_SCALE = 2.0**-60
MOST_FP8 = 448.0


@dataclass(frozen=True)
class Scheme:
    """What is quantized, and how. The defaults are the kernel's."""

    quantize_scores: bool = True
    quantize_weights: bool = True
    quantize_values: bool = True
    remove_mean: bool = True
    key_scales: str = "groups"  # of a tile: "tile", "groups" (eight), "key"
    tile: int = 128
    headroom: float = 7.0  # log2 of the largest weight when the row max is set; the row max stays up to `slack`
    slack: float = 8.75
    accumulator_bits: int = 13  # of the fraction, in fp8 products; 0: exact
    promote_every: int = 1  # tiles whose products are added up before they are added in full precision; 0: never


SCORES_ALONE = Scheme(quantize_weights=False, quantize_values=False, headroom=0.0, slack=14.0)


@dataclass(frozen=True)
class Inputs:
    """Queries [S, D], keys and values [T, D] of one head."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def to_fp8(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of e4m3, at most 448 in magnitude."""
    size = np.minimum(np.abs(x), MOST_FP8)
    exponent = np.maximum(np.floor(np.log2(np.maximum(size, 2.0**-30))), -6)
    unit = 2.0 ** (exponent - 3)
    return np.asarray(np.copysign(np.minimum(np.rint(size / unit) * unit, MOST_FP8), x))


def truncate(x: np.ndarray, bits: int) -> np.ndarray:
    """Numbers with ``bits`` of fraction, rounded towards zero, as the fp8 accumulator of compute capability 9.0."""
    if bits == 0:
        return x
    significand, exponent = np.frexp(x)
    return np.asarray(np.ldexp(np.trunc(significand * 2.0 ** (bits + 1)), exponent - bits - 1))


def key_groups(keys: int, scheme: Scheme) -> np.ndarray:
    """The group of each key, whose keys share a scale."""
    key = np.arange(keys)
    if scheme.key_scales == "key":
        return key
    tile, inside = np.divmod(key, scheme.tile)
    if scheme.key_scales == "tile":
        return tile
    # What a thread of the kernel meets: two keys of every eight, the first eight of a tile apart.
    return np.asarray(tile * 8 + np.where(inside < 8, 0, 4) + inside % 8 // 2)


def scores_of(inputs: Inputs, scheme: Scheme) -> np.ndarray:
    """Scores in units of log2, but for a number that all keys of a row share."""
    query, key = inputs.query, inputs.key
    factor = np.log2(np.e) / np.sqrt(query.shape[1])
    if not scheme.quantize_scores:
        return np.asarray(query @ key.T * factor)
    if scheme.remove_mean:
        key = key - key.mean(0)
    query_scale = np.maximum(np.abs(query).max(1, keepdims=True) / 127, LEAST_SCALE)
    groups = key_groups(len(key), scheme)
    largest = np.zeros(groups.max() + 1)
    np.maximum.at(largest, groups, np.abs(key).max(1))
    key_scale = np.maximum(largest / 127, LEAST_SCALE)[groups]
    products = np.rint(query / query_scale) @ np.rint(key / key_scale[:, None]).T
    return np.asarray(products * query_scale * key_scale * factor)


def attend(inputs: Inputs, scheme: Scheme, allowed: np.ndarray | None = None) -> np.ndarray:
    """The output [S, D] of the scheme. ``allowed`` [S, T] is the mask; every row has a key."""
    scores = scores_of(inputs, scheme)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    rows, size = len(scores), inputs.value.shape[1]
    row_max, row_sum = np.full(rows, -np.inf), np.zeros(rows)
    output, products = np.zeros((rows, size)), np.zeros((rows, size))
    for index, first in enumerate(range(0, len(inputs.key), scheme.tile)):
        tile = scores[:, first : first + scheme.tile]
        top = tile.max(1)
        # A row without a key so far has the row max -inf.
        with np.errstate(invalid="ignore"):
            raised = (top > -np.inf) & ~(top - row_max <= scheme.slack)
            now = np.where(raised, top - scheme.headroom, row_max)
            factor = np.where(raised & (row_max > -np.inf), np.exp2(row_max - now), 1.0)
        row_max = now
        output, products, row_sum = output * factor[:, None], products * factor[:, None], row_sum * factor
        weights = np.exp2(tile - np.where(row_max > -np.inf, row_max, 0.0)[:, None])
        row_sum += weights.sum(1)
        values = inputs.value[first : first + scheme.tile]
        if scheme.quantize_weights:
            weights = to_fp8(weights)
        if scheme.quantize_values:
            scale = max(np.abs(values).max() / MOST_FP8, LEAST_SCALE)
            values = to_fp8(values / scale) * scale
        bits = scheme.accumulator_bits if scheme.quantize_weights and scheme.quantize_values else 0
        for k in range(0, len(values), 32):
            products = truncate(products + weights[:, k : k + 32] @ values[k : k + 32], bits)
        if scheme.promote_every > 0 and (index + 1) % scheme.promote_every == 0:
            output, products = output + products, np.zeros_like(products)
    return np.asarray((output + products) / row_sum[:, None])


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
