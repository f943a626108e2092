# SPDX-License-Identifier: Apache-2.0
"""Prints fused chains as descriptions (docs/reference/chain-format.md); description_parser.py reads them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stof.errors import UnsupportedError
from stof.fusion.description.format import (
    ARITY,
    MOST_AXES,
    MOST_INPUTS,
    MOST_NODES,
    MOST_OUTPUTS,
    MOST_REDUCTIONS,
    MOST_TEXT,
    REDUCTIONS,
)
from stof.fusion.terms import TermPool
from stof.symbolic.algebra.terms import Atom, Int

_BINARY = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_COMPARISON, _SUM, _PRODUCT, _UNARY, _ATOM = range(5)  # levels of the grammar, lowest precedence first
_DEEPEST_LINE = 24  # levels of an expression in one line; a deeper one gets a name


@dataclass(frozen=True)
class ChainOutput:
    """An output of a chain.

    Attributes:
        dtype: f32, f16 or bf16.
        dims: the axes of each dimension; none is a dimension of 1.
        term: its value.
    """

    dtype: str
    dims: tuple[tuple[str, ...], ...]
    term: int


@dataclass(frozen=True)
class ChainDescription:
    """A chain as text, with the counts and functions that its cost depends on."""

    text: str
    inputs: int
    outputs: int
    nodes: int
    reductions: int
    functions: frozenset[str]


def describe_chain(
    pool: TermPool, axes: Sequence[tuple[str, str]], outputs: Sequence[ChainOutput], inputs: int
) -> ChainDescription:
    """Prints a chain.

    Args:
        pool: the terms.
        axes: names and sizes as text, outermost first; the last one is the row.
        outputs: the outputs in order.
        inputs: how many inputs the operator has.

    Raises:
        UnsupportedError: when the chain exceeds a limit of the format.
    """
    printer = _DescriptionPrinter(pool, [o.term for o in outputs])
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
    functions = frozenset(pool.terms[t][0] for t in printer.order) & ARITY.keys()
    return ChainDescription(text, inputs, len(outputs), len(printer.order), reductions, functions)


class _DescriptionPrinter:
    """Names terms that are used more than once, and prints each line."""

    def __init__(self, pool: TermPool, roots: Sequence[int]) -> None:
        self.pool = pool
        self.order = pool.in_order(roots)
        uses = Counter(a for t in self.order for a in pool.arguments(t)) + Counter(roots)
        self.names: dict[int, str] = {}
        self.lines: list[str] = []
        depths: dict[int, int] = {}
        length: dict[int, int] = {}  # fewest characters; a shared term without a name is printed at every use
        has_select = any(pool.terms[t][0] == "below" for t in self.order)
        partial: set[int] = set()
        for term in self.order:
            op = pool.terms[term][0]
            depths[term] = 1 + max((depths[a] for a in pool.arguments(term)), default=0)
            length[term] = 1 + sum(length[a] for a in pool.arguments(term))
            if length[term] > MOST_TEXT:
                raise UnsupportedError(f"more than {MOST_TEXT} bytes of description")
            shared = uses[term] > 1 and op != "num"
            # A reduction runs over the whole row, each side of a select over a part of it: it is computed before the select.
            whole_row = has_select and op in REDUCTIONS
            if term in pool.partial or (op != "below" and any(a in partial for a in pool.arguments(term))):
                partial.add(term)
                continue
            if shared or whole_row or depths[term] > _DEEPEST_LINE:
                text = self.text(term, _COMPARISON)
                self.names[term] = f"t{len(self.names)}"
                self.lines.append(f"let {self.names[term]} = {text}")
                depths[term] = length[term] = 1

    def text(self, term: int, level: int) -> str:
        """A term as an operand of an operator of this level; in parentheses where its own level is lower."""
        if term in self.names:
            return self.names[term]
        op, args = self.pool.terms[term]
        operands = self.pool.arguments(term)
        if op == "num":
            return _number(args)
        if op == "read":
            number, indices = args
            assert isinstance(indices, tuple)
            return f"x{number}[{', '.join(index_text(i) for i in indices)}]"
        if op == "below":
            return f"select({args[0]} < {args[1]}, {', '.join(self.text(a, _COMPARISON) for a in operands)})"
        if op == "neg":
            return _parenthesize(f"-{self.text(operands[0], _UNARY)}", _UNARY, level)
        if op in _BINARY:
            own = _SUM if op in ("add", "sub") else _PRODUCT
            return _parenthesize(
                f"{self.text(operands[0], own)} {_BINARY[op]} {self.text(operands[1], own + 1)}", own, level
            )
        if op in _COMPARE:
            words = f"{self.text(operands[0], _SUM)} {_COMPARE[op]} {self.text(operands[1], _SUM)}"
            return _parenthesize(words, _COMPARISON, level)
        return f"{op}({', '.join(self.text(a, _COMPARISON) for a in operands)})"


def _parenthesize(text: str, own: int, level: int) -> str:
    return f"({text})" if own < level else text


def _number(args: tuple[object, ...]) -> str:
    value = args[0]
    if value == "nan":
        return "nan"
    assert isinstance(value, float)
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e6 and args[1] != -1.0 else repr(value)


def index_text(index: Int) -> str:
    """An index in the words of the format.

    Raises:
        UnsupportedError: when the format cannot express it.
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
