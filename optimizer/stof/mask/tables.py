# SPDX-License-Identifier: Apache-2.0
"""Stored masks [.., S, T] that are bands: low <= q - k <= high says the same without a table."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stof.mask.from_condition import K, Q
from stof.symbolic import Cond, Int, integer
from stof.symbolic.algebra.conditions import all_of, any_of, children, less_equal, negate


def replace_bands(cond: Cond, table_of: Callable[[str], np.ndarray]) -> Cond:
    """The condition with bands in the place of look-ups into tables that are bands."""
    if cond.kind in ("and", "or"):
        unite = all_of if cond.kind == "and" else any_of
        return unite(replace_bands(c, table_of) for c in children(cond))
    if cond.kind in ("table", "untable"):
        name, indices = cond.args
        assert isinstance(name, str)
        assert isinstance(indices, tuple)
        if indices[-2:] == (Q, K):
            array = table_of(name)
            band = band_of(array, indices)
            if band is not None:
                return band if cond.kind == "table" else negate(band)
            if (opposite := band_of(~array, indices)) is not None:
                return negate(opposite) if cond.kind == "table" else opposite
    return cond


def band_of(allowed: np.ndarray, indices: tuple[Int, ...]) -> Cond | None:
    """The band of a constant mask [.., S, T] that depends on q - k alone; None where it is no band."""
    if allowed.ndim < 2 or any(n != 1 for n in allowed.shape[:-2]) or indices[-2:] != (Q, K):
        return None
    plane = allowed.reshape(allowed.shape[-2:])
    rows, columns = allowed.shape[-2:]
    diagonals = np.concatenate([plane[:0:-1, 0], plane[0]])  # q - k from rows - 1 down to -(columns - 1)
    number = np.arange(columns)[None, :] - np.arange(rows)[:, None] + rows - 1
    if not np.array_equal(diagonals[number], plane):
        return None
    inside = np.flatnonzero(diagonals)
    if inside.size == 0 or inside.size != inside[-1] - inside[0] + 1:
        return None
    high = rows - 1 - int(inside[0])
    low = rows - 1 - int(inside[-1])
    return _band(None if low == -(columns - 1) else low, None if high == rows - 1 else high)


def _band(low: int | None, high: int | None) -> Cond:
    """The condition low <= q - k <= high; None is no limit."""
    sides = []
    if low is not None:
        sides.append(less_equal(integer(low), Q - K))
    if high is not None:
        sides.append(less_equal(Q - K, integer(high)))
    return all_of(sides)
