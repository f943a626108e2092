# SPDX-License-Identifier: Apache-2.0
"""The form of a decoder's MLP, and biases that give shares of active and idle neurons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

GAIN = 0.7  # of a weight matrix: its values have the variance (gain^2 / rows)
NORM_SPREAD = 0.1  # the standard deviation of a norm's weights around 1
IDLE_BIAS = -100.0  # of a neuron that is never active: gates are within some units of 0
ACTIVATIONS = ("silu", "relu", "relu2", "gelu_tanh")


@dataclass(frozen=True)
class MlpForm:
    """The form of an MLP.

    Attributes:
        activation: one of ``ACTIVATIONS``.
        is_gated: whether an up projection is multiplied by the activated gate.
        active: the share of the neurons whose activation is above zero; None: as random weights have it, a half.
        has_top_k: Gemma 3n's: the gate counts only above the mean and some standard deviations of a token's gates, which
            ``active`` gives.
        idle: the share of the neurons that are never active, at random places; the others are more often, so that ``active`` is
            the share of all.

    Raises:
        ValueError: for an unknown activation, and for an idle share of neurons that cannot be idle.
    """

    activation: str = "silu"
    is_gated: bool = True
    active: float | None = None
    has_top_k: bool = False
    idle: float = 0.0

    def __post_init__(self) -> None:
        """Checks the activation and the idle share."""
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"the activation is {self.activation!r}, expected one of {', '.join(ACTIVATIONS)}")
        if not self.idle:
            return
        if self.has_top_k or self.activation not in ("relu", "relu2"):
            kind = "the threshold of Gemma 3n" if self.has_top_k else self.activation
            raise ValueError(f"neurons with {kind} are never idle for all tokens; idle needs relu or relu2")
        active = self.active or 0.0
        if not 0 < self.idle < 1 - active:
            raise ValueError(
                f"the share of idle neurons is {self.idle:g}, expected 0 or more, and less than {1 - active:g} where {active:g} "
                "are active"
            )

    @property
    def shift(self) -> float:
        """The bias of the first matmul with which that share of its values is above zero; that of neurons that are not idle.

        Tokens are normed, so that the values are normal with the standard deviation ``GAIN`` over the norm's weights.
        """
        if self.active is None or self.has_top_k:
            return 0.0
        return NormalDist(0, GAIN * math.sqrt(1 + NORM_SPREAD**2)).inv_cdf(self.active / (1 - self.idle))


def count_idle(form: MlpForm, neurons: int) -> int:
    """How many of an MLP's neurons are never active."""
    return round(form.idle * neurons)


def gate_bias(form: MlpForm, neurons: int, seed: int) -> np.ndarray:
    """The bias of the first matmul, fp64 [F]; idle neurons are at random places."""
    found = np.full(neurons, form.shift)
    found[np.random.default_rng(seed).permutation(neurons)[: count_idle(form, neurons)]] = IDLE_BIAS
    return found
