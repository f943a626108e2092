# SPDX-License-Identifier: Apache-2.0
"""Lower and upper bounds of symbolic integers, and terms that are simpler where the bounds are known.

``bound`` allows any length; ``Bounds`` lengths up to 2^22, the operator's limit (docs/reference/operators.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from stof.symbolic.algebra.terms import ANY, Atom, Cond, Int, integer, of_atom

# The largest batch, and the most queries and keys, of the operator: stof_op_limits says most_length, and
# tests/attention/test_limits.py compares the two. Known without a library, as it decides what bounds prove.
LONGEST = 1 << 22

Limits = Mapping[str, float]  # of index variables: their largest value
Range = tuple[float, float]


def bound(value: Int, upper: bool, smallest: float = 0.0) -> float:
    """An upper or lower bound for indices of at least 0 and sizes of at least ``smallest``, which is 0 for an empty past."""
    total = 0.0
    for m, c in value.terms:
        low, high = 1.0, 1.0
        for a in m:
            low, high = _times((low, high), _atom_range(a, smallest))
        total += c * (high if (c > 0) == upper else low)
    return total


def _atom_range(atom: Atom, smallest: float) -> Range:
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


@dataclass(frozen=True)
class Bounds:
    """Bounds of integers for lengths up to 2^22."""

    limits: Limits  # of index variables with a smaller limit
    read: float  # largest absolute value of an input element or an unknown integer

    def integer(self, value: Int) -> Range:
        """The least and the largest value."""
        low = high = 0.0
        for monomial, coefficient in value.terms:
            term: Range = (coefficient, coefficient)
            masks = sum(a.kind == "read" and ANY not in a.args for a in monomial) > 1
            for atom in monomial:
                # Input elements that are multiplied with each other are 0/1 masks.
                term = _times(term, (0.0, 1.0) if masks and atom.kind == "read" else self.atom(atom))
            low, high = low + term[0], high + term[1]
        return low, high

    def atom(self, atom: Atom) -> Range:
        """The least and the largest value of an atom."""
        args = [self.integer(a) for a in atom.args if isinstance(a, Int)]
        match atom.kind:
            case "size":
                return 0.0, LONGEST
            case "var":
                return 0.0, self.limits.get(str(atom.args[0]), LONGEST)
            case "bool":
                return 0.0, 1.0
            case "abs":
                return 0.0, max(map(abs, args[0]))
            case "select":
                return min(a[0] for a in args), max(a[1] for a in args)
            case "min" | "max":
                choose = min if atom.kind == "min" else max
                return choose(a[0] for a in args), choose(a[1] for a in args)
            case "mod" if isinstance(atom.args[1], int):
                return (0.0, atom.args[1] - 1.0) if atom.args[1] > 0 else (atom.args[1] + 1.0, 0.0)
            case "div" if isinstance(atom.args[1], int) and atom.args[1]:
                ends = [math.floor(x / atom.args[1]) if math.isfinite(x) else x for x in args[0]]
                return (min(ends), max(ends)) if atom.args[1] > 0 else (-math.inf, math.inf)
        return -self.read, self.read


def _times(one: Range, other: Range) -> Range:
    products = [x * y if x and y else 0.0 for x in one for y in other]
    return min(products), max(products)


def is_within(value: Int, largest: float, limits: Limits | None = None, *, read: float = math.inf) -> bool:
    """Whether the absolute value of an integer is at most ``largest`` in every run; ``read`` bounds input elements."""
    low, high = Bounds(limits or {}, read).integer(value)
    return -largest <= low and high <= largest


def may_be_negative(value: Int) -> bool:
    """Whether an integer may be negative for some input data."""
    return Bounds({}, math.inf).integer(value)[0] < 0


def rebuild(kind: str, args: tuple[object, ...]) -> Int:
    """An atom with new arguments, evaluated where they are numbers or their order is known."""
    numbers = [a.constant if isinstance(a, Int) else a if isinstance(a, int) else None for a in args]
    constants = [n for n in numbers if n is not None]
    whole = len(constants) == len(args)
    first, second = (args[0], args[1] if len(args) > 1 else None) if args else (None, None)
    match kind:
        case "abs" if isinstance(first, Int):
            if bound(first, upper=False) >= 0:
                return first
            if bound(first, upper=True) <= 0:
                return -first
        case "div" if whole:
            return integer(constants[0] // constants[1])
        case "mod" if whole:
            return integer(constants[0] % constants[1])
        case "min" | "max" if isinstance(first, Int) and isinstance(second, Int):
            smaller, larger = (first, second) if kind == "min" else (second, first)
            if bound(smaller - larger, upper=True) <= 0:
                return first
            if bound(larger - smaller, upper=True) <= 0:
                return second
    return of_atom(kind, *args)


def multiply(x: Int, y: Int) -> Int:
    """A product. sign(n) * x is x where x is 0 whenever the index or size n is."""
    for sign, other in ((x, y), (y, x)):
        base = _find_signed_atom(sign)
        if base is not None and all(any(_vanishes(a, base) for a in m) for m, _ in other.terms):
            return other
    return x * y


def _find_signed_atom(value: Int) -> Atom | None:
    """The index or size n of a value that is sign(n); None for other values."""
    atom = value.atom
    if atom is None or atom.kind != "select" or atom.args[1:] != (integer(1), integer(0)):
        return None
    cond = atom.args[0]
    assert isinstance(cond, Cond)
    base = integer(1) - cond.args[0] if cond.kind == "le" and isinstance(cond.args[0], Int) else None
    base_atom = None if base is None else base.atom
    return base_atom if base_atom is not None and base_atom.kind in ("var", "size") else None


def _vanishes(atom: Atom, base: Atom) -> bool:
    """Whether an atom is 0 where another is."""
    if atom == base:
        return True
    inner = atom.args[0]
    if atom.kind not in ("div", "mod", "abs") or not isinstance(inner, Int):
        return False
    return all(any(_vanishes(a, base) for a in m) for m, _ in inner.terms)
