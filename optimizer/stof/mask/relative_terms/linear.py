# SPDX-License-Identifier: Apache-2.0
"""Floats as sums of terms with number factors, so that equal sums compare equal however a graph scales them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from stof.errors import UnsupportedError
from stof.mask.site import AttentionSite
from stof.symbolic.algebra.terms import Int, Real, real, subterms

ONE = real(1.0)  # the term of a number
_SAME = 1e-6  # relative difference of factors that exporters rounded to fp32
_MOST_NODES = 1 << 16  # of a float that is read as a sum
_LARGEST_TERM = 1 << 16  # subterms, shared ones counted each time: two equal terms compare as slowly
_DATA = frozenset({"read", "unread", "opaque", "unopaque"})  # kinds whose value the inputs decide, or nothing tells
_STORED = frozenset({"table", "untable"})  # kinds whose value a constant of the graph decides
_LARGEST_NUMBER = 8.0  # a check of free lengths has one above it
Sum = Mapping[Real, float]
_Addends = tuple[tuple[Real, float, float], ...]  # each float times a number, divided by another one


def linear_sum(value: Real, reach: float | None = None) -> Sum:
    """The factor of each term; numbers count for :data:`ONE`. A term is anything but a sum, or a product with a number.

    Args:
        value: the float.
        reach: the largest number whose effect the check by execution shows, where it runs what makes the float. A float that is 0
            under a condition on indices, as where a Pad is cut off again, counts as what it is elsewhere: the check finds a 0
            that is read after all. It draws no data for the sake of a condition, and no lengths for that of its numbers, so
            conditions on data and on larger numbers make terms. Without execution, None, all do.

    Raises:
        UnsupportedError: where the float, or one of its terms, is too large.
    """
    nodes, addends = _read_sums(value, reach)
    factors = dict.fromkeys(map(id, nodes), 0.0)
    factors[id(value)] = 1.0
    for one in _users_first(value, addends):  # so a float that many sums share is read once
        for part, number, divisor in addends.get(id(one), ()):
            factors[id(part)] += factors[id(one)] * number / divisor
    total: dict[Real, float] = {}
    for one in nodes:
        if id(one) in addends:
            continue
        if one.weight > _LARGEST_TERM:
            raise UnsupportedError("one of its terms is too large to compare")
        is_number = one.kind == "const"
        term, factor = (ONE, factors[id(one)] * number_or_zero(one)) if is_number else (one, factors[id(one)])
        total[term] = total.get(term, 0.0) + factor
    return MappingProxyType({term: factor for term, factor in total.items() if factor})


def _read_sums(value: Real, reach: float | None) -> tuple[list[Real], dict[int, _Addends]]:
    """The floats that a float is summed of, itself included, each object once; and the addends of those that are sums, by id."""
    nodes: list[Real] = []
    addends: dict[int, _Addends] = {}
    pending, seen = [value], set[int]()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        if len(seen) == _MOST_NODES:
            raise UnsupportedError(f"it is a sum of more than {_MOST_NODES} parts")
        seen.add(id(one))
        nodes.append(one)
        if parts := _addends(one, reach):
            addends[id(one)] = parts
            pending += [part for part, _, _ in parts]
    return nodes, addends


def _users_first(value: Real, addends: Mapping[int, _Addends]) -> list[Real]:
    """The floats that a float is summed of, each one behind all sums that it is a part of."""
    order: list[Real] = []
    pending, seen = [(value, False)], set[int]()
    while pending:
        one, is_left = pending.pop()
        if is_left:
            order.append(one)
        elif id(one) not in seen:
            seen.add(id(one))
            pending.append((one, True))
            pending += [(part, False) for part, _, _ in addends.get(id(one), ())]
    return order[::-1]


def _addends(one: Real, reach: float | None) -> _Addends:
    """What a float is the sum of, with factors; nothing where it is a term."""
    parts = [a for a in one.args if isinstance(a, Real)]
    match one.kind:
        case "add":
            return tuple((part, 1.0, 1.0) for part in parts)
        case "sub":
            return (parts[0], 1.0, 1.0), (parts[1], -1.0, 1.0)
        case "neg":
            return ((parts[0], -1.0, 1.0),)
        case "mul" if (number := _number(parts[1])) is not None:
            return ((parts[0], number, 1.0),)
        case "mul" if (number := _number(parts[0])) is not None:
            return ((parts[1], number, 1.0),)
        case "div" if number := number_or_zero(parts[1]):
            return ((parts[0], 1.0, number),)
        case "select" if _is_shown(one.args[0], reach):
            others = [part for part in parts if _number(part) != 0.0]
            return ((others[0], 1.0, 1.0),) if len(others) == 1 else ()
    return ()


def _is_shown(condition: object, reach: float | None) -> bool:
    """Whether a check by execution shows where a condition holds: neither data nor large numbers decide it."""
    if reach is None:
        return False
    for one in subterms(condition):
        if one.kind in _DATA or isinstance(one, Real) or (one.kind in _STORED and reach < math.inf):
            return False
        polynomials = [a for a in one.args if isinstance(a, Int)]
        numbers = [c for a in polynomials for _, c in a.terms] + [a for a in one.args if isinstance(a, int)]
        if any(abs(number) > reach for number in numbers):
            return False
    return True


def reach_of_check(site: AttentionSite) -> float:
    """The largest number in a condition whose effect the check of a site's terms by execution shows."""
    is_fixed = all(d.constant is not None for d in site.dims[2:])  # the only lengths are those that run
    return math.inf if is_fixed else _LARGEST_NUMBER


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
