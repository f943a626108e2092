# SPDX-License-Identifier: Apache-2.0
"""Scalars of the abstract interpreter: integers, conditions and floats in canonical form.

An integer is a polynomial (:class:`Int`) over atoms, so that equal sums are equal objects and a
comparison is a sign test of one polynomial. Conditions are kept in negation normal form with sorted
sets below ``and`` and ``or``. Floats keep the shape of the computation; the mask lifter splits them into cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

Monomial = tuple["Atom", ...]
ANY = "any integer"
_HEAVIEST = 2000  # parts of an atom
_MOST_PARTS = 20_000  # of a condition; a mask of 4096 nodes, the most that can be written, has fewer
_MOST_TERMS = 4096  # of a product
_fresh = itertools.count()


class _Shared:
    """Values that hold each other many times over: hashes and weights are computed once for each object."""

    def __hash__(self) -> int:
        known = self.__dict__.get("_hash")
        if known is None:
            known = hash((type(self).__name__, *(v for k, v in self.__dict__.items() if not k.startswith("_"))))
            self.__dict__["_hash"] = known
        assert isinstance(known, int)
        return known

    @property
    def weight(self) -> int:
        """How many parts the value has when it is written out."""
        known = self.__dict__.get("_weight")
        if known is None:
            known = 1 + sum(_weigh(v) for k, v in self.__dict__.items() if not k.startswith("_"))
            self.__dict__["_weight"] = known
        assert isinstance(known, int)
        return known


def _weigh(value: object) -> int:
    if isinstance(value, _Shared):
        return value.weight
    return sum(_weigh(v) for v in value) if isinstance(value, tuple) else 0


@dataclass(frozen=True)
class Atom(_Shared):
    """An indivisible integer: ``kind`` and its arguments.

    Kinds: ``size`` (name; a dimension, at least 0), ``var`` (name; an index, at least 0), ``abs`` (Int),
    ``div`` and ``mod`` (Int, int; floor semantics), ``min``/``max`` (Int, Int), ``select`` (Cond, Int, Int),
    ``bool`` (Cond), ``read`` (tensor, indices; a third argument ``ANY`` where it is not taken for 0 or 1), ``table``
    (tensor, indices).
    """

    __hash__ = _Shared.__hash__

    kind: str
    args: tuple[object, ...]

    @property
    def key(self) -> str:
        """A total order over atoms that does not depend on hashing."""
        return _atom_key(self)


def _atom_key(atom: Atom) -> str:
    known = atom.__dict__.get("_key")
    if known is None:
        known = f"{atom.kind}({','.join(_key(a) for a in atom.args)})"
        atom.__dict__["_key"] = known
    assert isinstance(known, str)
    return known


def _key(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ",".join(_key(v) for v in value) + ")"
    return str(value)


@dataclass(frozen=True)
class Int(_Shared):
    """A polynomial with integer coefficients: sorted ((monomial, coefficient), ...)."""

    __hash__ = _Shared.__hash__

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
        """A product with a number, which leaves the terms in their order."""
        return Int(tuple((m, c * factor) for m, c in self.terms)) if factor else Int(())

    def __mul__(self, other: Int) -> Int:
        for one, number in ((self, other.constant), (other, self.constant)):
            if number is not None:
                return one if number == 1 else one._times(number)
        if len(self.terms) * len(other.terms) > _MOST_TERMS:
            return Int((((Atom("opaque", ("a term too large", next(_fresh))),), 1),))
        return _collect(
            (tuple(sorted(m1 + m2, key=_atom_key)), c1 * c2) for m1, c1 in self.terms for m2, c2 in other.terms
        )

    @property
    def constant(self) -> int | None:
        """The value when it is one number."""
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
        """The atom when the polynomial is just that."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            return self.terms[0][0][0]
        return None

    def atoms(self) -> set[Atom]:
        """Every atom at the top of the polynomial."""
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
        """Quotient and remainder of polynomials: terms that the leading one of ``other`` divides are taken off in turn."""
        lead, coefficient = max(other.terms, key=_degree)
        quotient, rest, kept = integer(0), self, integer(0)
        while rest.terms:
            term = max(rest.terms, key=_degree)
            found = _quotient(*term, lead, coefficient)
            if found is None:
                kept, rest = kept + Int((term,)), rest - Int((term,))
            else:
                quotient, rest = quotient + Int((found,)), rest - other * Int((found,))
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
    """The polynomial of a single new atom; one that nothing equals where it would be too large to work with."""
    return Int((((_light(Atom(kind, args)),), 1),))


