# SPDX-License-Identifier: Apache-2.0
"""Expressions of a fused chain: a pool of terms, in which equal terms are one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from stof.fusion.gelu import match_gelu


@dataclass
class TermPool:
    """Terms by number; equal terms have the same number. A term is an operator and its arguments.

    ``num`` has a float; ``read`` an input's number and indices (:class:`Int` over axes); ``below`` (axis, limit, yes, no)
    selects by an axis. Every other operator is one of the grammar, with terms as arguments.

    Attributes:
        terms: operator and arguments by number.
        partial: reads and selects that are in range only on one side of a select around them.
        has_fp16: whether constants of the graph may have been rounded to fp16.
    """

    terms: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)
    partial: set[int] = field(default_factory=set)
    has_fp16: bool = False
    _known: dict[tuple[str, tuple[object, ...]], int] = field(default_factory=dict)

    def make(self, op: str, *args: object) -> int:
        """The number of a term; 1 / sqrt, SiLU and GELU written out become functions of the grammar."""
        if op == "reciprocal" or (op == "div" and self.terms[_int(args[0])] == ("num", (1.0, 1.0))):
            inner = self.terms[_int(args[-1])]
            if inner[0] == "sqrt":
                op, args = "rsqrt", inner[1]
        if op == "mul" and args[0] != args[1]:
            for one, other in (args, args[::-1]):
                if isinstance(other, int) and self.terms[other] == ("sigmoid", (one,)):
                    op, args = "silu", (one,)
                    break
        if op == "mul":
            gelu = match_gelu(self.terms, (_int(args[0]), _int(args[1])), self.has_fp16)
            if gelu is not None:
                op, args = gelu[0], gelu[1:]
        key = (op, args)
        if key not in self._known:
            self._known[key] = len(self.terms)
            self.terms.append(key)
        return self._known[key]

    def number(self, value: float) -> int:
        """The term of a constant. NaN equals itself here, and -0 differs from 0."""
        return self.make("num", "nan" if math.isnan(value) else float(value), math.copysign(1.0, value))

    def arguments(self, term: int) -> list[int]:
        """The terms that a term is computed from."""
        op, args = self.terms[term]
        if op in ("num", "read"):
            return []
        return [a for a in (args[2:] if op == "below" else args) if isinstance(a, int)]

    def in_order(self, roots: Sequence[int]) -> list[int]:
        """Every term that the roots need, arguments first."""
        order: dict[int, None] = {}
        for root in roots:
            pending: list[tuple[int, bool]] = [(root, False)]
            while pending:
                term, ready = pending.pop()
                if term in order:
                    continue
                if ready:
                    order[term] = None
                    continue
                pending.append((term, True))
                pending.extend((a, False) for a in reversed(self.arguments(term)))
        return list(order)


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value
