# SPDX-License-Identifier: Apache-2.0
"""What is asked at a point of a grid, on every device: inputs, what a right result is, and counts of work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.core.case import AttentionCase
from stof.bench.measure import Timing
from stof.bench.results import Record


class PointProblem(ABC):
    """What all candidates of a point are given, and what a right result is.

    Attributes:
        tolerance: the largest error of a right result; ``tolerance_of`` may have less for some candidates.
        reference: what a result is compared with.
        relative_to: what errors are relative to.
    """

    tolerance: float
    reference = "fp64"
    relative_to = "the largest value"

    @abstractmethod
    def error(self, output: Any) -> float:
        """The difference of an output from the reference, over what ``relative_to`` says."""

    def tolerance_of(self, candidate: str) -> float:
        """The largest error of a right result of a candidate."""
        del candidate
        return self.tolerance

    def is_checked(self, candidate: str) -> bool:
        """Whether a candidate computes what the problem asks for."""
        del candidate
        return True

    @abstractmethod
    def describe(self, threads: int) -> Record:
        """The problem's part of a record: key, grid, shape, densities.

        Args:
            threads: of the candidates; 0 on a GPU.
        """

    @abstractmethod
    def figures(self, candidate: str, seconds: float, rates: Mapping[str, float]) -> dict[str, float]:
        """What follows from the time of a candidate, by name.

        Args:
            candidate: its name.
            seconds: of a run.
            rates: of the machine, where the device measures them with the point.
        """

    def compare(self, timings: Mapping[str, Timing]) -> Record:
        """What follows from the times of all candidates, by name."""
        del timings
        return {}


@dataclass(frozen=True)
class MaskDensity:
    """How much of a mask is there.

    Attributes:
        element: allowed pairs over all pairs.
        tile: tiles with an allowed pair over all tiles.
        pairs: allowed pairs, of all heads and batches.
        tiles: tiles with an allowed pair, of all heads and batches.
        keys: keys that some query of the sequence may attend, over all keys.
    """

    element: float
    tile: float
    pairs: int
    tiles: int
    keys: float = 1.0


class AttentionProblem(PointProblem):
    """An attention case with inputs that all candidates share.

    Attributes:
        case: the sizes and the mask.
        scale: the factor of the scores.
    """

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        self.scale = 1.0 / math.sqrt(case.D)

    @property
    @abstractmethod
    def pairs(self) -> int:
        """Allowed pairs, of all heads and batches."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes that any kernel has to read and write."""

    @property
    def useful_flops(self) -> float:
        """Multiplications and additions over allowed pairs."""
        return 4.0 * self.case.D * self.pairs
