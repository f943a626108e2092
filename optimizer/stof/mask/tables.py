# SPDX-License-Identifier: Apache-2.0
"""Stored masks that are bands: a constant [.., S, T] that says no more than low <= q - k <= high."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stof.mask.from_condition import K, Q, band_condition
from stof.symbolic import Cond, Int
from stof.symbolic.algebra.conditions import all_of, any_of, children, negate


def with_bands(cond: Cond, lookup: Callable[[str], np.ndarray]) -> Cond:
    """The condition with look-ups of tables that are bands replaced by these."""
    if cond.kind in ("and", "or"):
        join = all_of if cond.kind == "and" else any_of
        return join(with_bands(c, lookup) for c in children(cond))
    if cond.kind in ("table", "untable"):
        name, indices = cond.args
        assert isinstance(name, str)
        assert isinstance(indices, tuple)
        if indices[-2:] == (Q, K):
            array = lookup(name)
            band = band_of(array, indices)
            if band is not None:
                return band if cond.kind == "table" else negate(band)
            if (opposite := band_of(~array, indices)) is not None:
                return negate(opposite) if cond.kind == "table" else opposite
    return cond


def band_of(kept: np.ndarray, indices: tuple[Int, ...]) -> Cond | None:
    """The band of a constant [.., S, T] mask that depends on q - k alone."""
    if kept.ndim < 2 or any(n != 1 for n in kept.shape[:-2]) or indices[-2:] != (Q, K):
        return None
    plane = kept.reshape(kept.shape[-2:])
    rows, columns = kept.shape[-2:]
    diagonal = np.concatenate([plane[:0:-1, 0], plane[0]])  # q - k from rows - 1 down to -(columns - 1)
    place = np.arange(columns)[None, :] - np.arange(rows)[:, None] + rows - 1
    if not np.array_equal(diagonal[place], plane):
        return None
    inside = np.flatnonzero(diagonal)
    if inside.size == 0 or inside.size != inside[-1] - inside[0] + 1:
        return None
    high = rows - 1 - int(inside[0])
    low = rows - 1 - int(inside[-1])
    return band_condition(None if low == -(columns - 1) else low, None if high == rows - 1 else high)
