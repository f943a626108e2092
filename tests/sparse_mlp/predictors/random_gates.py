# SPDX-License-Identifier: Apache-2.0
"""Random first halves of MLPs, whose tokens vary more in some directions than in others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stof.sparse_mlp.predictors.selector import Flags, Floats


@dataclass(frozen=True)
class RandomGate:
    """A gate weight [F, K] and bias [F], and tokens [T, K]. The oracle of active neurons is in fp64."""

    weight: Floats
    bias: Floats
    tokens: Floats

    @property
    def active(self) -> Flags:
        """Neurons whose ReLU is above 0, [T, F]."""
        return self.tokens.astype(float) @ self.weight.T.astype(float) + self.bias > 0


def draw_gate(tokens: int = 800, size: int = 48, neurons: int = 160, decay: float = 0.8, seed: int = 0) -> RandomGate:
    """A gate with about a tenth of active neurons. decay: exponent of the standard deviations; 0: all directions alike."""
    rng = np.random.default_rng(seed)
    deviations = np.arange(1, size + 1) ** -float(decay)
    deviations /= np.sqrt(np.square(deviations).mean())
    rotation = np.linalg.qr(rng.standard_normal((size, size)))[0]
    drawn = (rng.standard_normal((tokens, size)) * deviations) @ rotation.T + 0.3 * rng.standard_normal(size)
    weight = rng.standard_normal((neurons, size)) / np.sqrt(size) * rng.uniform(0.5, 2, (neurons, 1))
    bias = -1.2 + 0.3 * rng.standard_normal(neurons)
    return RandomGate(weight.astype(np.float32), bias.astype(np.float32), drawn.astype(np.float32))
