# SPDX-License-Identifier: Apache-2.0
"""Attention with 8-bit operands in fp64 (docs/design/attention-8bit.md), with each choice of its scheme as an option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_SCALE = 2.0**-60
MOST_FP8 = 448.0
MEAN_KEYS = 1024  # of a head, spread over all, whose mean is taken from the keys
_LOG2_E = float(np.log2(np.e))


@dataclass(frozen=True)
class Scheme:
    """What is quantized, and how. The defaults are those of the kernel with weights and values in e4m3."""

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
    weight_type: np.dtype[Any] | None = None  # to which weights are rounded that are not quantized; None: they are not


FULL_PRECISION = Scheme(quantize_scores=False, quantize_weights=False, quantize_values=False, headroom=0.0, slack=0.0)
SCORES_ALONE = Scheme(quantize_weights=False, quantize_values=False, headroom=0.0, slack=14.0)


@dataclass(frozen=True)
class KeyValueHead:
    """Keys [T, D] and values [T, Dv] of one head as kernels have them in memory.

    Attributes:
        scheme: by which they are quantized.
        key: codes of int8, or the keys themselves.
        key_scale: of each key, [T, 1].
        mean: of at most MEAN_KEYS keys that are not padding, which was taken from all of them: [D].
        value: numbers that codes of e4m3 stand for, or the values themselves.
    """

    scheme: Scheme
    key: np.ndarray
    key_scale: np.ndarray
    mean: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, key: np.ndarray, value: np.ndarray, scheme: Scheme, real: np.ndarray | None = None) -> KeyValueHead:
        """Quantizes keys and values.

        Args:
            key: fp64 [T, D].
            value: fp64 [T, Dv].
            scheme: how.
            real: which keys are not padding, bool [T]; None: all. The others are zeros from here on.
        """
        mean, scale = np.zeros(key.shape[1]), np.ones((len(key), 1))
        if real is not None:
            key, value = (np.where(real[:, None], x, 0.0) for x in (key, value))
        if scheme.quantize_scores:
            if scheme.remove_mean and len(key):
                mean = _mean_of(key, real)
                key = key - mean if real is None else np.where(real[:, None], key - mean, 0.0)
            groups = _key_groups(len(key), scheme)
            largest = np.zeros(groups.max(initial=-1) + 1)
            np.maximum.at(largest, groups, np.abs(key).max(1, initial=0.0))
            scale = np.maximum(largest / 127, LEAST_SCALE)[groups, None]
            key = np.rint(key / scale)
        if scheme.quantize_values:
            value = np.concatenate(
                [_round_values(value[i : i + scheme.tile]) for i in range(0, len(value), scheme.tile)]
            )
        return cls(scheme, key, scale, mean, value)

    def attend(
        self,
        query: np.ndarray,
        scale: float | None = None,
        allowed: np.ndarray | None = None,
        sink: float | None = None,
    ) -> np.ndarray:
        """The output [S, Dv] of queries.

        Args:
            query: fp64 [S, D].
            scale: of the scores; None: 1/sqrt(D).
            allowed: the mask, bool [S, T]; None: every pair. Rows without a key give NaN where there is no sink.
            sink: a logit more in every row's softmax.
        """
        scheme = self.scheme
        factor = _LOG2_E * (query.shape[1] ** -0.5 if scale is None else scale)
        scores = self._scores(query) * factor
        if allowed is not None:
            scores = np.where(allowed, scores, -np.inf)
        rows, size = len(scores), self.value.shape[1]
        row_max, row_sum = np.full(rows, -np.inf), np.zeros(rows)
        output, products = np.zeros((rows, size)), np.zeros((rows, size))
        for index, first in enumerate(range(0, len(self.key), scheme.tile)):
            tile = scores[:, first : first + scheme.tile]
            top = tile.max(1)
            # A row without a key so far has the row max -inf.
            with np.errstate(invalid="ignore"):
                raised = (top > -np.inf) & ~(top - row_max <= scheme.slack)
                now = np.where(raised, top - scheme.headroom, row_max)
                rescale = np.where(raised & (row_max > -np.inf), np.exp2(row_max - now), 1.0)
            row_max = now
            output, products, row_sum = output * rescale[:, None], products * rescale[:, None], row_sum * rescale
            weights = np.exp2(tile - np.where(row_max > -np.inf, row_max, 0.0)[:, None])
            row_sum += weights.sum(1)
            products = self._add_products(products, weights, first)
            if scheme.promote_every > 0 and (index + 1) % scheme.promote_every == 0:
                output, products = output + products, np.zeros_like(products)
        if sink is not None:
            # Scores lack the product of the query and the mean, which the epilogue gives back.
            logit = sink * _LOG2_E - (query @ self.mean) * factor
            row_sum = row_sum + np.exp2(logit - np.where(row_max > -np.inf, row_max, logit))
        with np.errstate(invalid="ignore"):
            return np.asarray((output + products) / row_sum[:, None])

    def _scores(self, query: np.ndarray) -> np.ndarray:
        """Products of queries and keys, but for a number that all keys of a row share."""
        if not self.scheme.quantize_scores:
            return np.asarray(query @ self.key.T)
        scale = np.maximum(np.abs(query).max(1, keepdims=True, initial=0.0) / 127, LEAST_SCALE)
        # Sums of codes are exact in fp32: at most 127 * 127 * 256 < 2^22.
        codes = np.rint(query / scale).astype(np.float32) @ self.key.T.astype(np.float32)
        return np.asarray(codes * scale * self.key_scale.T)

    def _add_products(self, products: np.ndarray, weights: np.ndarray, first: int) -> np.ndarray:
        """Sums of weights times values with those of one tile, whose first key is given."""
        scheme, values = self.scheme, self.value[first : first + weights.shape[1]]
        if scheme.quantize_weights:
            weights = to_fp8(weights)
        elif scheme.weight_type is not None:
            weights = weights.astype(scheme.weight_type).astype(np.float64)
        if not (scheme.accumulator_bits and scheme.quantize_weights and scheme.quantize_values):
            return np.asarray(products + weights @ values)
        for k in range(0, len(values), 32):
            products = truncate(products + weights[:, k : k + 32] @ values[k : k + 32], scheme.accumulator_bits)
        return products


def to_fp8(x: np.ndarray) -> np.ndarray:
    """The nearest numbers of e4m3, at most 448 in magnitude."""
    size = np.abs(x.astype(np.float64))
    bits = size.view(np.int64)
    # To 3 bits of fraction, ties to even; on the bits, since this is most of the model's time.
    normal = (bits + (1 << 48) - 1 + (bits >> 49 & 1) & -1 << 49).view(np.float64)
    rounded = np.where(size < 2.0**-6, np.rint(size * 512) / 512, normal)
    return np.asarray(np.copysign(np.minimum(rounded, MOST_FP8), x))


def truncate(x: np.ndarray, bits: int) -> np.ndarray:
    """Numbers with ``bits`` of fraction, rounded towards zero, as the fp8 accumulator of compute capability 9.0."""
    if bits == 0:
        return x
    return np.asarray((np.ascontiguousarray(x, np.float64).view(np.int64) & -1 << 52 - bits).view(np.float64))


def _mean_of(key: np.ndarray, real: np.ndarray | None) -> np.ndarray:
    """The mean [D] of some keys, spread over all, that are not padding; zeros where all of these are."""
    count = min(len(key), MEAN_KEYS)
    some = np.arange(count) * len(key) // count
    some = some if real is None else some[real[some]]
    return np.asarray(key[some].sum(0) / max(len(some), 1))


def _key_groups(keys: int, scheme: Scheme) -> np.ndarray:
    """The group of each key, whose keys share a scale."""
    key = np.arange(keys)
    if scheme.key_scales == "key":
        return key
    tile, inside = np.divmod(key, scheme.tile)
    if scheme.key_scales == "tile":
        return tile
    # What a thread of the kernel meets: two keys of every eight, the first eight of a tile apart.
    return np.asarray(tile * 8 + np.where(inside < 8, 0, 4) + inside % 8 // 2)


def _round_values(tile: np.ndarray) -> np.ndarray:
    """What the codes of a tile's values stand for."""
    scale = max(float(np.abs(tile).max(initial=0.0)) / MOST_FP8, LEAST_SCALE)
    return to_fp8(tile / scale) * scale
