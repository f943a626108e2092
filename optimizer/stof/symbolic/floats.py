# SPDX-License-Identifier: Apache-2.0
"""Floats that hold integers: positions that were cast before they were subtracted, compared or divided; numbers too large."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx import TensorProto

from stof.symbolic.casework import rebuilt, times
from stof.symbolic.tensor import Index
from stof.symbolic.terms import Cond, Int, Real, Scalar, bound, cases, integer, negate, of_atom, real, select, to_real

_LARGEST = 1 << 22  # fp32 holds every integer up to 2^24; positions are below 2^22
# The least number that is rounded to infinity: half a unit in the last place beyond the largest one.
_INFINITE: dict[int, float] = {
    int(TensorProto.FLOAT16): 65520.0,
    int(TensorProto.BFLOAT16): float.fromhex("0x1.ffp127"),
    int(TensorProto.FLOAT): float.fromhex("0x1.ffffffp127"),
}

_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def held(number: float, dtype: int) -> float:
    """A computed number as a type holds it, where it is too large: infinite.

    Half types hold what fp32 does: runtimes compute in fp32 as they see fit.
    """
    return _limited(number, int(TensorProto.FLOAT) if dtype in _HALF else dtype)


def _limited(number: float, dtype: int) -> float:
    return math.copysign(math.inf, number) if abs(number) >= _INFINITE.get(dtype, math.inf) else number


def narrowed(element: Callable[[Index], Scalar], before: int, after: int) -> Callable[[Index], Scalar]:
    """The elements of a tensor that is cast from one float type to another, where one of the two may hold less.

    What is cast to a half type is too large for it for certain where it is cast back.
    """
    if after in _HALF or before not in (*_HALF, TensorProto.DOUBLE):
        return element
    narrow = before if before in _HALF else after

    def at(index: Index) -> Scalar:
        value = to_real(element(index))
        found = cases(value)
        numbers = [_limited(x, narrow) if isinstance(x, float) else x for _, x in found]
        if numbers == [x for _, x in found] or any(isinstance(x, float) and math.isnan(x) for x in numbers):
            return value
        result: Scalar = _of_case(numbers[-1])
        for (cond, _), number in list(zip(found, numbers, strict=True))[-2::-1]:
            result = select(cond, _of_case(number), result)
        return result

    return at


def _of_case(value: float | Real) -> Real:
    return real(value) if isinstance(value, float) else value


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
