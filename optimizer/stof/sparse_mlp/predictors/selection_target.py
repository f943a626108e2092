# SPDX-License-Identifier: Apache-2.0
"""What a selection has to reach, a share of all neurons or a recall, and the threshold that reaches it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.order_statistics import threshold_above
from stof.sparse_mlp.predictors.selector import Flags, Floats

DEFAULT_RECALL = 0.98
MarginChunks = Callable[[], Iterable[tuple[Floats, Flags]]]


def fit_margin_threshold(margins: MarginChunks, active_share: float | None, recall: float | None) -> float:
    """The threshold of margins that selects a share of all neurons, or reaches a recall: ``margin > threshold`` selects.

    Args:
        margins: gives margins and the flags of active neurons, in chunks of one shape; the same ones in each call.
        active_share: the share of selected neurons; None: see ``recall``.
        recall: the share of active neurons that are selected; None: see ``active_share``.

    Raises:
        ArgumentError: when both are given, or one is no share.
    """
    check_target(active_share, recall)
    if active_share is not None:
        total = sum(m.size for m, _ in margins())
        return threshold_above(lambda: (m for m, _ in margins()), int(active_share * total))
    wanted = DEFAULT_RECALL if recall is None else recall
    total = sum(int(np.count_nonzero(a)) for _, a in margins())
    kept = int(np.ceil(wanted * total))
    if kept == 0:
        return threshold_above(lambda: (m for m, _ in margins()), 0)
    # The smallest margin to keep has to lie above the threshold, which is the next smaller number.
    smallest = threshold_above(lambda: (m[a] for m, a in margins()), kept - 1)
    return float(np.nextafter(np.float32(smallest), np.float32(-np.inf)))


def check_target(active_share: float | None, recall: float | None) -> None:
    """Refuses two targets, and values that are no shares.

    Raises:
        ArgumentError: naming the argument.
    """
    if active_share is not None and recall is not None:
        raise ArgumentError("active_share and recall are given; the threshold can reach one of them")
    for name, value in (("active_share", active_share), ("recall", recall)):
        if value is not None:
            check_share(name, value)


def check_share(name: str, share: float) -> None:
    """Refuses what is no share, 0 to 1.

    Raises:
        ArgumentError: naming the argument.
    """
    if not 0 <= share <= 1:
        raise ArgumentError(f"{name} is {share}, expected a share, 0 to 1")
