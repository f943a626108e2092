# SPDX-License-Identifier: Apache-2.0
"""Floats as sums of terms with number factors, so that equal sums compare equal however a graph scales them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from stof.symbolic.algebra.terms import Real, real

ONE = real(1.0)  # the term of a number
_SAME = 1e-6  # relative difference of factors that exporters rounded to fp32
Sum = Mapping[Real, float]


def linear_sum(value: Real) -> Sum:
    """The factor of each term; numbers count for :data:`ONE`. A term is anything but a sum, or a product with a number."""
    total: dict[Real, float] = {}
    pending = [(value, 1.0)]
    while pending:
        one, factor = pending.pop()
        parts = [a for a in one.args if isinstance(a, Real)]
        match one.kind:
            case "add":
                pending += [(part, factor) for part in parts]
            case "sub":
                pending += [(parts[0], factor), (parts[1], -factor)]
            case "neg":
                pending.append((parts[0], -factor))
            case "mul" if (number := _number(parts[1])) is not None:
                pending.append((parts[0], factor * number))
            case "mul" if (number := _number(parts[0])) is not None:
                pending.append((parts[1], factor * number))
            case "div" if number_or_zero(parts[1]):
                pending.append((parts[0], factor / number_or_zero(parts[1])))
            case "const":
                total[ONE] = total.get(ONE, 0.0) + factor * number_or_zero(one)
            # A Pad that is cut off again. The check by execution tells where the number is read after all.
            case "select" if len(parts) == 2 and _number(parts[1]) == 0.0:
                pending.append((parts[0], factor))
            case "select" if len(parts) == 2 and _number(parts[0]) == 0.0:
                pending.append((parts[1], factor))
            case _:
                total[one] = total.get(one, 0.0) + factor
    return MappingProxyType({term: factor for term, factor in total.items() if factor})


def ratio(one: Sum, other: Sum) -> float | None:
    """The number that ``other`` times gives ``one``; None where there is none."""
    if not one or one.keys() != other.keys():
        return None
    factors = [one[term] / other[term] for term in one]
    return factors[0] if all(is_same(f, factors[0]) for f in factors) else None


def is_same(one: float, other: float) -> bool:
    """Whether two factors are equal but for rounding to fp32."""
    return abs(one - other) <= _SAME * max(abs(one), abs(other))


def _number(value: Real) -> float | None:
    number = value.args[0] if value.kind == "const" else None
    return number if isinstance(number, float) else None


def number_or_zero(value: Real) -> float:
    """The number that a float is, 0 where it is none."""
    return _number(value) or 0.0
