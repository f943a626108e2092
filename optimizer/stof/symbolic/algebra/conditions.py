# SPDX-License-Identifier: Apache-2.0
"""Conditions on integers: comparisons, and, or, not, and integers that depend on conditions.

Exporters compute with masks as 0/1 integers. A comparison of such a sum is decided case by case. So it becomes conditions
that the mask format can print: ``bool(c) * 3 - select(d, x, y) <= 0`` is an or over c and d.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from stof.symbolic.algebra.int_bounds import bound, rebuild
from stof.symbolic.algebra.terms import (
    FALSE,
    TRUE,
    Atom,
    Cond,
    Int,
    Real,
    Scalar,
    fresh_number,
    integer,
    of_atom,
    to_real,
)

_MAX_WEIGHT = 20_000  # of a condition; the largest mask that can be written has 4096 nodes and less weight
_MAX_DECISIONS = 8  # conditions that are decided one after another
_OPPOSITE = {
    "read": "unread",
    "unread": "read",
    "table": "untable",
    "untable": "table",
    "opaque": "unopaque",
    "unopaque": "opaque",
    "eq": "ne",
    "ne": "eq",
}


def less_equal(left: Int, right: Int) -> Cond:
    """Left <= right."""
    difference = _reduce(left - right)
    high = bound(difference, upper=True)
    if high <= 0:
        return TRUE
    if bound(difference, upper=False) > 0:
        return FALSE
    return decide(difference, lambda x: less_equal(x, integer(0))) or Cond("le", (difference,))


def _reduce(value: Int) -> Int:
    """``value`` without the common factor of its terms; the conditions <= 0 and == 0 stay the same."""
    factor = math.gcd(*(c for m, c in value.terms if m != ()))
    if factor < 2:
        return value
    return Int(tuple((m, c // factor) for m, c in value.terms if m != ())) + integer(-(-value.offset // factor))


def equal(left: Int, right: Int) -> Cond:
    """Left == right, canonical up to sign."""
    difference = left - right
    if difference.constant is not None:
        return TRUE if difference.constant == 0 else FALSE
    if difference.offset % math.gcd(*(c for m, c in difference.terms if m != ())):
        return FALSE
    difference = _reduce(difference)
    if bound(difference, upper=False) > 0 or bound(difference, upper=True) < 0:
        return FALSE
    if (decided := decide(difference, lambda x: equal(x, integer(0)))) is not None:
        return decided
    if len(difference.terms) == 1 and len(factors := difference.terms[0][0]) > 1:
        return any_of(equal(Int((((a,), 1),)), integer(0)) for a in set(factors))
    first = next(c for m, c in difference.terms if m != ())
    return Cond("eq", (difference if first > 0 else -difference,))


def negate(cond: Cond) -> Cond:
    """The opposite condition."""
    match cond.kind:
        case "true":
            return FALSE
        case "false":
            return TRUE
        case "le":
            (value,) = cond.args
            assert isinstance(value, Int)
            return less_equal(integer(1), value)
        case "and":
            return any_of(negate(c) for c in _conds(cond))
        case "or":
            return all_of(negate(c) for c in _conds(cond))
    return Cond(_OPPOSITE[cond.kind], cond.args)


def _conds(cond: Cond) -> tuple[Cond, ...]:
    return cond.args  # type: ignore[return-value]


def children(cond: Cond) -> tuple[Cond, ...]:
    """The members of an ``and`` or ``or``."""
    return _conds(cond) if cond.kind in ("and", "or") else ()


def all_of(conds: Iterable[Cond]) -> Cond:
    """The conjunction, flattened and with absorption."""
    return _junction("and", TRUE, FALSE, conds)


def any_of(conds: Iterable[Cond]) -> Cond:
    """The disjunction, flattened and with absorption."""
    return _junction("or", FALSE, TRUE, conds)


def _junction(kind: str, neutral: Cond, absorbing: Cond, conds: Iterable[Cond]) -> Cond:
    members: set[Cond] = set()
    for cond in conds:
        for member in _conds(cond) if cond.kind == kind else (cond,):
            if member == absorbing:
                return absorbing
            if member != neutral:
                members.add(member)
    dual = "or" if kind == "and" else "and"
    if any(c.kind != dual and negate(c) in members for c in members):
        return absorbing
    # a and (a or x) = a;  a and (not a or x) = a and x
    changed = True
    while changed:
        changed = False
        for member in [c for c in members if c.kind == dual]:
            inner = _conds(member)
            if any(c in members for c in inner):
                members.remove(member)
                changed = True
                break
            rest = [c for c in inner if c.kind in ("and", "or") or negate(c) not in members]
            if len(rest) < len(inner):
                members.remove(member)
                reduced = _junction(dual, absorbing, neutral, rest)
                return _junction(kind, neutral, absorbing, [*members, reduced])
    if not members:
        return neutral
    if len(members) == 1:
        return members.pop()
    if kind == "and" and _asks_for_zero_with_remainder(members):
        return FALSE
    # Each exclusive or doubles the size of a condition.
    if sum(c.weight for c in members) > _MAX_WEIGHT:
        return Cond("opaque", ("a condition of too many parts", fresh_number()))
    return Cond(kind, tuple(sorted(members, key=str)))


def _asks_for_zero_with_remainder(conds: set[Cond]) -> bool:
    """Whether conditions require a number to be 0 and to have a remainder, as floor division tests for negative numbers."""
    for cond in conds:
        if cond.kind != "ne" or not isinstance(cond.args[0], Int):
            continue
        atom = cond.args[0].atom
        if atom is None or atom.kind != "mod" or not isinstance(atom.args[0], Int):
            continue
        if Cond("le", (atom.args[0],)) in conds and bound(atom.args[0], upper=False) >= 0:
            return True
    return False


def select(cond: Cond, yes: Scalar, no: Scalar) -> Scalar:
    """``yes`` where the condition holds, else ``no``."""
    if cond == TRUE or yes == no:
        return yes
    if cond == FALSE:
        return no
    if isinstance(yes, Cond) and isinstance(no, Cond):
        return any_of([all_of([cond, yes]), all_of([negate(cond), no])])
    if isinstance(yes, Int) and isinstance(no, Int):
        return of_atom("select", cond, yes, no)
    return Real("select", (cond, to_real(yes), to_real(no)))


# ---- integers that depend on conditions ----


@lru_cache(maxsize=100_000)
def _first_condition(atom: Atom) -> Cond | None:
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
    """A condition on which an integer depends; None where there is none."""
    for monomial, _ in value.terms:
        for atom in monomial:
            if (condition := _first_condition(atom)) is not None:
                return condition
    return None


def assume(value: Int, cond: Cond, holds: bool) -> Int:
    """The integer under the assumption that a condition holds, or does not."""
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
    if _first_condition(atom) is None:
        return Int((((atom,), 1),))
    if atom.kind in ("bool", "select"):
        atom_cond = atom.args[0]
        assert isinstance(atom_cond, Cond)
        truth = holds if atom_cond == cond else not holds if atom_cond == negate(cond) else None
        yes, no = atom.args[1:] if atom.kind == "select" else (integer(1), integer(0))
        assert isinstance(yes, Int)
        assert isinstance(no, Int)
        if truth is not None:
            return assume(yes if truth else no, cond, holds)
        if atom.kind == "bool":
            return Int((((atom,), 1),))
        return of_atom("select", atom_cond, assume(yes, cond, holds), assume(no, cond, holds))
    args = tuple(_assume_arg(a, cond, holds) for a in atom.args)
    return rebuild(atom.kind, args)


def _assume_arg(arg: object, cond: Cond, holds: bool) -> object:
    if isinstance(arg, Int):
        return assume(arg, cond, holds)
    if isinstance(arg, tuple):
        return tuple(_assume_arg(a, cond, holds) for a in arg)
    return arg


def choose(cond: Cond, yes: Cond, no: Cond) -> Cond:
    """``yes`` where a condition holds, else ``no``, as a short condition."""
    if yes == no:
        return yes
    if yes == TRUE:
        return any_of([cond, no])
    if yes == FALSE:
        return all_of([negate(cond), no])
    if no == TRUE:
        return any_of([negate(cond), yes])
    if no == FALSE:
        return all_of([cond, yes])
    both = all_of([yes, no])
    if both == no:  # whatever the condition
        return any_of([no, all_of([cond, yes])])
    if both == yes:
        return any_of([yes, all_of([negate(cond), no])])
    return any_of([all_of([cond, yes]), all_of([negate(cond), no])])


def decide(value: Int, test: Callable[[Int], Cond], depth: int = 0) -> Cond | None:
    """A test of an integer, with the conditions that it depends on decided one by one; None with no conditions or too many."""
    cond = condition_of(value)
    if cond is None:
        return test(value) if depth else None
    if depth == _MAX_DECISIONS:
        return None
    yes, no = (decide(assume(value, cond, holds), test, depth + 1) for holds in (True, False))
    return None if yes is None or no is None else choose(cond, yes, no)
