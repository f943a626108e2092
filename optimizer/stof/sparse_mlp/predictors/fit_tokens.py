# SPDX-License-Identifier: Apache-2.0
"""Checks of what predictors are fitted on, and the choice of held-out tokens."""

from __future__ import annotations

import numpy as np

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.selector import Flags, Floats

_PIECES = 20  # tokens of one prompt are alike: whole pieces are held out


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


def choose_held_out_tokens(tokens: int, one_in: int) -> Flags:
    """Which tokens are held out, bool [T]: a piece of the sequence out of ``one_in``; none of fewer than ``one_in``."""
    pieces = min(_PIECES, tokens) // one_in * one_in
    piece = np.arange(tokens) * pieces // max(1, tokens)
    return np.asarray(piece % one_in == one_in - 1)
