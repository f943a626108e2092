# SPDX-License-Identifier: Apache-2.0
"""Calibration tokens: their checks, those held out, and the cut that reaches a share or a recall on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.magnitude import check_share
from stof.sparse_mlp.predictors.order_statistics import threshold_above
from stof.sparse_mlp.predictors.selector import Flags, Floats

DEFAULT_RECALL = 0.98
_PIECES = 20  # tokens of one prompt are alike: whole pieces are held out
MarginChunks = Callable[[], Iterable[tuple[Floats, Flags]]]


def check_tokens(inputs: Floats, active: Flags) -> None:
    """Refuses calibration data from which nothing can be learned.

    Raises:
        ArgumentError: for other types or shapes, no token, or inputs that are not finite.
    """
    if inputs.ndim != 2 or inputs.dtype != np.float32 or not inputs.size:
        raise ArgumentError(
            f"inputs are {inputs.dtype} {list(inputs.shape)}, expected fp32 [tokens, size] with a token; "
            "give prompts that have one"
        )
    if active.dtype != np.bool_ or active.ndim != 2 or len(active) != len(inputs) or not active.size:
        raise ArgumentError(f"active is {active.dtype} {list(active.shape)}, expected bool [{len(inputs)}, neurons]")
    if not np.isfinite(inputs).all():
        raise ArgumentError("inputs have values that are not finite; leave out the prompts that give them")


def check_rank(rank: int, neurons: int, size: int) -> None:
    """Refuses a rank that a predictor of these sizes cannot have.

    Raises:
        ArgumentError: naming the limits.
    """
    if not 1 <= rank <= min(neurons, size):
        raise ArgumentError(f"rank is {rank}, expected 1 to {min(neurons, size)}, the smaller size of the weight")


def held_out_tokens(tokens: int, one_in: int) -> Flags:
    """Which tokens are held out, bool [T]: a piece of the sequence out of ``one_in``; none of fewer than ``one_in``."""
    pieces = min(_PIECES, tokens) // one_in * one_in
    piece = np.arange(tokens) * pieces // max(1, tokens)
    return np.asarray(piece % one_in == one_in - 1)


def fit_cut(margins: MarginChunks, active_share: float | None, recall: float | None) -> float:
    """The cut of margins that selects a share of all neurons, or reaches a recall: ``margin > cut`` selects.

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
    # One more value lies above the next smaller value than above the wanted one: the cut is just below the wanted one.
    if kept == 0:
        return threshold_above(lambda: (m for m, _ in margins()), 0)
    cut = threshold_above(lambda: (m[a] for m, a in margins()), kept - 1)
    return float(np.nextafter(np.float32(cut), np.float32(-np.inf)))


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
