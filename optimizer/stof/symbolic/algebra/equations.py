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
    difference = one - other
    if not difference.terms or len(difference.terms) < 2:
        return one, other
    divisor = math.gcd(*(c for _, c in difference.terms))
    shared = [a for a in difference.terms[0][0] if a.kind == "size"]
    terms = [(list(m), c // divisor) for m, c in difference.terms]
    for atom in shared:
        if all(atom in m for m, _ in terms):
            for m, _ in terms:
                m.remove(atom)
    sides = (Int(tuple((tuple(m), sign * c) for m, c in terms if sign * c > 0)) for sign in (1, -1))
    left, right = sides
    is_shorter = len(left.terms) + len(right.terms) < len(one.terms) + len(other.terms) or divisor > 1 or shared
    return (left, right) if left.terms and right.terms and is_shorter else (one, other)


def substitute(size: Int, known: Mapping[str, Int]) -> Int:
    """A size with other sizes in place of dimensions, also inside of quotients and the like."""
    if not known:
        return size
    total = integer(0)
    for monomial, coefficient in size.terms:
        product = integer(coefficient)
        for atom in monomial:
            product = product * _substitute_atom(atom, known)
        total = total + product
    return total


def _substitute_atom(atom: Atom, known: Mapping[str, Int]) -> Int:
    if atom.kind == "size":
        found = known.get(str(atom.args[0]))
        return Int((((atom,), 1),)) if found is None else found
    arguments = tuple(substitute(a, known) if isinstance(a, Int) else a for a in atom.args)
    return Int((((Atom(atom.kind, arguments),), 1),))


@dataclass(frozen=True)
class SolvedSizes:
    """What equations say about dimensions.

    Attributes:
        known: dimensions that are numbers, or are equal to another dimension.
        rest: the equations that are left, between dimensions that are not ``known``.
    """

    known: Mapping[str, Int]
    rest: tuple[Equation, ...]

    def name_of(self, name: str) -> str:
        """The dimension that stands for one and for all that are equal to it; empty for a number."""
        found = self.known.get(name)
        atom = None if found is None else found.atom
        return name if found is None else "" if atom is None else str(atom.args[0])


def solve_equations(equations: Iterable[Equation], names: Iterable[str]) -> SolvedSizes:
    """Solves equations for dimensions that are equal to a number or to each other.

    Args:
        equations: of sizes.
        names: of dimensions, those first that stand for others that are equal to them.
    """
    order = {name: i for i, name in enumerate(dict.fromkeys(names))}
    known: dict[str, Int] = {}
    rest = list(dict.fromkeys(equations))
    for _ in range(_MOST_ROUNDS):
        count, left = len(known), dict[Equation, None]()
        for one, other in rest:
            pair = reduce_equation(substitute(one, known), substitute(other, known))
            solved = _solve_one(*pair, order)
            if solved is not None:
                name, value = solved
                known = {n: substitute(v, {name: value}) for n, v in known.items()} | {name: value}
            elif pair[0] != pair[1]:
                left[pair] = None
        rest = list(left)
        if len(known) == count:
            break
    return SolvedSizes(known, tuple(rest))


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
