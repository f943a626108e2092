# SPDX-License-Identifier: Apache-2.0
"""Floor division and remainder of symbolic integers by constants."""

from __future__ import annotations

from functools import lru_cache

from stof.symbolic.algebra.terms import Atom, Int, integer, of_atom

ZERO = integer(0)


def floor_mod(x: Int, n: int) -> Int:
    """The remainder of x by n, for n > 0. For sizes it is written x - x // n * n, so that rounding up to a multiple cancels."""
    rest = _indivisible_terms(x, n)
    if rest.constant is not None:
        return integer(rest.constant % n)
    return rest - floor_div(rest, n) * integer(n) if of_sizes(rest) else of_atom("mod", rest, n)


def floor_div(x: Int, n: int) -> Int:
    """The floor of x / n, for n > 0; terms that n divides are divided exactly."""
    rest = _indivisible_terms(x, n)
    whole = (x - rest).divide(integer(n)) or ZERO
    if rest.constant is not None:
        return whole + integer(rest.constant // n)
    if of_sizes(rest) and all(c < 0 for m, c in rest.terms if m):
        # The floor of a negative number rounds its absolute value up.
        return whole - floor_div(integer(n - 1) - rest, n)
    return whole + of_atom("div", rest, n)


def of_sizes(x: Int) -> bool:
    """Whether a number depends on sizes only, not on indices or input data."""
    return all(_is_of_sizes(a) for a in x.atoms())


@lru_cache(maxsize=10_000)
def _is_of_sizes(atom: Atom) -> bool:
    if atom.kind in ("var", "read", "table", "opaque"):
        return False
    return all(isinstance(a, int) or (isinstance(a, Int) and of_sizes(a)) for a in atom.args) or atom.kind == "size"


def _indivisible_terms(x: Int, n: int) -> Int:
    """The terms that n does not divide, the constant one reduced modulo n."""
    return Int(tuple((m, c if m else c % n) for m, c in x.terms if c % n)) if n > 1 else ZERO
