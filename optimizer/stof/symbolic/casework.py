# SPDX-License-Identifier: Apache-2.0
"""Integers that depend on conditions, by cases: ``bool(c) * 3 - select(d, x, y) <= 0`` is an or over c and d.

Exporters compute with masks as 0/1 integers; a comparison of such a sum becomes conditions that the mask format can print.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

from stof.symbolic.terms import (
    ANY,
    FALSE,
    TRUE,
    Atom,
    Cond,
    Int,
    Real,
    Scalar,
    all_of,
    any_of,
    bound,
    integer,
    negate,
    of_atom,
    parts,
    real,
    to_int,
    to_real,
)

_MOST = 8  # conditions that are decided one after another


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


def times(x: Int, y: Int) -> Int:
    """A product; the sign of what is not negative is left out where the other factor is 0 with it."""
    for sign, other in ((x, y), (y, x)):
        base = _signed(sign)
        if base is not None and all(any(_vanishes(a, base) for a in m) for m, _ in other.terms):
            return other
    return x * y


def _signed(value: Int) -> Atom | None:
    """The index or size whose sign 0 or 1 a value is."""
    atom = value.atom
    if atom is None or atom.kind != "select" or atom.args[1:] != (integer(1), integer(0)):
        return None
    cond = atom.args[0]
    assert isinstance(cond, Cond)
    base = integer(1) - cond.args[0] if cond.kind == "le" and isinstance(cond.args[0], Int) else None
    found = None if base is None else base.atom
    return found if found is not None and found.kind in ("var", "size") else None


def _vanishes(atom: Atom, base: Atom) -> bool:
    """Whether an atom is 0 where another is."""
    if atom == base:
        return True
    inner = atom.args[0]
    if atom.kind not in ("div", "mod", "abs") or not isinstance(inner, Int):
        return False
    return all(any(_vanishes(a, base) for a in m) for m, _ in inner.terms)


def choose(cond: Cond, yes: Cond, no: Cond) -> Cond:
    """``yes`` where a condition holds, else ``no``, in few words."""
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
    """A test of an integer that depends on conditions, decided one by one; None when there are none or too many."""
    cond = condition_of(value)
    if cond is None:
        return test(value) if depth else None
    if depth == _MOST:
        return None
    yes, no = (decide(assume(value, cond, holds), test, depth + 1) for holds in (True, False))
    return None if yes is None or no is None else choose(cond, yes, no)


# ---- floats ----


def condition_of_real(value: Real) -> Cond | None:
    """A condition on which a float depends; of integer inputs that they are 1, since vectors of a mask are 0 or 1."""
    match value.kind:
        case "bool" | "select":
            cond = value.args[0]
            assert isinstance(cond, Cond)
            return cond
        case "int" | "rounded":
            inner = value.args[0]
            assert isinstance(inner, Int)
            return condition_of(inner) or _is_one(inner)
        case "opaque" | "read" | "table" | "const":
            return None
    return next((c for a in value.args if isinstance(a, Real) and (c := condition_of_real(a)) is not None), None)


def _is_one(value: Int) -> Cond | None:
    atoms = value.atoms()
    if not atoms or any(a.kind != "read" or ANY in a.args for a in atoms):
        return None
    if len({c > 0 for m, c in value.terms if len(m) == 1}) > 1:
        return None  # a difference of two reads compares numbers of documents, which may be any
    atom = min(atoms, key=lambda a: a.key)
    return Cond("ne", (Int((((atom,), 1),)),))


def as_int(x: Scalar) -> Int | None:
    """The integer that a scalar is; None for a float that is not known to be one."""
    if isinstance(x, Real):
        if x.kind == "int":
            return to_int(x)
        if x.kind == "const":
            number = x.args[0]
            assert isinstance(number, float)
            return integer(int(number)) if number.is_integer() else None
        return None
    return to_int(x)


def to_real_case(value: float | Real) -> Real:
    """The value of a case."""
    return real(value) if isinstance(value, float) else value


@lru_cache(maxsize=20_000)
def reads_number(value: Real) -> bool:
    """Whether a float is made of numbers that a model reads, other than by conditions on them."""
    return any(x.kind in ("int", "rounded") and _reads(x) for x in _floats(value))


@lru_cache(maxsize=20_000)
def compares_reads(value: Real) -> bool:
    """Whether numbers that a model reads are subtracted from each other or from positions: they are no mask of 0 and 1."""
    for one in _floats(value):
        if one.kind in ("add", "neg"):
            leaves = list(_leaves(one, 1.0))
            reads = {factor for reading, factor in leaves if reading}
            others = {abs(factor) for reading, factor in leaves if not reading}
            if len({factor > 0 for factor in reads}) > 1 or others & {abs(factor) for factor in reads}:
                return True
    return False


def _floats(value: Real) -> Iterator[Real]:
    """A float and those that it is computed of, each once."""
    pending, seen = [value], set[Real]()
    while pending:
        one = pending.pop()
        if one not in seen:
            seen.add(one)
            yield one
            pending.extend(a for a in one.args if isinstance(a, Real))


def _reads(value: Real) -> bool:
    inner = value.args[0]
    return isinstance(inner, Int) and any(a.kind == "read" for a in inner.atoms())


def _leaves(value: Real, factor: float) -> Iterator[tuple[bool, float]]:
    """The integers that are added up, whether they are read, and their factors; products with others stand for themselves."""
    args = [a for a in value.args if isinstance(a, Real)]
    match value.kind:
        case "int" | "rounded":
            inner = value.args[0]
            assert isinstance(inner, Int)
            sign = next((1.0 if c > 0 else -1.0 for m, c in inner.terms if any(a.kind == "read" for a in m)), 1.0)
            yield _reads(value), sign * factor
        case "add":
            yield from _leaves(args[0], factor)
            yield from _leaves(args[1], factor)
        case "neg":
            yield from _leaves(args[0], -factor)
        case "mul" | "div":
            numbers = [a.args[0] for a in args if a.kind == "const"]
            others = [a for a in args if a.kind != "const"]
            if len(others) == 1 and isinstance(numbers[0], float) and numbers[0]:
                yield from _leaves(others[0], factor * numbers[0] if value.kind == "mul" else factor / numbers[0])


def assume_real(value: Real, cond: Cond, holds: bool) -> Real:
    """The float where a condition is known."""
    from stof.symbolic.floats import fold_real, negative
    from stof.symbolic.widths import rounded

    match value.kind:
        case "bool" | "select":
            own = value.args[0]
            assert isinstance(own, Cond)
            yes, no = value.args[1:] if value.kind == "select" else (real(1.0), real(0.0))
            assert isinstance(yes, Real)
            assert isinstance(no, Real)
            if own == cond:
                return assume_real(yes if holds else no, cond, holds)
            if own == negate(cond):
                return assume_real(no if holds else yes, cond, holds)
            if value.kind == "bool":
                return value
            return Real("select", (own, assume_real(yes, cond, holds), assume_real(no, cond, holds)))
        case "int" | "rounded":
            inner = value.args[0]
            assert isinstance(inner, Int)
            found = assume(inner, cond, holds)
            if cond.kind == "ne" and _is_one(inner) is not None:
                found = _with(found, cond.args[0], int(holds))
            return rounded(to_real(found), int(str(value.args[1]))) if value.kind == "rounded" else to_real(found)
        case "neg":
            only = value.args[0]
            assert isinstance(only, Real)
            return to_real(negative(assume_real(only, cond, holds)))
        case "add" | "mul" | "div" | "min" | "max":
            left, right = (assume_real(a, cond, holds) for a in value.args if isinstance(a, Real))
            return to_real(fold_real(value.kind, left, right))
    return value


def _with(value: Int, read: object, number: int) -> Int:
    """The integer where a read is a number."""
    assert isinstance(read, Int)
    total = integer(0)
    for monomial, coefficient in value.terms:
        product = integer(coefficient)
        for atom in monomial:
            product = product * (integer(number) if atom == read.atom else Int((((atom,), 1),)))
        total = total + product
    return total


def reads_input(value: object) -> bool:
    """Whether a scalar depends on what a model input holds."""
    return any(p.kind in ("read", "unread") for p in parts(value))
