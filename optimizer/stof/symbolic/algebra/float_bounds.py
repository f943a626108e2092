# SPDX-License-Identifier: Apache-2.0
"""Bounds of floats that are made of positions, constants and stored tables, such as biases beside masks.

Sums are rounded to fp32: the lowest number absorbs a bias.
"""

from __future__ import annotations

import math

import numpy as np

from stof.symbolic.algebra.int_bounds import Bounds, Range
from stof.symbolic.algebra.terms import Int, Real

_LARGEST = float(np.finfo(np.float32).max)
_HUGE = 1e6  # fp32 rounds numbers from here on that fp64 distinguishes
_FAR = 1.01  # numbers that differ by this factor differ in every float type


def range_of(value: Real) -> Range | None:
    """The least and the largest value; None where it depends on input data or on an operator without bounds."""
    args = value.args
    reals = [a for a in args if isinstance(a, Real)]
    match value.kind:
        case "const":
            number = args[0]
            assert isinstance(number, float)
            return None if math.isnan(number) else (number, number)
        case "int":
            inner = args[0]
            assert isinstance(inner, Int)
            low, high = Bounds({}, math.inf).integer(inner)
            return (low, high) if max(-low, high) < _LARGEST else None
        case "bool":
            return (0.0, 1.0)
        case "table" if len(args) == 3:
            limits = args[2]
            assert isinstance(limits, tuple)
            return (float(limits[0]), float(limits[1]))
        case "select" | "add" | "mul" | "neg" | "min" | "max":
            ranges = [range_of(r) for r in reals]
            if any(r is None for r in ranges):
                return None
            return _combine(value.kind, [r for r in ranges if r is not None])
    return None


def _combine(kind: str, ranges: list[Range]) -> Range | None:
    (a, b), *rest = ranges
    if kind == "neg":
        return (-b, -a)
    c, d = rest[0]
    match kind:
        case "select":
            return (min(a, c), max(b, d))
        case "min":
            return (min(a, c), min(b, d))
        case "max":
            return (max(a, c), max(b, d))
        case "add":
            return _round_range(a + c, b + d)
    products = [x * y for x in (a, b) for y in (c, d)]
    return _round_range(min(products), max(products))


def _round_range(low: float, high: float) -> Range | None:
    if math.isnan(low) or math.isnan(high) or (low < -_LARGEST < high) or (low < _LARGEST < high):
        return None  # overflows in fp32 but not in fp64
    with np.errstate(over="ignore"):
        return (float(np.float32(low)), float(np.float32(high)))


def rounded_constant(value: Real) -> float | None:
    """The one large number that a float rounds to at every position; None where it differs or is small."""
    limits = range_of(value)
    return limits[0] if limits is not None and limits[0] == limits[1] and abs(limits[0]) > _HUGE else None


def compare_ranges(kind: str, x: Real, y: Real) -> bool | None:
    """The comparison ``kind`` (lt, le, gt, ge, eq) of floats, decided by their ranges; None where these are not far apart."""
    one, other = range_of(x), range_of(y)
    if one is None or other is None:
        return None
    if one == other and one[0] == one[1]:
        return kind in ("le", "ge", "eq")
    for (_, high), (low, _), less in ((one, other, True), (other, one, False)):
        apart = high < low and (high * low <= 0 or max(abs(high), abs(low)) > _FAR * min(abs(high), abs(low)))
        if apart and (high, low) != (0.0, 0.0):
            return kind in (("lt", "le") if less else ("gt", "ge"))
    return None
