# SPDX-License-Identifier: Apache-2.0
"""Rules of comparisons, of logical operators and of Where."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx import TensorProto

from stof.symbolic.algebra import float_bounds
from stof.symbolic.algebra.conditions import all_of, any_of, equal, less_equal, negate, select
from stof.symbolic.algebra.int_bounds import is_within
from stof.symbolic.algebra.piecewise import as_int, case_as_real, reads_number, split_cases, split_cond, to_cond, to_int
from stof.symbolic.algebra.terms import FALSE, TRUE, Cond, Int, Real, Scalar, integer, to_real
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules.broadcasting import elementwise, pointwise

BOOL = TensorProto.BOOL
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq"}
COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
}


def make_comparison(kind: str) -> Callable[[Scalar, Scalar], Scalar]:
    """The comparison ``kind`` ("lt", "le", "gt", "ge", "eq") of two scalars."""

    def apply(x: Scalar, y: Scalar) -> Scalar:
        left, right = as_int(x), as_int(y)
        if left is None or right is None:
            return _compare_real(kind, to_real(x), to_real(y))
        match kind:
            case "lt":
                return less_equal(left + integer(1), right)
            case "le":
                return less_equal(left, right)
            case "gt":
                return less_equal(right + integer(1), left)
            case "ge":
                return less_equal(right, left)
        if isinstance(x, Cond) and isinstance(y, Cond):
            return any_of([all_of([x, y]), all_of([negate(x), negate(y)])])
        return equal(left, right)

    return apply


def _is_below(value: Real, largest: int) -> bool:
    """Whether the absolute value of a float is below ``largest`` in every run."""
    if value.kind == "int" and isinstance(value.args[0], Int):
        return is_within(value.args[0], largest - 1)
    return value.kind == "const" and isinstance(value.args[0], float) and abs(value.args[0]) < largest


def _is_position(value: Real) -> bool:
    """Whether a float is an integer that depends on an index of the tensor."""
    inner = value.args[0] if value.kind in ("int", "rounded") else None
    return isinstance(inner, Int) and any(a.kind == "var" for a in inner.atoms())


def _compare_real(kind: str, x: Real, y: Real) -> Scalar:
    if kind == "eq" and (zero_test := _equals_zero(x, y)) is not None:
        return zero_test
    if y.kind == "rounded" != x.kind and kind in _SWAPPED:
        return _compare_real(_SWAPPED[kind], y, x)
    if x.kind == "rounded":
        inner, largest = x.args
        assert isinstance(inner, Int)
        assert isinstance(largest, int)
        if _is_below(y, largest):  # rounding is monotone, and exact for small numbers
            return make_comparison(kind)(to_real(inner), y)
        return Cond("opaque", (kind, x, y))
    if x.kind == "int" and y.kind == "const":  # an integer and a fraction
        inner, limit = to_int(x), y.args[0]
        assert isinstance(limit, float)
        if math.isfinite(limit):
            down = math.floor(limit)
            match kind:
                case "lt" | "le":
                    return less_equal(inner, integer(down))
                case "gt" | "ge":
                    return less_equal(integer(down + 1), inner)
            return FALSE
    first, second = reads_number(x), reads_number(y)
    if (first and (second or _is_position(y))) or (second and _is_position(x)):
        return Cond("opaque", (kind, x, y))  # document ids or lengths, not a 0/1 mask
    conditions = []
    for c1, a in split_cases(x):
        for c2, b in split_cases(y):
            if isinstance(a, float) and isinstance(b, float):
                holds = TRUE if COMPARISONS[kind](a, b) else FALSE
            elif (left := as_int(case_as_real(a))) is not None and (right := as_int(case_as_real(b))) is not None:
                holds = to_cond(make_comparison(kind)(left, right))
            elif (verdict := float_bounds.compare_ranges(kind, case_as_real(a), case_as_real(b))) is not None:
                holds = TRUE if verdict else FALSE
            else:
                holds = Cond("opaque", (kind, x, y))
            conditions.append(all_of([c1, c2, holds]))
    return any_of(conditions)


def _equals_zero(x: Real, y: Real) -> Cond | None:
    """The condition that an element of a float input is 0."""
    for read, zero in ((x, y), (y, x)):
        if read.kind == "read" and zero.kind == "const" and zero.args[0] == 0.0:
            return negate(Cond("read", read.args))
    return None


def _not(x: Scalar) -> Scalar:
    return negate(to_cond(x))


def _make_logic(kind: str) -> Callable[[Scalar, Scalar], Scalar]:
    def apply(x: Scalar, y: Scalar) -> Scalar:
        a, b = to_cond(x), to_cond(y)
        if kind == "and":
            return all_of([a, b])
        if kind == "or":
            return any_of([a, b])
        return any_of([all_of([a, negate(b)]), all_of([negate(a), b])])

    return apply


def _is_nan(x: Scalar) -> Scalar:
    return split_cond(to_real(x), math.isnan)


def _is_infinite(context: RuleContext) -> list[Fact] | None:
    signs = [s for s, name in ((1.0, "detect_positive"), (-1.0, "detect_negative")) if context.number(name, 1)]
    return elementwise(context, lambda x: split_cond(to_real(x), lambda v: v in [s * math.inf for s in signs]), BOOL)


def _where(context: RuleContext) -> list[Fact] | None:
    def choose(cond: Scalar, yes: Scalar, no: Scalar) -> Scalar:
        return select(to_cond(cond), yes, no)

    return elementwise(context, choose, context.fact(1).dtype or context.fact(2).dtype)


RULES: dict[str, Rule] = {
    "Less": pointwise(make_comparison("lt"), BOOL),
    "LessOrEqual": pointwise(make_comparison("le"), BOOL),
    "Greater": pointwise(make_comparison("gt"), BOOL),
    "GreaterOrEqual": pointwise(make_comparison("ge"), BOOL),
    "Equal": pointwise(make_comparison("eq"), BOOL),
    "And": pointwise(_make_logic("and"), BOOL),
    "Or": pointwise(_make_logic("or"), BOOL),
    "Xor": pointwise(_make_logic("xor"), BOOL),
    "Not": pointwise(_not, BOOL),
    "IsInf": _is_infinite,
    "IsNaN": pointwise(_is_nan, BOOL),
    "Where": _where,
}
