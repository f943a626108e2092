# SPDX-License-Identifier: Apache-2.0
"""Scalars of the abstract interpreter: integers, conditions and floats in canonical form.

An integer is a polynomial (:class:`Int`) over atoms: equal sums are equal objects, and a comparison is a sign test of one
polynomial. Conditions are in negation normal form, with sorted members of ``and`` and ``or``. Floats keep the shape of the
computation; ``piecewise.split_cases`` splits them into cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

Monomial = tuple["Atom", ...]
ANY = "any integer"
_MAX_WEIGHT = 2000  # subterms of an atom
_MAX_TERMS = 4096  # of a product
_fresh = itertools.count()


def fresh_number() -> int:
    """A new number, for terms that are too large to compare: they equal nothing else."""
    return next(_fresh)


class _Hashed:
    """Base of terms, which share subterms many times over: hash and weight are computed once for each object."""

    def __hash__(self) -> int:
        try:
            value: int = self.__dict__["_hash"]
        except KeyError:
            value = hash((type(self).__name__, *(v for k, v in self.__dict__.items() if not k.startswith("_"))))
            self.__dict__["_hash"] = value
        return value

    @property
    def weight(self) -> int:
        """The number of subterms, shared ones counted each time."""
        weight = self.__dict__.get("_weight")
        if weight is None:
            weight = 1 + sum(_weigh(v) for k, v in self.__dict__.items() if not k.startswith("_"))
            self.__dict__["_weight"] = weight
        assert isinstance(weight, int)
        return weight


def _weigh(value: object) -> int:
    if isinstance(value, _Hashed):
        return value.weight
    return sum(_weigh(v) for v in value) if isinstance(value, tuple) else 0


@dataclass(frozen=True)
class Atom(_Hashed):
    """An integer that is not a sum or product: ``kind`` and its arguments.

    Kinds: ``size`` (name; a dimension, at least 0), ``var`` (name; an index, at least 0), ``abs`` (Int),
    ``div`` and ``mod`` (Int, int; floor semantics), ``quotient`` (Int, Int; likewise, of sizes), ``min``/``max``
    (Int, Int), ``select`` (Cond, Int, Int),
    ``bool`` (Cond), ``read`` (tensor, indices; and ``ANY`` where the value is not only 0 or 1), ``table``
    (tensor, indices).
    """

    __hash__ = _Hashed.__hash__

    kind: str
    args: tuple[object, ...]

    @property
    def key(self) -> str:
        """A total order over atoms that does not depend on hashing."""
        return _atom_key(self)


def _atom_key(atom: Atom) -> str:
    key = atom.__dict__.get("_key")
    if key is None:
        key = f"{atom.kind}({','.join(_key(a) for a in atom.args)})"
        atom.__dict__["_key"] = key
    assert isinstance(key, str)
    return key


def _key(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ",".join(_key(v) for v in value) + ")"
    return str(value)


@dataclass(frozen=True)
class Int(_Hashed):
    """A polynomial with integer coefficients: sorted ((monomial, coefficient), ...)."""

    __hash__ = _Hashed.__hash__

    terms: tuple[tuple[Monomial, int], ...]

    def __str__(self) -> str:
        parts = ["*".join([str(c)] + [a.key for a in m]) for m, c in self.terms]
        return "+".join(parts) or "0"

    def __add__(self, other: Int) -> Int:
        if not (self.terms and other.terms):
            return self if self.terms else other
        return _collect([*self.terms, *other.terms])

    def __sub__(self, other: Int) -> Int:
        return _collect([*self.terms, *((m, -c) for m, c in other.terms)]) if other.terms else self

    def __neg__(self) -> Int:
        return self._times(-1)

    def _times(self, factor: int) -> Int:
        """A product with a number; the order of terms stays."""
        return Int(tuple((m, c * factor) for m, c in self.terms)) if factor else Int(())

    def __mul__(self, other: Int) -> Int:
        for one, number in ((self, other.constant), (other, self.constant)):
            if number is not None:
                return one if number == 1 else one._times(number)
        if len(self.terms) * len(other.terms) > _MAX_TERMS:
            return Int((((Atom("opaque", ("a term too large", fresh_number())),), 1),))
        return _collect(
            (tuple(sorted(m1 + m2, key=_atom_key)), c1 * c2) for m1, c1 in self.terms for m2, c2 in other.terms
        )

    @property
    def constant(self) -> int | None:
        """The value of a polynomial that is one number."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and self.terms[0][0] == ():
            return self.terms[0][1]
        return None

    @property
    def offset(self) -> int:
        """The constant term."""
        return next((c for m, c in self.terms if m == ()), 0)

    @property
    def atom(self) -> Atom | None:
        """The atom of a polynomial that is one atom."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    def atoms(self) -> set[Atom]:
        """The atoms of the polynomial's monomials, without those inside atoms."""
        return {a for m, _ in self.terms for a in m}

    def divide(self, other: Int) -> Int | None:
        """The exact quotient, or None."""
        if not other.terms:
            return None
        if (number := other.constant) is not None:
            return (
                None if any(c % number for _, c in self.terms) else Int(tuple((m, c // number) for m, c in self.terms))
            )
        quotient, rest = self.divmod(other)
        return None if rest.terms else quotient

    def divmod(self, other: Int) -> tuple[Int, Int]:
        """Quotient and remainder of polynomial division by the leading term of ``other``."""
        lead, coefficient = max(other.terms, key=_degree)
        quotient, rest, kept = integer(0), self, integer(0)
        while rest.terms:
            term = max(rest.terms, key=_degree)
            factor = _quotient(*term, lead, coefficient)
            if factor is None:
                kept, rest = kept + Int((term,)), rest - Int((term,))
            else:
                quotient, rest = quotient + Int((factor,)), rest - other * Int((factor,))
        return quotient, kept


def _degree(term: tuple[Monomial, int]) -> tuple[int, list[str]]:
    return len(term[0]), [_atom_key(a) for a in term[0]]


def _quotient(monomial: Monomial, c: int, by: Monomial, coefficient: int) -> tuple[Monomial, int] | None:
    rest = list(monomial)
    for a in by:
        if a not in rest:
            return None
        rest.remove(a)
    return None if c % coefficient else (tuple(rest), c // coefficient)


def _collect(terms: Iterable[tuple[Monomial, int]]) -> Int:
    total: dict[Monomial, int] = {}
    for m, c in terms:
        total[m] = total.get(m, 0) + c
    kept = [(m, c) for m, c in total.items() if c]
    if len(kept) > 1:
        kept.sort(key=lambda t: [_atom_key(a) for a in t[0]])
    return Int(tuple(kept))


@lru_cache(maxsize=10_000)
def integer(value: int) -> Int:
    """A constant."""
    return Int((((), value),) if value else ())


def of_atom(kind: str, *args: object) -> Int:
    """The polynomial of one new atom. A too large one becomes opaque."""
    return Int((((_limit_weight(Atom(kind, args)),), 1),))


def _limit_weight(atom: Atom) -> Atom:
    return atom if atom.weight <= _MAX_WEIGHT else Atom("opaque", ("a term too large", fresh_number()))


def dim(name: str) -> Int:
    """A symbolic dimension."""
    return of_atom("size", name)


def var(name: str) -> Int:
    """An index variable."""
    return of_atom("var", name)


# ---- conditions ----


@dataclass(frozen=True)
class Cond(_Hashed):
    """A condition in negation normal form.

    Kinds: ``true``; ``false``; ``le`` (Int): Int <= 0; ``eq``/``ne`` (Int): Int == 0, != 0; ``and``/``or`` (sorted
    conditions); ``read``/``unread`` (tensor, indices): a boolean tensor's element and its negation;
    ``table``/``untable``; ``opaque``/``unopaque`` (text, indices).
    """

    __hash__ = _Hashed.__hash__

    kind: str
    args: tuple[object, ...] = ()

    def __str__(self) -> str:
        return _cond_key(self)


@lru_cache(maxsize=200_000)
def _cond_key(cond: Cond) -> str:
    return f"{cond.kind}[{','.join(_key(a) for a in cond.args)}]"


TRUE = Cond("true")
FALSE = Cond("false")


# ---- floats ----


@dataclass(frozen=True)
class Real(_Hashed):
    """A float. Kinds: ``const`` (float); ``int`` (Int); ``bool`` (Cond); ``select`` (Cond, Real, Real);
    ``add``/``mul``/``div``/``min``/``max`` (Real, Real); ``neg``; ``read`` (tensor, indices); ``table`` (tensor,
    indices, and the least and largest number where all are finite); ``rounded`` (Int, int): an integer in a type that
    holds all of them only up to the second one; ``opaque`` (text, arguments).
    """

    __hash__ = _Hashed.__hash__

    kind: str
    args: tuple[object, ...]


Scalar = Int | Cond | Real


def subterms(value: object) -> Iterator[Atom | Cond | Real]:
    """Every atom, condition and float in a scalar or a tuple of scalars, itself included, each once."""
    pending, seen = [value], set[object]()
    while pending:
        one = pending.pop()
        if isinstance(one, tuple):
            pending.extend(one)
        elif isinstance(one, Int):
            pending.extend(one.atoms())
        elif isinstance(one, Atom | Cond | Real) and one not in seen:
            seen.add(one)
            yield one
            pending.extend(one.args)


def real(value: float) -> Real:
    """A constant. The sign of zero is dropped: it makes no difference for scores."""
    return Real("const", (float(value) + 0.0 if value == 0 else float(value),))


def to_real(value: Scalar) -> Real:
    """A cast to float."""
    if isinstance(value, Real):
        return value
    if isinstance(value, Cond):
        return real(1.0) if value == TRUE else real(0.0) if value == FALSE else Real("bool", (value,))
    if value.constant is not None:
        return real(value.constant)
    return Real("int", (value,))
