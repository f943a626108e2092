# SPDX-License-Identifier: Apache-2.0
"""Expressions of a chain: a pool of shared terms, printed as the description of docs/reference/chain-format.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from stof.errors import UnsupportedError
from stof.fusion.gelu import gelu_of
from stof.symbolic.algebra.terms import Atom, Int

MOST_TEXT, MOST_NODES, MOST_DEPTH = 16 << 10, 256, 64
MOST_INPUTS, MOST_OUTPUTS, MOST_REDUCTIONS, MOST_AXES = 16, 8, 16, 6
REDUCTIONS = frozenset({"sum", "mean", "max_of", "min_of"})
_BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_COMPARISON, _SUM, _PRODUCT, _UNARY, _ATOM = range(5)  # levels of the grammar, loosest first
_NESTED = 24  # levels of one line; what is deeper gets a name


@dataclass
class Pool:
    """Terms by number; equal terms have the same number. A term is an operator and its arguments.

    ``num`` (float); ``read`` (input, indices as :class:`Int` over axes); ``below`` (axis, limit, yes, no): a select on an
    axis; every other name is one of the grammar, with terms as arguments. ``partial``: reads and selects that are in range
    only on the side of a select around them. ``halves``: the graph's numbers may have been rounded to fp16.
    """

    terms: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)
    partial: set[int] = field(default_factory=set)
    halves: bool = False
    _known: dict[tuple[str, tuple[object, ...]], int] = field(default_factory=dict)

    def make(self, op: str, *args: object) -> int:
        """The number of a term."""
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
            gelu = gelu_of(self.terms, (_int(args[0]), _int(args[1])), self.halves)
            if gelu is not None:
                op, args = gelu[0], gelu[1:]
        key = (op, args)
        if key not in self._known:
            self._known[key] = len(self.terms)
            self.terms.append(key)
        return self._known[key]

    def number(self, value: float) -> int:
        """A constant. NaN equals itself here."""
        return self.make("num", "nan" if math.isnan(value) else float(value), math.copysign(1.0, value))

    def arguments(self, term: int) -> list[int]:
        """The terms that a term is computed from."""
        op, args = self.terms[term]
        if op in ("num", "read"):
            return []
        return [a for a in (args[2:] if op == "below" else args) if isinstance(a, int)]


def _int(value: object) -> int:
    assert isinstance(value, int)
    return value


@dataclass(frozen=True)
class Output:
    """One output: its type's name, the axes of each of its dims (none: a dim of 1), and its term."""

    dtype: str
    dims: tuple[tuple[str, ...], ...]
    term: int


@dataclass(frozen=True)
class Description:
    """A chain as text, with what its cost depends on."""

    text: str
    inputs: int
    outputs: int
    nodes: int
    reductions: int


def describe_chain(pool: Pool, axes: Sequence[tuple[str, str]], outputs: Sequence[Output], inputs: int) -> Description:
    """Prints a chain.

    Args:
        pool: holds the terms.
        axes: names and sizes as text, outermost first.
        outputs: in order.
        inputs: how many inputs the operator has.

    Raises:
        UnsupportedError: beyond a limit of the format.
    """
    printer = _Printer(pool, [o.term for o in outputs])
    lines = ["axes " + ", ".join(f"{name} = {size}" for name, size in axes), *printer.lines]
    for i, output in enumerate(outputs):
        dims = ", ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in output.dims)
        lines.append(f"out y{i} {output.dtype} [{dims}] = {printer.text(output.term, _COMPARISON)}")
    text = "\n".join(lines)
    reductions = sum(pool.terms[t][0] in REDUCTIONS for t in printer.order)
    for words, found, most in (
        ("bytes of description", len(text.encode()), MOST_TEXT),
        ("operations", len(printer.order), MOST_NODES),
        ("inputs", inputs, MOST_INPUTS),
        ("outputs", len(outputs), MOST_OUTPUTS),
        ("row reductions", reductions, MOST_REDUCTIONS),
        ("axes", len(axes), MOST_AXES),
    ):
        if found > most:
            raise UnsupportedError(f"{found} {words}, expected at most {most}")
    return Description(text, inputs, len(outputs), len(printer.order), reductions)