def _light(atom: Atom) -> Atom:
    return atom if atom.weight <= _HEAVIEST else Atom("opaque", ("a term too large", next(_fresh)))


def size(name: str) -> Int:
    """A symbolic dimension."""
    return of_atom("size", name)


def var(name: str) -> Int:
    """An index variable."""
    return of_atom("var", name)


# ---- conditions ----


@dataclass(frozen=True)
class Cond(_Shared):
    """A condition in negation normal form.

    Kinds: ``true``; ``false``; ``le`` (Int): Int <= 0; ``eq``/``ne`` (Int): Int == 0, != 0; ``and``/``or`` (sorted
    conditions); ``read``/``unread`` (tensor, indices): a boolean tensor's element and its negation;
    ``table``/``untable``; ``opaque``/``unopaque`` (text, indices).
    """

    __hash__ = _Shared.__hash__

    kind: str
    args: tuple[object, ...] = ()

    def __str__(self) -> str:
        return _cond_key(self)


@lru_cache(maxsize=200_000)
def _cond_key(cond: Cond) -> str:
    return f"{cond.kind}[{','.join(_key(a) for a in cond.args)}]"


TRUE = Cond("true")
FALSE = Cond("false")
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


def bound(value: Int, upper: bool, smallest: float = 0.0) -> float:
    """An upper or lower bound, from indices being at least 0 and sizes at least ``smallest``: a past may be empty."""
    total = 0.0
    for m, c in value.terms:
        low, high = 1.0, 1.0
        for a in m:
            lo, hi = _atom_range(a, smallest)
            products = [_times(x, y) for x in (low, high) for y in (lo, hi)]
            low, high = min(products), max(products)
        total += c * (high if (c > 0) == upper else low)
    return total


def _times(x: float, y: float) -> float:
    return 0.0 if x == 0 or y == 0 else x * y


def _atom_range(atom: Atom, smallest: float) -> tuple[float, float]:
    match atom.kind:
        case "size":
            return (smallest, math.inf)
        case "var":
            return (0.0, math.inf)
        case "abs":
            return (0.0, math.inf)
        case "bool":
            return (0.0, 1.0)
        case "mod":
            divisor = atom.args[1]
            assert isinstance(divisor, int)
            return (0.0, divisor - 1.0) if divisor > 0 else (divisor + 1.0, 0.0)
        case "div":
            inner, divisor = atom.args
            assert isinstance(inner, Int)
            assert isinstance(divisor, int)
            if divisor > 0 and bound(inner, False, smallest) >= 0:
                return (0.0, math.inf)
    return (-math.inf, math.inf)


def less_equal(left: Int, right: Int) -> Cond:
    """Left <= right."""
    difference = _reduced(left - right)
    high = bound(difference, upper=True)
    if high <= 0:
        return TRUE
    if bound(difference, upper=False) > 0:
        return FALSE
    return _by_cases(difference, lambda x: less_equal(x, integer(0))) or Cond("le", (difference,))


