# SPDX-License-Identifier: Apache-2.0
"""Floors and remainders of whole numbers by numbers."""

from __future__ import annotations

from functools import lru_cache

from stof.symbolic.algebra.terms import Atom, Int, integer, of_atom

ZERO = integer(0)


def floor_mod(x: Int, n: int) -> Int:
    """The remainder of x by n, for n > 0. Of sizes it is x less the whole part, which shows what rounds up to a multiple."""
    rest = _indivisible_terms(x, n)
    if rest.constant is not None:
        return integer(rest.constant % n)
    return rest - floor_div(rest, n) * integer(n) if of_sizes(rest) else of_atom("mod", rest, n)


def floor_div(x: Int, n: int) -> Int:
    """The floor of x / n, for n > 0: terms that n divides are taken out."""
    rest = _indivisible_terms(x, n)
    whole = (x - rest).divide(integer(n)) or ZERO
    if rest.constant is not None:
        return whole + integer(rest.constant // n)
    if of_sizes(rest) and all(c < 0 for m, c in rest.terms if m):  # rounded down what is less than 0: rounded up
        return whole - floor_div(integer(n - 1) - rest, n)
    return whole + of_atom("div", rest, n)


def of_sizes(x: Int) -> bool:
    """Whether a number depends on sizes alone, not on places or on what inputs hold."""
    return all(_is_of_sizes(a) for a in x.atoms())


@lru_cache(maxsize=10_000)
def _is_of_sizes(atom: Atom) -> bool:
    if atom.kind in ("var", "read", "table", "opaque"):
        return False
    return all(isinstance(a, int) or (isinstance(a, Int) and of_sizes(a)) for a in atom.args) or atom.kind == "size"


def _indivisible_terms(x: Int, n: int) -> Int:
    """The terms that n does not divide."""
    return Int(tuple((m, c if m else c % n) for m, c in x.terms if c % n)) if n > 1 else ZERO
