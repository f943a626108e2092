# SPDX-License-Identifier: Apache-2.0
"""The output of an MLP in fp64, and how far a result is from it where rounding decides which neurons are active."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

PREDICTOR_BLOCK = 32  # values that share a scale in the int8 matmuls of a quantized predictor
_ROWS = 4096  # of weights at a time
_ROUNDOFF = 2.0**-24
# Additions in a row of an fp32 sum: slabs of 1024 values in 4 lanes or more, then lanes and slabs.
_ADDITIONS = 1024 / 4 + 16

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Expected:
    """What a correct kernel gives.

    Attributes:
        output: [T, N], without the uncertain neurons.
        active: [T, F], which neurons are active in fp64.
        uncertain: for each token the neurons whose score is within the predictor's rounding of the threshold.
        contributions: for each token what these neurons would add, [count, N].
    """

    output: Array
    active: Array
    uncertain: list[Array]
    contributions: list[Array]

    def error(self, found: Array) -> float:
        """The largest difference, over the largest value. An uncertain neuron may be active or not, as fits better."""
        differences = found.astype(np.float64) - self.output
        for difference, rows in zip(differences, self.contributions, strict=True):
            if rows.size:
                shares = np.linalg.lstsq(rows.T, difference, rcond=None)[0]
                difference -= (shares > 0.5) @ rows
        return float(np.abs(differences).max() / np.abs(self.output).max())


def quantize(x: Array, deviation: Array | float = 0.0) -> tuple[Array, Array]:
    """Rounds vectors to int8 in blocks, each with the scale of its largest value, as quantized predictors do.

    Args:
        x: [T, size] in fp64, a known distance from the fp32 values that the kernel rounds.
        deviation: this distance at most, broadcast to x.

    Returns:
        The rounded values in fp64, and how far those of the kernel may be from them.
    """
    tokens, size = x.shape
    count = -(-size // PREDICTOR_BLOCK)
    padding = ((0, 0), (0, count * PREDICTOR_BLOCK - size))
    blocks = np.pad(x, padding).reshape(tokens, count, PREDICTOR_BLOCK)
    off = np.pad(np.broadcast_to(deviation, x.shape), padding).reshape(blocks.shape)
    scale = np.maximum(np.abs(blocks).max(2, keepdims=True) / 127, 1e-37)
    exact = blocks / scale
    values = np.rint(exact)
    # Values and scales in steps: the distance of both, and three roundings of fp32 on the way.
    largest = off.max(2, keepdims=True) / scale
    steps = off / scale + largest + 4 * 127 * _ROUNDOFF
    is_tie = np.abs(np.abs(exact - values) - 0.5) <= steps
    rounded, doubt = values * scale, (is_tie + largest + 4 * 127 * _ROUNDOFF) * scale
    shape = (tokens, count * PREDICTOR_BLOCK)
    return rounded.reshape(shape)[:, :size], doubt.reshape(shape)[:, :size]


class MlpReference:
    """An MLP of the benchmark in fp64.

    Args:
        weights: of a layer, as the benchmark draws them.
        precision: ``fp32`` or ``int4``.
        mode: ``plain``, ``gated`` or ``predicted``.
        F: the number of neurons.
        N: the size of an output token, and of an input token.
        R: the rank of the predictor.
    """

    def __init__(self, weights: Mapping[str, Array], precision: str, mode: str, F: int, N: int, R: int) -> None:
        self._weights, self._precision, self._mode = weights, precision, mode
        self._F, self._N, self._R = F, N, R

    def predictor(self, name: str) -> Array:
        """A factor of the predictor."""
        found = self._weights[name]
        if self._precision == "fp32":
            return found.astype(np.float64)
        size = self._N if name == "predictor_down" else self._R
        return (found[:, :size].astype(np.float64) - 128) * self._weights[f"{name}_scales"][:, None]

    def scores(self, x: Array) -> tuple[Array, Array]:
        """The scores of the predictor, and how far a correct kernel's may be from them, [T, F] both."""
        down, up = self.predictor("predictor_down"), self.predictor("predictor_up")
        wide, doubt = x.astype(np.float64), np.zeros(x.shape)
        if self._precision != "fp32":
            wide, doubt = quantize(wide)
        projected = wide @ down.T
        off = doubt @ np.abs(down).T + self._rounding(self._N) * (np.abs(wide) @ np.abs(down).T)
        if self._precision != "fp32":
            projected, off = quantize(projected, off)
        rounding = self._rounding(self._R) * (np.abs(projected) @ np.abs(up).T)
        return projected @ up.T, off @ np.abs(up).T + rounding

    def _rounding(self, size: int) -> float:
        """The rounding of a sum of the predictor, over the sum of absolute values. Sums in a block of int8 are exact."""
        return _ROUNDOFF * (_ADDITIONS if self._precision == "fp32" else size / PREDICTOR_BLOCK + 8)

    def dequantized(self, name: str, rows: slice | Array) -> Array:
        """Rows of a weight."""
        found = self._weights[name][rows]
        if self._precision == "fp32":
            return found.astype(np.float64)
        flat = found.reshape(found.shape[0], int(np.prod(found.shape[1:])))
        values = np.stack([flat & 15, flat >> 4], 2).reshape(flat.shape[0], 2 * flat.shape[1]).astype(np.float64) - 8
        return values * float(self._weights[f"{name}_scales"].flat[0])

    def _hidden(self, x: Array, shift: Array, rows: slice | Array) -> Array:
        """Hidden values of neurons as if all were active."""
        gate = x @ self.dequantized("gate", rows).T + (0 if self._mode == "predicted" else shift)
        a: Array = np.maximum(gate, 0)
        return a if self._mode == "plain" else a * (x @ self.dequantized("up", rows).T)

    def expected(self, x: Array, shift: Array) -> Expected:
        """The output for tokens x [T, N] at a bias of the gate, or a threshold of the scores."""
        wide = x.astype(np.float64)
        output = np.zeros((x.shape[0], self._N))
        is_predicted = self._mode == "predicted"
        scores, doubt = self.scores(x) if is_predicted else (np.zeros(0), np.zeros(0))
        active = np.zeros((x.shape[0], self._F), bool)
        for first in range(0, self._F, _ROWS):
            rows = slice(first, first + _ROWS)
            h = self._hidden(wide, shift, rows)
            active[:, rows] = scores[:, rows] > shift if is_predicted else h != 0
            certain = scores[:, rows] > shift + doubt[:, rows] if is_predicted else active[:, rows]
            output += (h * certain) @ self.dequantized("down", rows)
        uncertain = [np.zeros(0, np.int64)] * x.shape[0]
        if is_predicted:
            uncertain = [np.flatnonzero(near) for near in np.abs(scores - shift) <= doubt]
        contributions = [
            self._hidden(token[None], shift, near).T * self.dequantized("down", near)
            for token, near in zip(wide, uncertain, strict=True)
        ]
        return Expected(output, active, uncertain, contributions)