class _Printer:
    """Names terms that are used more than once, and prints each line."""

    def __init__(self, pool: Pool, roots: Sequence[int]) -> None:
        self.pool = pool
        self.order = _ordered(pool, roots)
        uses = Counter(a for t in self.order for a in pool.arguments(t)) + Counter(roots)
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        depths: dict[int, int] = {}
        length: dict[int, int] = {}  # least characters: what is shared without a name is printed at every use
        choosing = any(pool.terms[t][0] == "below" for t in self.order)
        partial: set[int] = set()
        for term in self.order:
            op = pool.terms[term][0]
            depths[term] = 1 + max((depths[a] for a in pool.arguments(term)), default=0)
            length[term] = 1 + sum(length[a] for a in pool.arguments(term))
            if length[term] > MOST_TEXT:
                raise UnsupportedError(f"more than {MOST_TEXT} bytes of description")
            shared = uses[term] > 1 and op != "num"
            # A row's own value stays outside of the sides of a select, of which each is computed for a part of the row.
            whole_row = choosing and op in REDUCTIONS
            if term in pool.partial or (op != "below" and any(a in partial for a in pool.arguments(term))):
                partial.add(term)
                continue
            if shared or whole_row or depths[term] > _NESTED:
                text = self.text(term, _COMPARISON)
                self.names[term] = f"t{len(self.names)}"
                self.lines.append(f"let {self.names[term]} = {text}")
                depths[term] = length[term] = 1

    def text(self, term: int, level: int) -> str:
        """A term as an operand of a level of the grammar."""
        if term in self.names:
            return self.names[term]
        op, args = self.pool.terms[term]
        given = self.pool.arguments(term)
        if op == "num":
            return _number(args)
        if op == "read":
            number, indices = args
            assert isinstance(indices, tuple)
            return f"x{number}[{', '.join(index_text(i) for i in indices)}]"
        if op == "below":
            return f"select({args[0]} < {args[1]}, {', '.join(self.text(a, _COMPARISON) for a in given)})"
        if op == "neg":
            return _within(f"-{self.text(given[0], _UNARY)}", _UNARY, level)
        if op in _BINARY:
            own = _SUM if op in ("add", "sub") else _PRODUCT
            return _within(f"{self.text(given[0], own)} {_BINARY[op]} {self.text(given[1], own + 1)}", own, level)
        if op in _COMPARE:
            words = f"{self.text(given[0], _SUM)} {_COMPARE[op]} {self.text(given[1], _SUM)}"
            return _within(words, _COMPARISON, level)
        return f"{op}({', '.join(self.text(a, _COMPARISON) for a in given)})"


def _within(text: str, own: int, level: int) -> str:
    return f"({text})" if own < level else text


def _number(args: tuple[object, ...]) -> str:
    value = args[0]
    if value == "nan":
        return "nan"
    assert isinstance(value, float)
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e6 and args[1] != -1.0 else repr(value)


def _ordered(pool: Pool, roots: Sequence[int]) -> list[int]:
    """Every term that roots need, arguments first."""
    found: dict[int, None] = {}
    for root in roots:
        pending: list[tuple[int, bool]] = [(root, False)]
        while pending:
            term, ready = pending.pop()
            if term in found:
                continue
            if ready:
                found[term] = None
                continue
            pending.append((term, True))
            pending.extend((a, False) for a in reversed(pool.arguments(term)))
    return list(found)


def index_text(index: Int) -> str:
    """An index as the format has it.

    Raises:
        UnsupportedError: for one that it has not.
    """
    atoms = index.atoms()
    if all(a.kind == "var" for a in atoms):
        return _affine(index)
    atom = index.atom
    if atom is not None and atom.kind in ("div", "mod"):
        inner, by = atom.args
        if isinstance(inner, Int) and isinstance(by, int) and by > 0 and all(a.kind == "var" for a in inner.atoms()):
            return f"({_affine(inner)}) {'//' if atom.kind == 'div' else '%'} {by}"
    raise UnsupportedError(f"an index {index}, expected a sum of axes times integers, or its quotient or remainder")


def _affine(index: Int) -> str:
    text = ""
    for monomial, c in sorted(index.terms, key=lambda t: (not t[0], t[1] < 0, [a.key for a in t[0]])):
        if len(monomial) > 1:
            raise UnsupportedError(f"an index {index}, which multiplies axes")
        name = _axis(monomial[0]) if monomial else ""
        part = str(abs(c)) if not name else name if abs(c) == 1 else f"{abs(c)} * {name}"
        sign = "-" if c < 0 else "+"
        text = f"{text} {sign} {part}" if text else part if c > 0 else f"-{part}"
    return text or "0"


def _axis(atom: Atom) -> str:
    return str(atom.args[0])
