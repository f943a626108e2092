# SPDX-License-Identifier: Apache-2.0
"""Thresholds that keep the loss within a bound, by runs with one threshold alone, then with all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

Site = TypeVar("Site", bound=Hashable)
_MARGIN = 0.5  # of the allowed loss; what is held out may lose more
_NEARLY = (
    0.98  # of what the largest threshold skips: a smaller one that skips as much bounds the loss of other inputs better
)


@dataclass(frozen=True)
class Trial:
    """What runs with some thresholds found.

    Attributes:
        loss: against the model that leaves out nothing.
        share: of the pairs that the masks leave, those skipped.
    """

    loss: float
    share: float


@dataclass(frozen=True)
class Calibration(Generic[Site]):
    """Thresholds that were chosen.

    Attributes:
        thresholds: by site; 0: it leaves out nothing.
        reasons: why, of those.
    """

    thresholds: Mapping[Site, float]
    reasons: Mapping[Site, str]


@dataclass(frozen=True)
class Ladder:
    """The thresholds that a site may have.

    Attributes:
        rungs: ascending.
        spare: how many rungs below the largest one that fits the site stays, as far as there are some.
    """

    rungs: Sequence[float]
    spare: int = 0

    @property
    def most_runs(self) -> int:
        """How often ``calibrate`` runs with one of them alone, at most."""
        return len(self.rungs).bit_length() + (self.spare > 0)


def calibrate(
    ladders: Mapping[Site, Ladder],
    run_alone: Callable[[Site, float], Trial],
    loss_together: Callable[[Mapping[Site, float]], float],
    allowed: float,
) -> Calibration[Site]:
    """Chooses a threshold of each site's ladder, or none.

    For each site a bisection finds the largest one with which the loss of this one alone stays below its part of half the
    allowed loss. Of the smaller ones that were tried the site gets the least that skips nearly as much, and in any case one that
    is ``spare`` rungs below. Then all go one rung down until the loss of all together stays below that half. The bisection takes
    the loss for one that grows with the threshold. At most ``most_runs`` runs a site, and as many together as the longest ladder
    has rungs and one more.

    Args:
        ladders: the thresholds of each site. A site is a key of any kind.
        run_alone: runs with a threshold of one site, every other one exact.
        loss_together: with these thresholds, and with all else that changes outputs.
        allowed: the largest loss.
    """
    rungs: dict[Site, int] = {}  # -1: it leaves out nothing
    reasons: dict[Site, str] = {}
    bound = _MARGIN * allowed

    def thresholds() -> dict[Site, float]:
        return {site: ladders[site].rungs[rung] if rung >= 0 else 0.0 for site, rung in rungs.items()}

    for site, ladder in ladders.items():
        rungs[site], reason = _search(ladder, partial(run_alone, site), bound / len(ladders))
        if reason:
            reasons[site] = reason
    while any(rung >= 0 for rung in rungs.values()) and not loss_together(thresholds()) <= bound:
        for site, rung in rungs.items():
            if rung == 0:
                reasons[site] = "all layers together would lose more than is allowed"
            rungs[site] = max(rung - 1, -1)
    return Calibration(thresholds(), reasons)


def _search(ladder: Ladder, run: Callable[[float], Trial], bound: float) -> tuple[int, str]:
    """The rung of a threshold within a bound, or -1 and the reason."""
    rungs = ladder.rungs
    low, high = -1, len(rungs) - 1
    shares: dict[int, float] = {}  # of those within the bound, by rung
    while low < high:
        middle = (low + high + 1) // 2
        trial = run(rungs[middle])
        if trial.loss <= bound:
            low, shares[middle] = middle, trial.share
        else:
            high = middle - 1
    if not shares:
        return -1, f"the least threshold, {rungs[0]:g}, loses more than the layer may"
    if not shares[low]:
        more = "a larger one loses more than the layer may" if low < len(rungs) - 1 else "no larger one is tried"
        return -1, f"c = {rungs[low]:g} leaves out nothing here, and {more}"
    nearly = min(rung for rung, share in shares.items() if share >= _NEARLY * shares[low])
    chosen = min(nearly, max(low - ladder.spare, 0))
    if chosen not in shares:
        shares[chosen] = run(rungs[chosen]).share
    if not shares[chosen]:
        return (
            -1,
            f"c = {rungs[chosen]:g} leaves out nothing here, and larger ones are too near {rungs[low]:g}, the largest that fits",
        )
    return chosen, ""
