# SPDX-License-Identifier: Apache-2.0
"""A rule that selects the neurons of one MLP for each token, as StofSparseMLP applies it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from stof.errors import ArgumentError

Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class NeuronSelector:
    """A rule that selects the neurons of one MLP for each token (docs/reference/sparse-mlp.md).

    With a predictor, a neuron is active where its score is above its threshold. Without one, it is active where the
    magnitude of its activation is. A NaN, in a score or an activation, makes its neuron active.

    ``predictor_up · f(predictor_down · token)`` are the scores, where f is ``predictor_activation``.

    Attributes:
        threshold: fp32 [1], or [F] with one for each neuron.
        predictor_down: fp32 [R, K], or None. R is the rank, K the size of a token.
        predictor_up: fp32 [F, R], or None; given together with ``predictor_down``.
        predictor_activation: ``none``, or ``relu`` as in PowerInfer's predictors.

    Raises:
        ArgumentError: for another type or shape, or values that are not finite.
    """

    threshold: Floats
    predictor_down: Floats | None = None
    predictor_up: Floats | None = None
    predictor_activation: Literal["none", "relu"] = "none"

    def __post_init__(self) -> None:
        """Checks types, shapes and values."""
        if self.predictor_activation not in ("none", "relu"):
            raise ArgumentError(f"predictor_activation is {self.predictor_activation!r}, expected none or relu")
        _check("threshold", self.threshold, 1)
        if (self.predictor_down is None) != (self.predictor_up is None):
            missing = "predictor_down" if self.predictor_down is None else "predictor_up"
            raise ArgumentError(f"a predictor without {missing}; give predictor_down and predictor_up, or neither")
        if self.predictor_down is None or self.predictor_up is None:
            return
        _check("predictor_down", self.predictor_down, 2)
        _check("predictor_up", self.predictor_up, 2)
        neurons, rank = self.predictor_up.shape
        if self.predictor_down.shape[0] != rank:
            raise ArgumentError(
                f"predictor_down {list(self.predictor_down.shape)} and predictor_up {[neurons, rank]} have another rank; "
                "expected [R, K] and [F, R]"
            )
        if self.threshold.size not in (1, neurons):
            raise ArgumentError(
                f"threshold has {self.threshold.size} values, expected 1 or one for each of {neurons} neurons"
            )

    @property
    def has_predictor(self) -> bool:
        """Whether scores of a predictor select the neurons; else the magnitudes of activations do."""
        return self.predictor_down is not None

    @property
    def rank(self) -> int:
        """Rows of predictor_down; 0 without a predictor."""
        return 0 if self.predictor_down is None else self.predictor_down.shape[0]

    def scores(self, inputs: Floats) -> Floats:
        """Scores [T, F] of the predictor for tokens [T, K].

        Raises:
            ArgumentError: without a predictor, or for tokens of another size.
        """
        if self.predictor_down is None or self.predictor_up is None:
            raise ArgumentError("a selector without a predictor has no scores; give activations")
        if inputs.ndim != 2 or inputs.shape[1] != self.predictor_down.shape[1]:
            raise ArgumentError(f"inputs are {list(inputs.shape)}, expected [tokens, {self.predictor_down.shape[1]}]")
        with np.errstate(over="ignore", invalid="ignore"):
            low = inputs @ self.predictor_down.T
            if self.predictor_activation == "relu":
                low = np.maximum(low, 0)  # NaN stays
            return np.asarray(low @ self.predictor_up.T)

    def select(self, inputs: Floats, activations: Floats | None = None) -> Flags:
        """Which neurons are active, [T, F].

        Args:
            inputs: tokens [T, K].
            activations: activated gate values [T, F]; required without a predictor, not read with one.

        Raises:
            ArgumentError: for arrays of another shape, or activations that are missing.
        """
        if self.has_predictor:
            return ~(self.scores(inputs) <= self.threshold)  # true for NaN
        if activations is None:
            raise ArgumentError("a selector without a predictor compares activations; give them")
        if activations.ndim != 2 or self.threshold.size not in (1, activations.shape[1]):
            raise ArgumentError(
                f"activations are {list(activations.shape)}, expected [tokens, neurons] with {self.threshold.size} thresholds"
            )
        return ~(np.abs(activations) <= self.threshold)


def _check(name: str, values: Floats, rank: int) -> None:
    if values.dtype != np.float32 or values.ndim != rank or not values.size:
        raise ArgumentError(f"{name} is {values.dtype} {list(values.shape)}, expected fp32 of rank {rank}, not empty")
    if not np.isfinite(values).all():
        raise ArgumentError(f"{name} has values that are not finite; calibrate again")
