# SPDX-License-Identifier: Apache-2.0
"""Thresholds of layers that keep the loss within a bound, by runs with one layer that skips, then with all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_LEAST, _MOST = -6, 14  # exponents of 2: of the thresholds that are tried
_MARGIN = 0.5  # of the allowed loss; what is held out may lose more
_NEARLY = (
    0.98  # of what the largest threshold skips: a smaller one that skips as much bounds the loss of other inputs better
)
RUNS_OF_LAYER = (_MOST - _LEAST + 1).bit_length()
RUNS_TOGETHER = _MOST - _LEAST + 2


@dataclass(frozen=True)
class Trial:
    """What runs with some thresholds found.

    Attributes:
        loss: against the model that computes every key tile.
        share: of the pairs that were scored, those skipped.
    """

    loss: float
    share: float


@dataclass(frozen=True)
class Calibration:
    """Thresholds that were chosen.

    Attributes:
        thresholds: by layer; 0: it computes every key tile.
        reasons: why, of those.
    """

    thresholds: Mapping[str, float]
    reasons: Mapping[str, str]


def calibrate(
    layers: Sequence[str],
    run_alone: Callable[[str, float], Trial],
    loss_together: Callable[[Mapping[str, float]], float],
    allowed: float,
) -> Calibration:
    """Chooses thresholds: powers of 2 from 2^-6 to 2^14.

    For each layer a bisection finds the largest one with which the loss of this layer alone stays below its part of half the
    allowed loss. Of the smaller ones that were tried the layer gets the least that skips nearly as much. Then all are halved
    until the loss of all together stays below that half. The bisection takes the loss for one that grows with the threshold.
    At most ``RUNS_OF_LAYER`` runs a layer, and ``RUNS_TOGETHER``.

    Args:
        layers: names.
        run_alone: runs with a threshold of one layer, every other one exact.
        loss_together: of the layers with these thresholds, and of all else that changes outputs.
        allowed: the largest loss.
    """
    thresholds: dict[str, float] = {}
    reasons: dict[str, str] = {}
    bound = _MARGIN * allowed
    for layer in layers:
        thresholds[layer], reason = _search(layer, run_alone, bound / len(layers))
        if reason:
            reasons[layer] = reason
    while any(thresholds.values()) and not loss_together(thresholds) <= bound:
        for layer, c in thresholds.items():
            if c and c / 2 < 2.0**_LEAST:
                reasons[layer] = "all layers together would lose more than is allowed"
            thresholds[layer] = c / 2 if c / 2 >= 2.0**_LEAST else 0.0
    return Calibration(thresholds, reasons)


def _search(layer: str, run_alone: Callable[[str, float], Trial], bound: float) -> tuple[float, str]:
    """The largest threshold within a bound, or 0 and the reason."""
    low, high = _LEAST - 1, _MOST  # of exponents; the one below the least stands for 0
    shares: dict[int, float] = {}  # of those within the bound, by exponent
    while low < high:
        middle = (low + high + 1) // 2
        trial = run_alone(layer, 2.0**middle)
        if trial.loss <= bound:
            low, shares[middle] = middle, trial.share
        else:
            high = middle - 1
    if not shares:
        return 0.0, f"the least threshold, {2.0**_LEAST:g}, loses more than the layer may"
    if not shares[low]:
        more = "a larger one loses more than the layer may" if low < _MOST else "no larger one is tried"
        return 0.0, f"c = {2.0**low:g} skips nothing here, and {more}"
    return 2.0 ** min(e for e, share in shares.items() if share >= _NEARLY * shares[low]), ""
