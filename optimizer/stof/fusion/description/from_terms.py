# SPDX-License-Identifier: Apache-2.0
"""Makes chain descriptions from the terms that a graph was translated to (terms.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from stof.errors import UnsupportedError
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.format import (
    LARGEST_INTEGER,
    MOST_AXES,
    MOST_INPUTS,
    MOST_NODES,
    MOST_OUTPUTS,
    MOST_REDUCTIONS,
    MOST_TEXT,
    REDUCTIONS,
)
from stof.fusion.description.nodes import AffineIndex, Axes, ChainOutput, ExpressionNode, negate, number_node
from stof.fusion.terms import TermPool
from stof.symbolic.algebra.terms import Int

_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
_OPERATORS |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_DEEPEST_EXPRESSION = 24  # levels; a deeper one gets a name


@dataclass(frozen=True)
class OutputTerm:
    """An output of a chain as a term: its type, the axes of each dimension, its value's number."""

    dtype: str
    dims: tuple[tuple[str, ...], ...]
    term: int


def describe_chain(pool: TermPool, axes: Axes, outputs: Sequence[OutputTerm], inputs: int) -> ChainDescription:
    """Describes a chain.

    Args:
        pool: the terms.
        axes: names and sizes, outermost first; the last one is the row.
        outputs: the outputs in order.
        inputs: how many inputs the operator has.

    Raises:
        UnsupportedError: when the chain exceeds a limit of the format.
    """
    for name, size in axes:
        if size.number > LARGEST_INTEGER:
            raise UnsupportedError(f"axis {name} of size {size.number}, expected at most {LARGEST_INTEGER}")
    builder = _ExpressionBuilder(pool, [o.term for o in outputs])
    outs = tuple(ChainOutput(o.dtype, o.dims, builder.expression(o.term)) for o in outputs)
    description = ChainDescription(axes, tuple(builder.lets), outs)
    reductions = sum(pool.terms[t][0] in REDUCTIONS for t in builder.order)
    for words, count, most in (
        ("bytes of description", len(description.text.encode()), MOST_TEXT),
        ("operations", len(builder.order), MOST_NODES),
        ("inputs", inputs, MOST_INPUTS),
        ("outputs", len(outputs), MOST_OUTPUTS),
        ("row reductions", reductions, MOST_REDUCTIONS),
        ("axes", len(axes), MOST_AXES),
    ):
        if count > most:
            raise UnsupportedError(f"{count} {words}, expected at most {most}")
    return description


class _ExpressionBuilder:
    """Names terms that are used more than once, and makes the expression of each."""

    def __init__(self, pool: TermPool, roots: Sequence[int]) -> None:
        self.pool = pool
        self.order = pool.in_order(roots)
        uses = Counter(a for t in self.order for a in pool.arguments(t)) + Counter(roots)
        self.names: dict[int, str] = {}
        self.lets: list[tuple[str, ExpressionNode]] = []
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
            if shared or whole_row or depths[term] > _DEEPEST_EXPRESSION:
                value = self.expression(term)
                self.names[term] = f"t{len(self.names)}"
                self.lets.append((self.names[term], value))
                depths[term] = length[term] = 1

    def expression(self, term: int) -> ExpressionNode:
        """A term as an expression over named values."""
        if term in self.names:
            return ExpressionNode("let", value=self.names[term])
        op, args = self.pool.terms[term]
        if op == "num":
            return number_node(float("nan") if args[0] == "nan" else _float(args[0]))
        if op == "read":
            number, indices = args
            assert isinstance(number, int)
            assert isinstance(indices, tuple)
            return ExpressionNode("read", value=float(number), indices=tuple(affine_index(i) for i in indices))
        operands = tuple(self.expression(a) for a in self.pool.arguments(term))
        if op == "below":
            axis, limit = args[:2]
            condition = ExpressionNode("<", (ExpressionNode("axis", value=str(axis)), number_node(_float(limit))))
            return ExpressionNode("select", (condition, *operands))
        if op == "neg":
            return negate(operands[0])
        return ExpressionNode(_OPERATORS.get(op, op), operands)


def _float(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def affine_index(index: Int) -> AffineIndex:
    """An index as the format has it.

    Raises:
        UnsupportedError: when the format cannot express it.
    """
    atoms = index.atoms()
    if all(a.kind == "var" for a in atoms):
        return AffineIndex(*_affine_terms(index))
    atom = index.atom
    if atom is not None and atom.kind in ("div", "mod"):
        inner, by = atom.args
        is_affine = isinstance(inner, Int) and all(a.kind == "var" for a in inner.atoms())
        if isinstance(inner, Int) and is_affine and isinstance(by, int) and 0 < by <= LARGEST_INTEGER:
            return AffineIndex(*_affine_terms(inner), "//" if atom.kind == "div" else "%", by)
    raise UnsupportedError(f"an index {index}, expected a sum of axes times integers, or its quotient or remainder")


def _affine_terms(index: Int) -> tuple[tuple[tuple[str, int], ...], int]:
    """The axes with their factors, positive ones first, and the constant."""
    terms: list[tuple[str, int]] = []
    constant = 0
    for monomial, factor in sorted(index.terms, key=lambda t: (not t[0], t[1] < 0, [a.key for a in t[0]])):
        if len(monomial) > 1:
            raise UnsupportedError(f"an index {index}, which multiplies axes")
        if abs(factor) > LARGEST_INTEGER:
            raise UnsupportedError(f"an index {index}, expected integers of at most {LARGEST_INTEGER}")
        if monomial:
            terms.append((str(monomial[0].args[0]), factor))
        else:
            constant = factor
    return tuple(terms), constant
