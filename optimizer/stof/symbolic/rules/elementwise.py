# SPDX-License-Identifier: Apache-2.0
"""Rules of elementwise arithmetic: exact for integers, and for floats where their values are known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from stof.symbolic.algebra.conditions import all_of, equal, less_equal, negate, select
from stof.symbolic.algebra.divisions import floor_div, floor_mod, of_sizes
from stof.symbolic.algebra.float_arithmetic import floor_quotient, fold_real, negate_real
from stof.symbolic.algebra.int_bounds import bound, multiply, rebuild
from stof.symbolic.algebra.piecewise import as_int, split_cases, to_int
from stof.symbolic.algebra.terms import Int, Real, Scalar, integer, of_atom, real, subterms, to_real, var
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules.broadcasting import elementwise, pointwise
from stof.symbolic.tensor import SymTensor

_NOT_OF_SIZES = ("var", "read", "unread", "table")  # indices, and elements of inputs and constants
_MAX_REMAINDER = 8  # largest number whose remainder by a size is a selection


def add(x: Scalar, y: Scalar) -> Scalar:
    """X + y."""
    return x + y if isinstance(x, Int) and isinstance(y, Int) else fold_real("add", x, y)


def sub(x: Scalar, y: Scalar) -> Scalar:
    """X - y."""
    return x - y if isinstance(x, Int) and isinstance(y, Int) else fold_real("add", x, negate_real(y))


def mul(x: Scalar, y: Scalar) -> Scalar:
    """X * y."""
    return multiply(x, y) if isinstance(x, Int) and isinstance(y, Int) else fold_real("mul", x, y)


def div(x: Scalar, y: Scalar) -> Scalar:
    """X / y. Integer division truncates in ONNX, which is the floor where nothing is negative."""
    if isinstance(x, Int) and isinstance(y, Int):
        if x.constant is not None and y.constant:
            return integer(_truncated_quotient(x.constant, y.constant))
        exact = x.divide(y)
        if exact is not None:
            return exact
        if y.constant and y.constant > 0:
            if bound(x, upper=True) <= 0:
                return -floor_div(-x, y.constant)
            floor = floor_div(x, y.constant)
            # In a valid graph sizes are not negative, nor numbers that are computed from them alone.
            if bound(x, upper=False) >= 0 or not any(t.kind in _NOT_OF_SIZES for t in subterms(x)):
                return floor
            rest = floor_mod(x, y.constant)
            return floor + to_int(all_of([less_equal(x, integer(-1)), negate(equal(rest, integer(0)))]))
        return of_atom("opaque", "division", x, y)
    return fold_real("div", x, y)


def _truncated_quotient(x: int, y: int) -> int:
    """The truncated quotient. Not by fp64, which does not hold all large integers."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _make_modulo(fmod: bool) -> Callable[[Scalar, Scalar], Scalar]:
    def modulo(x: Scalar, y: Scalar) -> Scalar:
        if isinstance(x, Int) and isinstance(y, Int) and y.constant:
            if x.constant is not None:
                whole = _truncated_quotient(x.constant, y.constant) if fmod else x.constant // y.constant
                return integer(x.constant - whole * y.constant)
            if not fmod or (bound(x, upper=False) >= 0 and y.constant > 0):
                return floor_mod(x, y.constant) if y.constant > 0 else of_atom("mod", x, y.constant)
            return _truncated_rest(x, abs(y.constant))
        if isinstance(x, Int) and isinstance(y, Int):
            if not fmod and (remainder := _by_size(x, y)) is not None:
                return remainder
            if x.divide(y) is not None:
                return integer(0)
            return of_atom("opaque", "remainder" if fmod else "modulo", x, y)
        return Real("opaque", ("Mod", to_real(x), to_real(y)))

    return modulo


def _by_size(x: Int, size: Int) -> Int | None:
    """A small number modulo a dimension: the number, or dimension + number if negative; the smallest dimensions differ."""
    number, atom = x.constant, size.atom
    if number is None or abs(number) > _MAX_REMAINDER or atom is None or atom.kind != "size":
        return None
    remainder = x if number >= 0 else size + x
    for n in range(1, abs(number) + (number >= 0)):
        chosen = select(equal(size, integer(n)), integer(number % n), remainder)
        assert isinstance(chosen, Int)
        remainder = chosen
    return remainder


def _truncated_rest(x: Int, y: int) -> Int:
    """The remainder with the sign of x, for y > 0."""
    rest = floor_mod(x, y)
    below = all_of([less_equal(x, integer(-1)), negate(equal(rest, integer(0)))])
    return rest - to_int(below) * integer(y)


def _make_extreme(kind: str) -> Callable[..., Scalar]:
    def fold(*values: Scalar) -> Scalar:
        result = values[0]
        for value in values[1:]:
            whole = isinstance(result, Int) and isinstance(value, Int)
            result = rebuild(kind, (result, value)) if whole else fold_real(kind, result, value)
        return result

    return fold


def _take_absolute(x: Scalar) -> Scalar:
    if isinstance(x, Int):
        if bound(x, upper=False) >= 0:
            return x
        if bound(x, upper=True) <= 0:
            return -x
        first = next((c for m, c in x.terms if m != ()), 1)
        return of_atom("abs", x if first > 0 else -x)
    value = to_real(x)
    if value.kind == "int":
        inner = value.args[0]
        assert isinstance(inner, Int)
        return to_real(_take_absolute(inner))
    if value.kind == "const":
        number = value.args[0]
        assert isinstance(number, float)
        return real(abs(number))
    quotient = _quotient(value)
    if quotient is not None:
        return Real("div", (to_real(_take_absolute(quotient[0])), real(quotient[1])))
    return Real("opaque", ("Abs", value))


