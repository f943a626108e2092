# SPDX-License-Identifier: Apache-2.0
"""Splits floats that depend on conditions into cases, and converts scalars to integers and conditions by cases.

An integer input in float arithmetic counts as a 0/1 mask vector, unless inputs are compared with each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

from stof.symbolic.algebra.conditions import all_of, any_of, assume, choose, condition_of, equal, negate, select
from stof.symbolic.algebra.float_arithmetic import fold_real, negate_real, round_integers
from stof.symbolic.algebra.terms import (
    ANY,
    FALSE,
    TRUE,
    Cond,
    Int,
    Real,
    Scalar,
    integer,
    of_atom,
    real,
    subterms,
    to_real,
)

_MAX_CASES = 64
_MAX_DECISIONS = 12  # conditions that are decided one after another


def split_cases(value: Real) -> list[tuple[Cond, float | Real]]:
    """The cases of a float: conditions, exactly one of which holds, each with the value; a Real where it is no constant.

    An integer model input that is cast to float counts as a 0/1 mask vector.
    """
    cases = None if _compares_reads(value) else _cases(value, 0)
    return [(TRUE, value)] if cases is None or len(cases) > _MAX_CASES else cases


@lru_cache(maxsize=20_000)
def _cases(value: Real, depth: int) -> list[tuple[Cond, float | Real]] | None:
    """The cases; None where there are too many conditions to decide."""
    if value.kind == "const":
        number = value.args[0]
        assert isinstance(number, float)
        return [(TRUE, number)]
    cond = _condition_of_real(value)
    if cond is None:
        return [(TRUE, value)]
    if depth == _MAX_DECISIONS:
        return None
    branches = [_cases(_assume_real(value, cond, holds), depth + 1) for holds in (True, False)]
    if branches[0] is None or branches[1] is None:
        return None
    yes, no = ({x: c for c, x in branch} for branch in branches if branch is not None)
    merged = [(choose(cond, yes.get(x, FALSE), no.get(x, FALSE)), x) for x in dict.fromkeys([*yes, *no])]
    return [(c, x) for c, x in merged if c != FALSE]


def case_as_real(value: float | Real) -> Real:
    """The value of a case as a Real."""
    return real(value) if isinstance(value, float) else value


def _condition_of_real(value: Real) -> Cond | None:
    """A condition on which a float depends; for 0/1 integer inputs, that they are 1."""
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
    return next((c for a in value.args if isinstance(a, Real) and (c := _condition_of_real(a)) is not None), None)


def _is_one(value: Int) -> Cond | None:
    atoms = value.atoms()
    if not atoms or any(a.kind != "read" or ANY in a.args for a in atoms):
        return None
    if len({c > 0 for m, c in value.terms if len(m) == 1}) > 1:
        return None  # a difference of two inputs compares document ids, which may be any integers
    atom = min(atoms, key=lambda a: a.key)
    return Cond("ne", (Int((((atom,), 1),)),))


def _assume_real(value: Real, cond: Cond, holds: bool) -> Real:
    """The float under the assumption that a condition holds, or does not."""
    match value.kind:
        case "bool" | "select":
            value_cond = value.args[0]
            assert isinstance(value_cond, Cond)
            yes, no = value.args[1:] if value.kind == "select" else (real(1.0), real(0.0))
            assert isinstance(yes, Real)
            assert isinstance(no, Real)
            if value_cond == cond:
                return _assume_real(yes if holds else no, cond, holds)
            if value_cond == negate(cond):
                return _assume_real(no if holds else yes, cond, holds)
            if value.kind == "bool":
                return value
            return Real("select", (value_cond, _assume_real(yes, cond, holds), _assume_real(no, cond, holds)))
        case "int" | "rounded":
            inner = value.args[0]
            assert isinstance(inner, Int)
            assumed = assume(inner, cond, holds)
            if cond.kind == "ne" and _is_one(inner) is not None:
                assumed = _with_read(assumed, cond.args[0], int(holds))
            return (
                round_integers(to_real(assumed), int(str(value.args[1])))
                if value.kind == "rounded"
                else to_real(assumed)
            )
        case "neg":
            only = value.args[0]
            assert isinstance(only, Real)
            return to_real(negate_real(_assume_real(only, cond, holds)))
        case "add" | "mul" | "div" | "min" | "max":
            left, right = (_assume_real(a, cond, holds) for a in value.args if isinstance(a, Real))
            return to_real(fold_real(value.kind, left, right))
    return value


def _with_read(value: Int, read: object, number: int) -> Int:
    """The integer with a number in place of an input element."""
    assert isinstance(read, Int)
    total = integer(0)
    for monomial, coefficient in value.terms:
        product = integer(coefficient)
        for atom in monomial:
            product = product * (integer(number) if atom == read.atom else Int((((atom,), 1),)))
        total = total + product
    return total


def to_int(value: Scalar) -> Int:
    """A cast to integer; floats truncate where their cases are known, and become opaque otherwise."""
    if isinstance(value, Int):
        return value
    if isinstance(value, Cond):
        return integer(1) if value == TRUE else integer(0) if value == FALSE else of_atom("bool", value)
    if value.kind == "const":
        number = value.args[0]
        assert isinstance(number, float)
        return integer(int(number)) if math.isfinite(number) else of_atom("opaque", "cast", number)
    if value.kind == "int":
        inner = value.args[0]
        assert isinstance(inner, Int)
        return inner
    if value.kind == "bool":
        cond = value.args[0]
        assert isinstance(cond, Cond)
        return to_int(cond)
    if value.kind == "select":
        cond, yes, no = value.args
        assert isinstance(cond, Cond)
        assert isinstance(yes, Real)
        assert isinstance(no, Real)
        branches = [to_int(x) for x in (yes, no)]
        if not any(a.kind == "trunc" for x in branches for a in x.atoms()):
            chosen = select(cond, *branches)
            assert isinstance(chosen, Int)
            return chosen
    cases = split_cases(value)
    if len(cases) <= 8 and all(isinstance(x, float) and math.isfinite(x) for _, x in cases):
        total = integer(0)
        for case_cond, x in cases:
            assert isinstance(x, float)
            total = total + to_int(case_cond) * integer(int(x))
        return total
    return of_atom("trunc", value)


def to_cond(value: Scalar) -> Cond:
    """A cast to boolean: non-zero."""
    if isinstance(value, Cond):
        return value
    if isinstance(value, Int):
        atom = value.atom
        if atom is not None and atom.kind == "bool":
            cond = atom.args[0]
            assert isinstance(cond, Cond)
            return cond
        return negate(equal(value, integer(0)))
    if value.kind == "read":
        return Cond("read", value.args)
    if value.kind == "rounded":
        inner = value.args[0]
        assert isinstance(inner, Int)
        return to_cond(inner)
    return split_cond(value, lambda x: x != 0)


def split_cond(value: Real, test: Callable[[float], bool]) -> Cond:
    """The condition under which a float passes ``test``, by cases; opaque where a case has no constant value."""
    return any_of(
        cond if isinstance(x, float) and test(x) else all_of([cond, Cond("opaque", ("test", value))])
        for cond, x in split_cases(value)
        if not isinstance(x, float) or test(x)
    )


def as_int(x: Scalar) -> Int | None:
    """The integer that a scalar equals; None for a float that is not known to be an integer."""
    if isinstance(x, Real):
        if x.kind == "int":
            return to_int(x)
        if x.kind == "const":
            number = x.args[0]
            assert isinstance(number, float)
            return integer(int(number)) if number.is_integer() else None
        return None
    return to_int(x)


@lru_cache(maxsize=20_000)
def reads_number(value: Real) -> bool:
    """Whether a float depends on integers that the model reads other than by conditions on them."""
    return any(x.kind in ("int", "rounded") and _reads(x) for x in _floats(value))


@lru_cache(maxsize=20_000)
def _compares_reads(value: Real) -> bool:
    """Whether integers that the model reads are subtracted from each other or from positions: they are no 0/1 mask then."""
    for one in _floats(value):
        if one.kind in ("add", "neg"):
            leaves = list(_leaves(one, 1.0))
            reads = {factor for reading, factor in leaves if reading}
            others = {abs(factor) for reading, factor in leaves if not reading}
            if len({factor > 0 for factor in reads}) > 1 or others & {abs(factor) for factor in reads}:
                return True
    return False


def _floats(value: Real) -> Iterator[Real]:
    """A float and its operands at any depth, each once."""
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
    """For each integer addend: whether the model reads it, and its factor. Other products are left out."""
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


def reads_input(value: object) -> bool:
    """Whether a scalar depends on data of a model input."""
    return any(p.kind in ("read", "unread") for p in subterms(value))
