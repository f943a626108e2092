# SPDX-License-Identifier: Apache-2.0
"""Which neurons StofSparseMLP selects, in fp64, and thresholds at which rounding cannot select others.

An operator may select another neuron where a score is within rounding of its threshold. For a comparison without such neurons,
their thresholds are moved away from the score, to the side that keeps what fp64 selects. Other thresholds stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from stof.sparse_mlp.checks.oracle import activate
from stof.sparse_mlp.limits import mlp_limits
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.site import MlpSite
from stof.sparse_mlp.stored_selector import dequantize_factor, make_stored_arrays

_ROUNDING = 2.0**-18  # of the sum of the absolute values of what is added: fp32 sums of up to 2^12 blocks
_FUNCTION = 2.0**-17  # of an activation: polynomials in fp32
_STEPS = 127  # of int8


@dataclass(frozen=True)
class SelectedNeurons:
    """The selection of some tokens.

    Attributes:
        active: bool [T, F], in fp64.
        near: bool [T, F], where a score is within rounding of its threshold.
        aside: fp32 [T, F], thresholds away from the scores, at which the selection is the same.
    """

    active: np.ndarray
    near: np.ndarray
    aside: np.ndarray

    def thresholds(self, thresholds: np.ndarray) -> np.ndarray:
        """Thresholds [T, F] for an operator: the ones given, [1] or [F], but for scores within rounding of them."""
        return np.where(self.near, self.aside, thresholds).astype(np.float32)


def select_neurons(site: MlpSite, gate: np.ndarray, inputs: np.ndarray | None) -> SelectedNeurons:
    """The selection of a site, by its selector as the operator stores it.

    Args:
        site: whose neurons are predicted.
        gate: [T, F].
        inputs: tokens [T, K]; None where the operator reads the gate alone.
    """
    arrays = make_stored_arrays(site)
    if site.selection == "predictor":
        assert inputs is not None
        assert site.selector is not None
        scores, bounds = _scores(site.selector, arrays, inputs.astype(np.float64))
    else:
        values = gate.astype(np.float64)
        scores = np.abs(activate(site.activation, values))
        bounds = _FUNCTION * (scores + np.abs(values)) if site.activation != "none" else 0 * values
    threshold = np.broadcast_to(arrays["threshold"].astype(np.float64), scores.shape)
    with np.errstate(invalid="ignore"):
        active = ~(scores <= threshold)  # NaN is active
        near = np.abs(scores - threshold) <= bounds
        away = 2 * bounds + 2.0**-20 * np.abs(scores) + 1e-30
    aside = np.where(active, scores - away, scores + away)
    return SelectedNeurons(active, near, aside.astype(np.float32))


def _scores(
    selector: NeuronSelector, arrays: Mapping[str, np.ndarray], inputs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """A predictor's scores [T, F] and how far rounding may take them."""
    down, up = (
        dequantize_factor(arrays, name, rows, size).astype(np.float64)
        for name, rows, size in (
            ("predictor_down", selector.rank, inputs.shape[1]),
            ("predictor_up", len(arrays["predictor_up"]), selector.rank),
        )
    )
    projected = inputs @ down.T
    if selector.predictor_activation == "relu":  # it makes no error larger
        projected = np.maximum(projected, 0)
    scores = projected @ up.T
    # Errors of the projected values, then what the second factor makes of them, and its own.
    error = _ROUNDING * (np.abs(inputs) @ np.abs(down).T)
    up_error = _ROUNDING * (np.abs(projected) @ np.abs(up).T)
    if "predictor_down_scales" in arrays:
        error = error + _half_steps(inputs) @ np.abs(down).T
        up_error = up_error + _half_steps(np.abs(projected) + error) @ np.abs(up).T
    return scores, error @ np.abs(up).T + up_error


def _half_steps(values: np.ndarray) -> np.ndarray:
    """How far values may be rounded to int8 in blocks with a scale each, with some room for ties."""
    size, block = values.shape[1], mlp_limits().predictor_multiple_of
    padded = np.pad(np.abs(values), ((0, 0), (0, -size % block)))
    largest = padded.reshape(len(values), -1, block).max(2)
    return np.asarray(np.repeat(largest * (0.5001 / _STEPS), block, axis=1)[:, :size])
