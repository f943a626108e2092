# SPDX-License-Identifier: Apache-2.0
"""The decision about one region: which parts of it become fused chains, and who decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stof.fusion.emit import ChainSignature
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.translate import FusedChain


@dataclass(frozen=True)
class ChainDecision:
    """What becomes of a region.

    Attributes:
        segments: the parts of it that become chains, as ranges of its nodes; none with a reason.
        reason: why nothing is replaced.
        gain: time of the replaced operators over that of the chains, where it is known.
        measured: whether the gain was measured rather than estimated.
    """

    segments: tuple[tuple[int, int], ...]
    reason: str = ""
    gain: float | None = None
    measured: bool = False


# The number is how many different regions are left to decide, this one among them.
ChainDecider = Callable[[FusionGraph, FusedChain, ChainSignature, int], ChainDecision]
