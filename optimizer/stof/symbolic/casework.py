# SPDX-License-Identifier: Apache-2.0
"""Integers that depend on conditions, by cases: ``bool(c) * 3 - select(d, x, y) <= 0`` is an or over c and d.

Exporters compute with masks as 0/1 integers; a comparison of such a sum becomes conditions that the mask format can print.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from stof.symbolic.terms import Atom, Cond, Int, all_of, bound, integer, negate, of_atom

_MOST = 5  # distinct conditions: at most 32 cases


@lru_cache(maxsize=100_000)
def _first(atom: Atom) -> Cond | None:
    """The first condition on which an atom's value depends."""
    if atom.kind in ("bool", "select"):
        cond = atom.args[0]
        assert isinstance(cond, Cond)
        return cond
    return next((c for value in _integers(atom.args) if (c := condition_of(value)) is not None), None)


def _integers(args: tuple[object, ...]) -> Iterator[Int]:
    for arg in args:
        if isinstance(arg, Int):
            yield arg
        elif isinstance(arg, tuple):
            yield from _integers(arg)


def condition_of(value: Int) -> Cond | None:
    """A condition on which an integer depends, None when there is none."""
    for monomial, _ in value.terms:
        for atom in monomial:
            if (found := _first(atom)) is not None:
                return found
    return None


def assume(value: Int, cond: Cond, holds: bool) -> Int:
    """The integer where a condition is known."""
    if condition_of(value) is None:
        return value
    total = integer(0)
    for monomial, coefficient in value.terms:
        product = integer(coefficient)
        for atom in monomial:
            product = product * _assume_atom(atom, cond, holds)
        total = total + product
    return total


def _assume_atom(atom: Atom, cond: Cond, holds: bool) -> Int:
    if _first(atom) is None:
        return Int((((atom,), 1),))
    if atom.kind in ("bool", "select"):
        own = atom.args[0]
        assert isinstance(own, Cond)
        truth = holds if own == cond else not holds if own == negate(cond) else None
        yes, no = atom.args[1:] if atom.kind == "select" else (integer(1), integer(0))
        assert isinstance(yes, Int)
        assert isinstance(no, Int)
        if truth is not None:
            return assume(yes if truth else no, cond, holds)
        if atom.kind == "bool":
            return Int((((atom,), 1),))
        return of_atom("select", own, assume(yes, cond, holds), assume(no, cond, holds))
    args = tuple(_assume_arg(a, cond, holds) for a in atom.args)
    return rebuilt(atom.kind, args)


def _assume_arg(arg: object, cond: Cond, holds: bool) -> object:
    if isinstance(arg, Int):
        return assume(arg, cond, holds)
    if isinstance(arg, tuple):
        return tuple(_assume_arg(a, cond, holds) for a in arg)
    return arg


def rebuilt(kind: str, args: tuple[object, ...]) -> Int:
    """An atom of new arguments, computed where they are numbers or their order is known."""
    numbers = [a.constant if isinstance(a, Int) else a if isinstance(a, int) else None for a in args]
    known = [n for n in numbers if n is not None]
    whole = len(known) == len(args)
    first, second = (args[0], args[1] if len(args) > 1 else None) if args else (None, None)
    match kind:
        case "abs" if isinstance(first, Int):
            if bound(first, upper=False) >= 0:
                return first
            if bound(first, upper=True) <= 0:
                return -first
        case "div" if whole:
            return integer(known[0] // known[1])
        case "mod" if whole:
            return integer(known[0] % known[1])
        case "min" | "max" if isinstance(first, Int) and isinstance(second, Int):
            smaller, larger = (first, second) if kind == "min" else (second, first)
            if bound(smaller - larger, upper=True) <= 0:
                return first
            if bound(larger - smaller, upper=True) <= 0:
                return second
    return of_atom(kind, *args)


def split(value: Int) -> list[tuple[Cond, Int]] | None:
    """Conditions that exclude each other with the integer under each; None when there are none or too many."""
    if condition_of(value) is None:
        return None
    done: list[tuple[Cond, Int]] = []
    pending: list[tuple[tuple[Cond, ...], Int]] = [((), value)]
    while pending:
        conds, current = pending.pop()
        cond = condition_of(current)
        if cond is None:
            done.append((all_of(conds), current))
            continue
        if len(conds) == _MOST:
            return None
        for holds in (True, False):
            taken = cond if holds else negate(cond)
            pending.append(((*conds, taken), assume(current, cond, holds)))
    return [(c, x) for c, x in done if c.kind != "false"]