def _reduced(value: Int) -> Int:
    """An integer that is at most 0, or 0 where it can be, as ``value`` is: without a factor that all of its terms have."""
    factor = math.gcd(*(c for m, c in value.terms if m != ()))
    if factor < 2:
        return value
    return Int(tuple((m, c // factor) for m, c in value.terms if m != ())) + integer(-(-value.offset // factor))


def _by_cases(value: Int, test: Callable[[Int], Cond]) -> Cond | None:
    """A test of an integer that depends on conditions."""
    from stof.symbolic.casework import decide

    return decide(value, test)


def equal(left: Int, right: Int) -> Cond:
    """Left == right, canonical up to sign."""
    difference = left - right
    if difference.constant is not None:
        return TRUE if difference.constant == 0 else FALSE
    if difference.offset % math.gcd(*(c for m, c in difference.terms if m != ())):
        return FALSE
    difference = _reduced(difference)
    if bound(difference, upper=False) > 0 or bound(difference, upper=True) < 0:
        return FALSE
    if (found := _by_cases(difference, lambda x: equal(x, integer(0)))) is not None:
        return found
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
    """The conjunction, flattened, with absorption."""
    return _junction("and", TRUE, FALSE, conds)


def any_of(conds: Iterable[Cond]) -> Cond:
    """The disjunction, flattened, with absorption."""
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
    if kind == "and" and _is_zero_without(members):
        return FALSE
    # Exclusive ors double a condition each.
    if sum(c.weight for c in members) > _MOST_PARTS:
        return Cond("opaque", ("a condition of too many parts", next(_fresh)))
    return Cond(kind, tuple(sorted(members, key=_cond_key)))


def _is_zero_without(conds: set[Cond]) -> bool:
    """Whether conditions ask for a number that is 0 and leaves a remainder: how floor division tells negative numbers."""
    for cond in conds:
        if cond.kind != "ne" or not isinstance(cond.args[0], Int):
            continue
        atom = cond.args[0].atom
        if atom is None or atom.kind != "mod" or not isinstance(atom.args[0], Int):
            continue
        if Cond("le", (atom.args[0],)) in conds and bound(atom.args[0], upper=False) >= 0:
            return True
    return False


# ---- floats ----


@dataclass(frozen=True)
class Real(_Shared):
    """A float. Kinds: ``const`` (float); ``int`` (Int); ``bool`` (Cond); ``select`` (Cond, Real, Real);
    ``add``/``mul``/``div``/``min``/``max`` (Real, Real); ``neg``; ``read`` (tensor, indices); ``table`` (tensor,
    indices, and the least and largest number where all are finite); ``rounded`` (Int, int): an integer in a type that
    holds all of them only up to the second one; ``opaque`` (text, arguments).
    """

    __hash__ = _Shared.__hash__

    kind: str
    args: tuple[object, ...]


Scalar = Int | Cond | Real


def parts(value: object) -> Iterator[Atom | Cond | Real]:
    """Every atom, condition and float that a scalar, or a tuple of them, is made of; each once."""
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
    """A constant. The sign of zero is dropped: scores do not see it."""
    return Real("const", (float(value) + 0.0 if value == 0 else float(value),))


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


def to_real(value: Scalar) -> Real:
    """A cast to float."""
    if isinstance(value, Real):
        return value
    if isinstance(value, Cond):
        return real(1.0) if value == TRUE else real(0.0) if value == FALSE else Real("bool", (value,))
    if value.constant is not None:
        return real(value.constant)
    return Real("int", (value,))


def to_int(value: Scalar) -> Int:
    """A cast to integer; floats truncate where their value is known, else become opaque."""
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
        parts = [to_int(x) for x in (yes, no)]
        if not any(a.kind == "trunc" for x in parts for a in x.atoms()):
            chosen = select(cond, *parts)
            assert isinstance(chosen, Int)
            return chosen
    found = cases(value)
    if len(found) <= 8 and all(isinstance(x, float) and math.isfinite(x) for _, x in found):
        total = integer(0)
        for own, x in found:
            assert isinstance(x, float)
            total = total + to_int(own) * integer(int(x))
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
        for cond, x in cases(value)
        if not isinstance(x, float) or test(x)
    )


_MOST_CASES = 64
_DEEPEST = 12  # conditions that are decided one after another


def cases(value: Real) -> list[tuple[Cond, float | Real]]:
    """Conditions that exclude each other and leave nothing out, with the value under each; a Real where it is no constant.

    An integer model input cast to float is taken for a 0/1 vector, which is what masks are.
    """
    from stof.symbolic.casework import compares_reads

    found = None if compares_reads(value) else _cases(value, 0)
    return [(TRUE, value)] if found is None or len(found) > _MOST_CASES else found


@lru_cache(maxsize=20_000)
def _cases(value: Real, depth: int) -> list[tuple[Cond, float | Real]] | None:
    """None where there are too many conditions to decide."""
    from stof.symbolic.casework import assume_real, choose, condition_of_real

    if value.kind == "const":
        number = value.args[0]
        assert isinstance(number, float)
        return [(TRUE, number)]
    cond = condition_of_real(value)
    if cond is None:
        return [(TRUE, value)]
    if depth == _DEEPEST:
        return None
    parts = [_cases(assume_real(value, cond, holds), depth + 1) for holds in (True, False)]
    if parts[0] is None or parts[1] is None:
        return None
    yes, no = ({x: c for c, x in part} for part in parts if part is not None)
    merged = [(choose(cond, yes.get(x, FALSE), no.get(x, FALSE)), x) for x in dict.fromkeys([*yes, *no])]
    return [(c, x) for c, x in merged if c != FALSE]
