# SPDX-License-Identifier: Apache-2.0
"""The number that a symbolic scalar is, where one element that it reads is taken to be some number."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stof.symbolic.algebra.terms import Atom, Cond, Int, Real, Scalar, subterms
from stof.symbolic.rules.comparison import COMPARISONS
from stof.symbolic.tensor import Index

_FUNCTIONS: dict[str, Callable[[float], Any]] = {
    "Abs": np.abs,
    "Exp": np.exp,
    "Log": np.log,
    "Sign": np.sign,
    "Sqrt": np.sqrt,
}
_OPERATIONS: dict[str, Callable[[float, float], Any]] = {
    "add": np.add,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
}


@dataclass
class ElementValues:
    """Numbers of scalars under the assumption that ``tensor`` has ``number`` at ``index``.

    ``of`` gives None where a scalar depends on something else. A product with a factor 0 is 0. Conditions are 0 or 1.
    """

    tensor: str
    index: Index
    number: float
    _found: dict[Scalar | Atom, float | None] = field(default_factory=dict)

    def of(self, value: Scalar | Atom) -> float | None:
        """The number that a scalar is."""
        if value not in self._found:
            with np.errstate(all="ignore"):
                self._found[value] = self._evaluate(value)
        return self._found[value]

    def _evaluate(self, value: Scalar | Atom) -> float | None:
        if isinstance(value, Int):
            return self._polynomial(value)
        if value.kind in ("read", "unread") and self._is_assumed(value):
            return self.number if value.kind == "read" and not isinstance(value, Cond) else self._truth(value.kind)
        return self._condition(value) if isinstance(value, Cond) else self._number(value)

    def _is_assumed(self, value: Cond | Atom | Real) -> bool:
        return value.args[:2] == (self.tensor, self.index)

    def _truth(self, kind: str) -> float:
        return float((self.number != 0) == (kind == "read"))

    def _polynomial(self, value: Int) -> float | None:
        total = 0.0
        for monomial, coefficient in value.terms:
            factors = [self.of(a) for a in monomial]
            if 0 in factors:
                continue
            known = [f for f in factors if f is not None]
            if len(known) < len(factors):
                return None
            total += math.prod(known, start=float(coefficient))
        return total

    def _condition(self, cond: Cond) -> float | None:
        if cond.kind in ("true", "false"):
            return float(cond.kind == "true")
        if cond.kind in ("and", "or"):
            deciding = float(cond.kind == "or")
            found = [self.of(c) for c in cond.args if isinstance(c, Cond)]
            return deciding if deciding in found else None if None in found else 1 - deciding
        if cond.kind in ("opaque", "unopaque"):
            holds = self._opaque(cond.args)
            return None if holds is None else float(bool(holds) == (cond.kind == "opaque"))
        inner = self.of(cond.args[0]) if cond.args and isinstance(cond.args[0], Int) else None
        if inner is None:
            return None
        return float({"le": inner <= 0, "eq": inner == 0, "ne": inner != 0}[cond.kind])

    def _number(self, value: Atom | Real) -> float | None:
        if value.kind == "const":
            return float(str(value.args[0]))
        if value.kind == "select":
            cond, yes, no = (a for a in value.args if isinstance(a, Int | Cond | Real))
            holds = self.of(cond)
            return None if holds is None else self.of(yes if holds else no)
        if value.kind == "opaque":
            return self._opaque(value.args)
        found = [self.of(a) for a in value.args if isinstance(a, Int | Cond | Real)]
        if value.kind == "mul" and 0 in found:
            return 0.0
        if not found or None in found:
            return None
        known = [x for x in found if x is not None]
        match value.kind:
            case "int" | "bool":
                return known[0]
            case "rounded":
                return known[0] if abs(known[0]) <= float(str(value.args[1])) else None
            case "neg":
                return -known[0]
            case "abs":
                return abs(known[0])
        operation = _OPERATIONS.get(value.kind) if len(known) == 2 else None
        return None if operation is None else float(operation(known[0], known[1]))

    def _opaque(self, args: tuple[object, ...]) -> float | None:
        """The number of an operator that the symbolic algebra only names."""
        name = str(args[0])
        found = [self.of(a) for a in args[1:] if isinstance(a, Int | Cond | Real)]
        if None in found or len(found) != len(args) - 1:
            return None
        known = [x for x in found if x is not None]
        if name == "test":
            return float(known[0] != 0)
        if name in COMPARISONS and len(known) == 2:
            return float(COMPARISONS[name](known[0], known[1]))
        return float(_FUNCTIONS[name](known[0])) if name in _FUNCTIONS and len(known) == 1 else None


def find_reads(value: Scalar, index: Index) -> list[str]:
    """The tensors of which a scalar reads the element at an index, in the order of their names."""
    reads = (x for x in subterms(value) if x.kind in ("read", "unread") and x.args[1] == index)
    return sorted({str(x.args[0]) for x in reads})


def find_compared(value: Scalar, tensor: str) -> list[float]:
    """The numbers that a scalar compares elements of a tensor with, the smallest first; 0 and 1 stand before others."""
    return list(dict.fromkeys([0.0, 1.0, *sorted(set(_compared(value, tensor)))]))


def _compared(value: Scalar, tensor: str) -> Iterator[float]:
    for cond in subterms(value):
        inner = cond.args[0] if isinstance(cond, Cond) and cond.kind in ("eq", "ne") else None
        if isinstance(inner, Int) and len(inner.atoms()) == 1:
            (atom,) = inner.atoms()
            (factor,) = (c for m, c in inner.terms if m)
            if atom.kind == "read" and atom.args[0] == tensor and inner.offset % factor == 0:
                yield float(-inner.offset // factor)
