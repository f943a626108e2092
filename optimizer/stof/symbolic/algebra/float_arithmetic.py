# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of floats, evaluated where operands are known, and exactly where they are integers that were cast."""

from __future__ import annotations

import numpy as np

from stof.symbolic.algebra.int_bounds import LONGEST, bound, is_within, multiply, rebuild
from stof.symbolic.algebra.terms import Int, Real, Scalar, integer, of_atom, real, to_real


def fold_real(kind: str, x: Scalar, y: Scalar) -> Scalar:
    """A float operation, evaluated where its operands are known."""
    left, right = to_real(x), to_real(y)
    has_integer = "int" in (left.kind, right.kind)
    if kind != "div" and has_integer and (exact := _fold_integers(kind, left, right)) is not None:
        return exact
    if left.kind == "const" and right.kind == "const":
        a, b = left.args[0], right.args[0]
        assert isinstance(a, float)
        assert isinstance(b, float)
        with np.errstate(all="ignore"):
            match kind:
                case "add":
                    return real(a + b)
                case "mul":
                    return real(a * b)
                case "div":
                    return real(float(np.float64(a) / np.float64(b)))
                case "min":
                    return real(np.minimum(a, b))  # NaN where one is
                case "max":
                    return real(np.maximum(a, b))
    return _drop_neutral(kind, left, right) or _shift_rounded(kind, left, right) or Real(kind, (left, right))


def _shift_rounded(kind: str, left: Real, right: Real) -> Real | None:
    """A rounded integer plus a small integer, as one rounded integer: the order and sums of small numbers stay the same."""
    if kind == "add" and right.kind == "rounded":
        left, right = right, left
    if kind != "add" or left.kind != "rounded" or right.kind != "const":
        return None
    (inner, largest), number = left.args, right.args[0]
    assert isinstance(inner, Int)
    assert isinstance(largest, int)
    assert isinstance(number, float)
    if not number.is_integer() or 2 * abs(number) > largest:
        return None
    return Real("rounded", (inner + integer(int(number)), largest - abs(int(number))))


def _drop_neutral(kind: str, left: Real, right: Real) -> Real | None:
    """X of x + 0, x * 1 and x / 1. Not 0 for 0 * x: x may be infinite."""
    zero, one = real(0.0), real(1.0)
    if kind == "add":
        return right if left == zero else left if right == zero else None
    if kind == "mul" and left == one:
        return right
    return left if kind in ("mul", "div") and right == one else None


def negate_real(x: Scalar) -> Scalar:
    """-x."""
    if isinstance(x, Int):
        return -x
    value = to_real(x)
    if value.kind == "const":
        number = value.args[0]
        assert isinstance(number, float)
        return real(-number)
    if value.kind == "int":
        inner = value.args[0]
        assert isinstance(inner, Int)
        return to_real(-inner)
    return Real("neg", (value,))


def _as_integer(value: Real) -> Int | None:
    if value.kind == "int":
        inner = value.args[0]
        assert isinstance(inner, Int)
        return inner
    if value.kind == "const":
        number = value.args[0]
        assert isinstance(number, float)
        return integer(int(number)) if number.is_integer() and abs(number) <= LONGEST else None
    return None


def _fold_integers(kind: str, left: Real, right: Real) -> Real | None:
    """A sum, product, minimum or maximum of floats that hold integers, where the result is exact in fp32."""
    x, y = _as_integer(left), _as_integer(right)
    if x is None or y is None:
        return None
    match kind:
        case "add":
            result = x + y
        case "mul":
            result = multiply(x, y)
        case "min" | "max":
            result = rebuild(kind, (x, y))
        case _:
            return None
    if any(abs(c) > LONGEST for _, c in result.terms):  # fp32 is exact up to 2^24
        return None
    return to_real(result)


def floor_quotient(value: Real) -> Scalar | None:
    """Floor of an integer, or of one divided by a positive one; exact in fp32 below 2^22, where quotients are 1 / n apart."""
    if value.kind == "int":
        return value
    if value.kind != "div":
        return None
    left, right = value.args
    assert isinstance(left, Real)
    assert isinstance(right, Real)
    x, y = _as_integer(left), _as_integer(right)
    if x is None or y is None or not y.constant or y.constant < 0 or bound(x, upper=False) < 0:
        return None
    return to_real(of_atom("div", x, y.constant))


def round_integers(value: Real, largest: int) -> Real:
    """The float with those of its integers rounded that may exceed ``largest``."""
    if value.kind == "int":
        inner = value.args[0]
        assert isinstance(inner, Int)
        return value if is_within(inner, largest) else Real("rounded", (inner, largest))
    if value.kind == "rounded":
        inner, before = value.args
        assert isinstance(before, int)
        return Real("rounded", (inner, min(before, largest)))
    if value.kind in ("select", "add", "mul", "div", "min", "max", "neg"):
        return Real(value.kind, tuple(round_integers(a, largest) if isinstance(a, Real) else a for a in value.args))
    return value
