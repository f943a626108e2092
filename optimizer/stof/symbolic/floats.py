# SPDX-License-Identifier: Apache-2.0
"""Floats that hold integers: positions that were cast before they were subtracted, compared or divided."""

from __future__ import annotations

from stof.symbolic.casework import rebuilt, times
from stof.symbolic.terms import Cond, Int, Real, Scalar, bound, integer, negate, of_atom, to_real

_LARGEST = 1 << 22  # fp32 holds every integer up to 2^24; positions are below 2^22


def _integer(value: Real) -> Int | None:
    if value.kind == "int":
        found = value.args[0]
        assert isinstance(found, Int)
        return found
    if value.kind == "const":
        number = value.args[0]
        assert isinstance(number, float)
        return integer(int(number)) if number.is_integer() and abs(number) <= _LARGEST else None
    return None


def whole(kind: str, left: Real, right: Real) -> Real | None:
    """A sum, product or extreme of floats that hold integers, where all are small enough to be exact."""
    x, y = _integer(left), _integer(right)
    if x is None or y is None:
        return None
    match kind:
        case "add":
            found = x + y
        case "mul":
            found = times(x, y)
        case "min" | "max":
            found = rebuilt(kind, (x, y))
        case _:
            return None
    if any(abs(c) > _LARGEST for _, c in found.terms):
        return None
    return to_real(found)


def floor(value: Real) -> Scalar | None:
    """Floor of an integer divided by a positive one: exact in fp32 below 2^22, since quotients are 1 / n apart."""
    if value.kind == "int":
        return value
    if value.kind != "div":
        return None
    left, right = value.args
    assert isinstance(left, Real)
    assert isinstance(right, Real)
    x, y = _integer(left), _integer(right)
    if x is None or y is None or not y.constant or y.constant < 0 or bound(x, upper=False) < 0:
        return None
    return to_real(of_atom("div", x, y.constant))


def equals_zero(x: Real, y: Real) -> Cond | None:
    """An element of a float input compared with 0."""
    for read, zero in ((x, y), (y, x)):
        if read.kind == "read" and zero.kind == "const" and zero.args[0] == 0.0:
            return negate(Cond("read", read.args))
    return None
