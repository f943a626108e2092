# SPDX-License-Identifier: Apache-2.0
"""How well a selection meets the neurons that matter, and what it does to outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.selector import Flags


@dataclass(frozen=True)
class SelectionQuality:
    """How well selected neurons meet the active ones. All values are shares, 0 to 1.

    Attributes:
        precision: of the selected neurons, how many are active; 1 where none is selected.
        recall: of the active neurons, how many are selected; 1 where none is active.
        active_share: of all neurons, how many are active.
        selected_share: of all neurons, how many are selected.
    """

    precision: float
    recall: float
    active_share: float
    selected_share: float

    @property
    def f1(self) -> float:
        """The harmonic mean of precision and recall."""
        total = self.precision + self.recall
        return 2 * self.precision * self.recall / total if total else 0.0


def measure_selection(selected: Flags, active: Flags) -> SelectionQuality:
    """The quality of selected neurons, where ``active`` ones matter; both are bool [T, F].

    Raises:
        ArgumentError: for arrays of different shapes, or without a neuron.
    """
    if selected.shape != active.shape or not selected.size:
        raise ArgumentError(
            f"selected neurons are {list(selected.shape)}, active ones {list(active.shape)}; expected one shape, not empty"
        )
    both = int(np.count_nonzero(selected & active))
    chosen, wanted = int(np.count_nonzero(selected)), int(np.count_nonzero(active))
    return SelectionQuality(
        both / chosen if chosen else 1.0, both / wanted if wanted else 1.0, wanted / active.size, chosen / selected.size
    )


def relative_output_error(expected: npt.NDArray[np.floating], computed: npt.NDArray[np.floating]) -> float:
    """The Frobenius norm of ``computed - expected`` over that of ``expected``, in fp64.

    It is 0 where both are equal, also where both are 0, and infinite where ``expected`` is 0 or a value is not finite.

    Raises:
        ArgumentError: for arrays of different shapes.
    """
    if expected.shape != computed.shape:
        raise ArgumentError(f"outputs are {list(computed.shape)}, expected {list(expected.shape)}")
    wanted, actual = expected.astype(np.float64), computed.astype(np.float64)
    if not (np.isfinite(wanted).all() and np.isfinite(actual).all()):
        return float("inf")
    error, size = float(np.linalg.norm(actual - wanted)), float(np.linalg.norm(wanted))
    return error / size if size else (float("inf") if error else 0.0)