def _quotient(value: Real) -> tuple[Int, float] | None:
    """(x, c) where a float is integer x divided by positive number c."""
    if value.kind != "div":
        return None
    left, right = value.args
    assert isinstance(left, Real)
    assert isinstance(right, Real)
    number = right.args[0] if right.kind == "const" else None
    if left.kind != "int" or not isinstance(number, float) or not 0 < number < math.inf:
        return None
    return to_int(left), number


def _sign(x: Scalar) -> Scalar:
    if not isinstance(x, Int):
        value = to_real(x)
        if value.kind == "const" and isinstance(value.args[0], float):
            return real(float(np.sign(value.args[0])))
        if value.kind == "int":
            return to_real(_sign(to_int(value)))
        quotient = _quotient(value)
        return Real("opaque", ("Sign", value)) if quotient is None else to_real(_sign(quotient[0]))
    if of_sizes(x) and bound(x, upper=False, smallest=1.0) >= 1:
        # Exporters' floor divisions take the sign of a size. A past may be 0: the mask check also runs without a past.
        return integer(1)
    positive, negative = less_equal(integer(1), x), less_equal(x, integer(-1))
    return select(positive, integer(1), select(negative, integer(-1), integer(0)))


def _real_function(name: str, function: Callable[[np.float64], float]) -> Callable[[Scalar], Scalar]:
    def apply(x: Scalar) -> Scalar:
        value = to_real(x)
        if name == "Floor" and (lower := floor_quotient(value)) is not None:
            return lower
        if value.kind == "const":
            number = value.args[0]
            assert isinstance(number, float)
            with np.errstate(all="ignore"):
                return real(function(np.float64(number)))
        cases = split_cases(value)
        if len(cases) <= 8 and all(isinstance(x, float) for _, x in cases):  # a mask
            result: Scalar = real(math.nan)
            for number, (cond, case) in enumerate(cases):
                assert isinstance(case, float)
                mapped = apply(real(case))
                result = select(cond, mapped, result) if number else mapped
            return result
        return Real("opaque", (name, value))

    return apply


def _power(x: Scalar, y: Scalar) -> Scalar:
    a, b = to_real(x), to_real(y)
    if a.kind == "const" and b.kind == "const":
        with np.errstate(all="ignore"):
            return real(float(np.float64(str(a.args[0])) ** np.float64(str(b.args[0]))))
    power = as_int(b)
    if a.kind == "int" and power is not None and power.constant in (1, 2, 3):
        result: Scalar = a
        for _ in range(power.constant - 1):
            result = mul(result, a)
        return to_int(x) if isinstance(x, Int) and power.constant == 1 else result
    return Real("opaque", ("Pow", a, b))


def _clip(context: RuleContext) -> list[Fact] | None:
    low, high = _make_extreme("max"), _make_extreme("min")
    has_low, has_high = context.has(1), context.has(2)
    if any(not has and _may_hold(context, limit) for has, limit in ((has_low, -math.inf), (has_high, math.inf))):
        # A missing bound is the lowest or largest finite number: Clip would turn an infinity into it.
        return [Fact(context.fact(0).dtype, context.shape(0))]
    if has_low and has_high:
        return elementwise(context, lambda x, a, b: high(low(x, a), b), context.fact(0).dtype)
    if has_low:
        return elementwise(context, low, context.fact(0).dtype, 2)
    if has_high:
        shape, most = context.shape(0), context.value(2)
        value = context.value(0)
        if shape is None or most is None or value is None:
            return [Fact(context.fact(0).dtype, shape)]
        limit = most.at((integer(0),) * most.rank)
        return [Fact(context.fact(0).dtype, shape, SymTensor(shape, value.kind, lambda i: high(value.at(i), limit)))]
    return [Fact(context.fact(0).dtype, context.shape(0))]


def _may_hold(context: RuleContext, number: float) -> bool:
    """Whether elements of the first input may be ``number``: it occurs among their constants."""
    value = context.value(0)
    if value is None or value.kind != "f":
        return False
    if value.constant is not None:
        return bool(np.any(value.constant == number))
    element = value.at(tuple(integer(0) if d.constant == 1 else var(f"any{i}") for i, d in enumerate(value.shape)))
    return any(p.kind == "const" and p.args[0] == number for p in subterms(element))


# NumPy's functions return infinity or NaN as ONNX does, where Python's raise.
_REAL: dict[str, Callable[[np.float64], float]] = {
    "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal,
    "Exp": np.exp,
    "Log": np.log,
    "Sin": np.sin,
    "Cos": np.cos,
    "Tanh": np.tanh,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.rint,
    "Sigmoid": lambda x: 1.0 / (1.0 + np.exp(-x)),
    "Erf": math.erf,
}
RULES: dict[str, Rule] = {
    "Add": pointwise(add),
    "Sub": pointwise(sub),
    "Mul": pointwise(mul),
    "Div": pointwise(div),
    "Mod": lambda c: elementwise(c, _make_modulo(bool(c.number("fmod", 0))), None),
    "Neg": pointwise(negate_real),
    "Abs": pointwise(_take_absolute),
    "Sign": pointwise(_sign),
    "Min": pointwise(_make_extreme("min")),
    "Max": pointwise(_make_extreme("max")),
    "Clip": _clip,
    "Pow": lambda c: elementwise(c, _power, c.fact(0).dtype),
}
RULES |= {name: pointwise(_real_function(name, function)) for name, function in _REAL.items()}
