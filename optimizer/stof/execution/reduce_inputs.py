# SPDX-License-Identifier: Apache-2.0
"""Smaller numbers for inputs that decide how long a run takes, after ONNX Runtime took too long on larger ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from stof.execution.deciding_inputs import find_deciding_inputs
from stof.execution.input_uses import InputUse
from stof.execution.inputs import InputMaker
from stof.execution.run_limits import LimitReached

_FACTORS = (1 / 256, 1 / 64, 1 / 16, 1 / 4)  # that are tried, from the quickest run to the usual numbers
_INDEXED = (InputUse.SLOT, InputUse.INDEX)


# Factors of inputs by name, for each trial: from the one that most likely runs quickly to the usual numbers.
Trials = tuple[Mapping[str, float], ...]


class InputReducer:
    """Changes how large the numbers are that an :class:`InputMaker` draws for the inputs that decide how long a run takes.

    Args:
        maker: draws the inputs.
    """

    def __init__(self, maker: InputMaker) -> None:
        self._maker = maker
        found = find_deciding_inputs(maker.model, {i.name for i in maker.inputs})
        self._names = sorted(n for n in found if self._is_free(n))
        self._has_searched = False

    @property
    def can_reduce(self) -> bool:
        """Whether the numbers of some input decide how long a run takes, and no others were searched for yet."""
        return bool(self._names) and not self._has_searched

    def search(self, feed: Mapping[str, np.ndarray]) -> Iterator[Trials]:
        """What is tried where a run on ``feed`` was ended, once for a model: the next one as long as no trial runs.

        A single number may multiply a length, or divide it as a speed does: both are tried, after the others.
        """
        self._has_searched = True
        single = [n for n in self._names if n in feed and self._maker.is_factor(n)]
        others = [n for n in self._names if n in feed and n not in single]
        if others:
            yield tuple(dict.fromkeys(others, f) for f in _FACTORS)
        for is_inverse in (False, True) if single else ():
            factors = [1 / f if is_inverse else f for f in _FACTORS]
            yield tuple(dict.fromkeys(others, _FACTORS[0]) | dict.fromkeys(single, f) for f in factors)

    def apply(self, factors: Mapping[str, float]) -> None:
        """Draws with these factors from now on."""
        self._maker.magnitudes.clear()
        self._maker.magnitudes.update(factors)

    def explain(self, error: LimitReached) -> LimitReached:
        """The error of the longest run where no numbers were found that run."""
        names = ", ".join(map(repr, self._names))
        found = type(error)(
            f"{error}. Numbers of {names} from 1/256 of the usual size on were tried; --inputs gives others"
        )
        found.seconds = error.seconds
        return found

    def _is_free(self, name: str) -> bool:
        """Whether an input holds numbers of any size: masks, numbers of keys, documents, indices and slots do not."""
        maker = self._maker
        taken = maker.pads | set(maker.switches) | maker.counts | maker.added | maker.documents | maker.restarting
        if name in taken | maker.writes | set(maker.filled):
            return False
        return not any(b.use in _INDEXED for b in maker.uses.bounds(name))
