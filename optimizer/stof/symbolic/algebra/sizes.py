# SPDX-License-Identifier: Apache-2.0
"""Symbolic sizes at concrete ones."""

from __future__ import annotations

from collections.abc import Mapping

from stof.errors import UnsupportedError
from stof.symbolic.algebra.conditions import children
from stof.symbolic.algebra.terms import Atom, Cond, Int, integer


def evaluate(size: Int, sizes: Mapping[str, int]) -> int:
    """A symbolic size at concrete ones.

    Raises:
        UnsupportedError: when it depends on something else.
    """
    total = 0
    for monomial, coefficient in size.terms:
        for atom in monomial:
            coefficient *= _atom(atom, sizes)
        total += coefficient
    return total


def evaluate_or_none(size: Int, sizes: Mapping[str, int]) -> int | None:
    """A size at concrete ones; None where it depends on data, or divides by zero."""
    try:
        return evaluate(size, sizes)
    except (UnsupportedError, ZeroDivisionError):
        return None


def _atom(atom: Atom, sizes: Mapping[str, int]) -> int:
    if atom.kind == "size":
        name = str(atom.args[0])
        if name not in sizes:
            raise UnsupportedError(f"a size depends on dimension {name!r}, which no input of the model has")
        return sizes[name]
    if atom.kind in ("bool", "select") and isinstance(atom.args[0], Cond):
        yes, no = atom.args[1:] if atom.kind == "select" else (integer(1), integer(0))
        chosen = yes if holds(atom.args[0], sizes) else no
        return evaluate(chosen, sizes) if isinstance(chosen, Int) else 0
    values = [evaluate(a, sizes) if isinstance(a, Int) else a for a in atom.args]
    numbers = [v for v in values if isinstance(v, int)]
    if len(numbers) == len(values):
        match atom.kind:
            case "min":
                return min(numbers)
            case "max":
                return max(numbers)
            case "abs":
                return abs(numbers[0])
            case "div" | "quotient":
                return numbers[0] // numbers[1]
            case "mod":
                return numbers[0] % numbers[1]
    raise UnsupportedError(f"a size depends on {atom.kind}, not on sizes of inputs alone")


def holds(cond: Cond, sizes: Mapping[str, int]) -> bool:
    """A condition on sizes.

    Raises:
        UnsupportedError: when it depends on something else.
    """
    if cond.kind in ("true", "false"):
        return cond.kind == "true"
    if cond.kind in ("and", "or"):
        parts = [holds(c, sizes) for c in children(cond)]
        return all(parts) if cond.kind == "and" else any(parts)
    value = cond.args[0]
    if cond.kind not in ("le", "eq", "ne") or not isinstance(value, Int):
        raise UnsupportedError(f"a size depends on {cond.kind}, not on sizes of inputs alone")
    number = evaluate(value, sizes)
    return number <= 0 if cond.kind == "le" else (number == 0) == (cond.kind == "eq")


def size_names(size: Int) -> set[str]:
    """The dimensions that a size depends on."""
    names: set[str] = set()
    for atom in size.atoms():
        if atom.kind == "size":
            names.add(str(atom.args[0]))
        for inner in atom.args:
            if isinstance(inner, Int):
                names |= size_names(inner)
    return names
