# SPDX-License-Identifier: Apache-2.0
"""Inputs on which the optimized model and the original are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.symbolic import Symbolic

BATCH_WITH_ALL_PADDING = 4  # rows of a batch, of which the last one is all padding
_LENGTHS = (53, 9)


@dataclass(frozen=True)
class ModelInputs:
    """How inputs of a model are drawn, by an op that knows what they mean.

    Attributes:
        working: the original, or a copy with its fused nodes expanded, whose tensors are captured.
        symbolic: facts of the working copy.
        maker: draws inputs.
        cases: sets of inputs, those most likely to expose errors first; long ones have at most so many tokens.
        may_carry_nan: whether NaN of queries without a key may spread further in the original than in the result.
    """

    working: onnx.ModelProto
    symbolic: Symbolic
    maker: InputMaker
    cases: Callable[[float], list[Case]]
    may_carry_nan: bool = False

    def draw(self, cases: Sequence[Case]) -> list[dict[str, np.ndarray]]:
        """The inputs of each case, the same at each call."""
        return [self.maker.draw(c, np.random.default_rng(i)) for i, c in enumerate(cases)]

    def padded_queries(self, case: Case, feed: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Which positions [B, S] are padding by all masks of that shape among the inputs; None where nothing says it."""
        masks = [name for name in sorted(self.maker.pads) if name in feed and feed[name].ndim == 2]
        if case.padding is Padding.NONE or not masks:
            return None
        found = [(feed[n] == 0) != (n in self.maker.forbidding) for n in masks]
        return np.logical_and.reduce(found) if len({x.shape for x in found}) == 1 else None


def default_inputs(model: onnx.ModelProto) -> ModelInputs:
    """Inputs of a model of which no op knows more than their types and shapes."""
    symbolic = Symbolic(model)
    return ModelInputs(model, symbolic, InputMaker(model, symbolic, frozenset()), _default_cases)


def _default_cases(tokens: float) -> list[Case]:
    return [Case(2 if 2 * length <= tokens else 1, length, Padding.NONE) for length in _LENGTHS]
