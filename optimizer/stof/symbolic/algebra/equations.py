# SPDX-License-Identifier: Apache-2.0
"""Equations between sizes: reduced to what they say, and solved for dimensions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stof.symbolic.algebra.terms import Atom, Int, integer

Equation = tuple[Int, Int]
_MOST_ROUNDS = 16  # in which all equations are solved, each with what those before have found


def reduce_equation(one: Int, other: Int) -> Equation:
    """The same equation without what both sides share: terms, a factor of all terms, a common divisor.

    Sizes are at least 1, so that a size that is a factor of both sides says nothing.
    """
    sides = [dict(one.terms), dict(other.terms)]
    for monomial in sides[0].keys() & sides[1].keys():
        coefficients = [side[monomial] for side in sides]
        if coefficients[0] * coefficients[1] > 0:
            shared = min(coefficients, key=abs)
            for side in sides:
                side[monomial] -= shared
    left, right = (
        Int(tuple((m, side[m]) for m, _ in size.terms if side[m]))
        for size, side in zip((one, other), sides, strict=True)
    )
    if not left.terms or not right.terms:  # a length that is 0, or twice the same
        return one, other
    terms = [*left.terms, *right.terms]
    divisor = math.gcd(*(c for _, c in terms))
    factors = [a for a in left.terms[0][0] if a.kind == "size" and all(a in m for m, _ in terms)]
    factor = integer(divisor)
    for atom in dict.fromkeys(factors):
        factor = factor * Int((((atom,), 1),))
    return left.divide(factor) or left, right.divide(factor) or right


def substitute(size: Int, replacements: Mapping[str, Int]) -> Int:
    """A size with other sizes in place of dimensions, also inside of quotients and the like."""
    if not replacements:
        return size
    total = integer(0)
    for monomial, coefficient in size.terms:
        product = integer(coefficient)
        for atom in monomial:
            product = product * _substitute_atom(atom, replacements)
        total = total + product
    return total


def _substitute_atom(atom: Atom, replacements: Mapping[str, Int]) -> Int:
    if atom.kind == "size":
        replacement = replacements.get(str(atom.args[0]))
        return Int((((atom,), 1),)) if replacement is None else replacement
    arguments = tuple(substitute(a, replacements) if isinstance(a, Int) else a for a in atom.args)
    return Int((((Atom(atom.kind, arguments),), 1),))


@dataclass(frozen=True)
class SolvedSizes:
    """What equations say about dimensions.

    Attributes:
        values: of dimensions that are numbers, or are equal to another dimension.
        rest: the equations that remain, between dimensions without ``values``.
    """

    values: Mapping[str, Int]
    rest: tuple[Equation, ...]

    def name_of(self, name: str) -> str:
        """The dimension that stands for one and for all that are equal to it; empty for a number."""
        value = self.values.get(name)
        atom = None if value is None else value.atom
        return name if value is None else "" if atom is None else str(atom.args[0])


def solve_equations(equations: Iterable[Equation], names: Iterable[str]) -> SolvedSizes:
    """Solves equations for dimensions that are equal to a number or to each other.

    Args:
        equations: of sizes.
        names: of dimensions, those first that stand for others that are equal to them.
    """
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    values: dict[str, Int] = {}
    rest = list(dict.fromkeys(equations))
    for _ in range(_MOST_ROUNDS):
        count, remaining = len(values), dict[Equation, None]()
        for one, other in rest:
            pair = reduce_equation(substitute(one, values), substitute(other, values))
            solved = _solve_one(*pair, order)
            if solved is not None:
                name, value = solved
                values = {n: substitute(v, {name: value}) for n, v in values.items()} | {name: value}
            elif pair[0] != pair[1]:
                remaining[pair] = None
        rest = list(remaining)
        if len(values) == count:
            break
    return SolvedSizes(values, tuple(rest))


def _solve_one(one: Int, other: Int, order: Mapping[str, int]) -> tuple[str, Int] | None:
    """A dimension and what it is equal to, where an equation says that it is a number or another dimension."""
    difference = one - other
    variable = [(m, c) for m, c in difference.terms if m]
    names = [str(m[0].args[0]) for m, _ in variable if len(m) == 1 and m[0].kind == "size"]
    if len(names) != len(variable):
        return None
    if len(names) == 1:
        number, remainder = divmod(-difference.offset, variable[0][1])
        return None if remainder or number < 0 else (names[0], integer(number))
    if len(names) == 2 and not difference.offset and variable[0][1] == -variable[1][1]:
        kept, gone = sorted(names, key=lambda n: order.get(n, len(order)))
        value = next(Int(((m, 1),)) for m, _ in variable if str(m[0].args[0]) == kept)
        return gone, value
    return None
