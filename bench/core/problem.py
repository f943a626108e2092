# SPDX-License-Identifier: Apache-2.0
"""What the problems of all devices have in common: a case, the density of its mask, and counts of work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from bench.core.case import AttentionCase


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


class AttentionProblem(ABC):
    """A case with inputs that all candidates share.

    Attributes:
        case: the sizes and the mask.
        scale: the factor of the scores.
    """

    def __init__(self, case: AttentionCase) -> None:
        self.case = case
        self.scale = 1.0 / math.sqrt(case.D)

    @property
    @abstractmethod
    def density(self) -> MaskDensity:
        """The density of the mask."""

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Bytes that any kernel has to read and write."""

    @abstractmethod
    def error(self, output: Any) -> float:
        """The largest difference of an output [B, H, S, D] from fp64 in some rows, over the largest value there."""

    @property
    def useful_flops(self) -> float:
        """Multiplications and additions over allowed pairs."""
        return 4.0 * self.case.D * self.density.pairs
