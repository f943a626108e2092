# SPDX-License-Identifier: Apache-2.0
"""Rules of bitwise operators. With a constant operand, shifts and bit masks are floor divisions and remainders.

Two's complement makes that true for negative integers as well. On 0/1 integers the operators are conditions.
"""

from __future__ import annotations

from collections.abc import Callable

from onnx import TensorProto

from stof.symbolic.algebra.conditions import all_of, any_of, negate
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.int_bounds import bound
from stof.symbolic.algebra.piecewise import to_cond, to_int
from stof.symbolic.algebra.terms import Int, Scalar, integer, of_atom
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules.broadcasting import elementwise, pointwise

_MAX_BITS = 31
_SIGNED = frozenset({TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64})


def _to_integers(x: Scalar, y: Scalar) -> tuple[Int, Int]:
    return to_int(x), to_int(y)


def _is_truth(value: Int) -> bool:
    return bound(value, upper=False) >= 0 and bound(value, upper=True) <= 1


def _make_unknown(name: str, x: Int, y: Int) -> Int:
    return of_atom("opaque", name, x, y)


def bit_and(x: Scalar, y: Scalar) -> Scalar:
    """X & y."""
    left, right = _to_integers(x, y)
    if left.constant is not None:
        left, right = right, left
    number = right.constant
    if number is not None and left.constant is not None:
        return integer(left.constant & number)
    if _is_truth(left) and _is_truth(right):
        return to_int(all_of([to_cond(left), to_cond(right)]))
    if number is not None and 0 <= number < 1 << _MAX_BITS:
        total = integer(0)
        bit = 0
        while number >> bit:  # each run of ones
            if not (number >> bit) & 1:
                bit += 1
                continue
            end = bit
            while (number >> end) & 1:
                end += 1
            total = total + floor_mod(floor_div(left, 1 << bit), 1 << (end - bit)) * integer(1 << bit)
            bit = end
        return total
    if number is not None and number < 0 and -number & (-number - 1) == 0:  # clears low bits
        return left - floor_mod(left, -number)
    return _make_unknown("BitwiseAnd", left, right)


def bit_or(x: Scalar, y: Scalar) -> Scalar:
    """X | y."""
    left, right = _to_integers(x, y)
    if _is_truth(left) and _is_truth(right):
        return to_int(any_of([to_cond(left), to_cond(right)]))
    both = bit_and(left, right)
    return _make_unknown("BitwiseOr", left, right) if _is_unknown(both) else left + right - to_int(both)


def bit_xor(x: Scalar, y: Scalar) -> Scalar:
    """X ^ y."""
    left, right = _to_integers(x, y)
    if _is_truth(left) and _is_truth(right):
        a, b = to_cond(left), to_cond(right)
        return to_int(any_of([all_of([a, negate(b)]), all_of([negate(a), b])]))
    both = bit_and(left, right)
    return _make_unknown("BitwiseXor", left, right) if _is_unknown(both) else left + right - to_int(both) * integer(2)


def _is_unknown(value: Scalar) -> bool:
    return isinstance(value, Int) and value.atom is not None and value.atom.kind == "opaque"


def make_bit_not(signed: bool) -> Callable[[Scalar], Scalar]:
    """~x; unknown for unsigned integers."""
    return lambda x: -to_int(x) - integer(1) if signed else of_atom("opaque", "BitwiseNot", to_int(x))


def make_shift(is_left: bool) -> Callable[[Scalar, Scalar], Scalar]:
    """X << y or x >> y, for integers that are not negative."""

    def apply(x: Scalar, y: Scalar) -> Scalar:
        value, by = _to_integers(x, y)
        count = by.constant
        if count is None or not 0 <= count <= _MAX_BITS or bound(value, upper=False) < 0:
            return _make_unknown("BitShift", value, by)
        return value * integer(1 << count) if is_left else floor_div(value, 1 << count)

    return apply


def _not(context: RuleContext) -> list[Fact] | None:
    return elementwise(context, make_bit_not(context.fact(0).dtype in _SIGNED), None)


def _shift(context: RuleContext) -> list[Fact] | None:
    return elementwise(context, make_shift(context.attribute("direction") == "LEFT"), None)


RULES: dict[str, Rule] = {
    "BitShift": _shift,
    "BitwiseAnd": pointwise(bit_and),
    "BitwiseNot": _not,
    "BitwiseOr": pointwise(bit_or),
    "BitwiseXor": pointwise(bit_xor),
}
