# SPDX-License-Identifier: Apache-2.0
"""Where in a graph the rows of a relative table lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stof.mask.from_condition import H
from stof.mask.relative_terms.contraction import TensorElement, depends_on
from stof.mask.relative_terms.operands import D
from stof.symbolic import Int, integer
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.trace import Trace, variables_of

_PAIR = frozenset({"q", "k"})
_MOST_MOVES = 64


@dataclass(frozen=True)
class FoundTable:
    """A tensor of rows: its axes, and the row that a pair of query and key reads."""

    tensor: str
    head_axis: int | None
    row_axis: int
    column_axis: int
    row: Int
    rows: Int


def find_table(trace: Trace, domain: Domain, element: TensorElement) -> FoundTable | None:
    """The tensor whose rows a pair reads; None where there is none that all batches share.

    It is the last one before it is repeated for batches, or gathered for pairs.
    """
    candidates = list(_walk_back(trace, domain, element))
    for candidate in candidates:
        if "b" not in variables_of(candidate.index) and (found := _read_axes(trace, candidate)) is not None:
            return found
    for candidate in candidates:  # a batch axis along which all is equal
        value = trace.element(candidate.tensor, candidate.index)
        first = TensorElement(candidate.tensor, tuple(_without_batch(i) for i in candidate.index))
        found = _read_axes(trace, first)
        if found is not None and value is not None and not depends_on(trace, value, "b"):
            return found
    return None


def _walk_back(trace: Trace, domain: Domain, element: TensorElement) -> Iterator[TensorElement]:
    for _ in range(_MOST_MOVES):
        element = TensorElement(element.tensor, tuple(domain.integer(i) for i in element.index))
        yield element
        moved = trace.step(element.tensor, element.index)
        if moved is None:
            return
        element = TensorElement(*moved)


def _without_batch(index: Int) -> Int:
    return integer(0) if index.atom is not None and index.atom.args == ("b",) else index


def _read_axes(trace: Trace, element: TensorElement) -> FoundTable | None:
    """The axes of heads, rows and columns, each index being one of these or a constant."""
    shape = trace.symbolic.shape(element.tensor)
    if shape is None:
        return None
    head = row = column = None
    for axis, index in enumerate(element.index):
        names = variables_of(index)
        if index == H and head is None:
            head = axis
        elif index == D and column is None:
            column = axis
        elif names and names <= _PAIR and row is None:
            row = axis
        elif index.constant != 0:
            return None
    if row is None or column is None:
        return None
    return FoundTable(element.tensor, head, row, column, element.index[row], shape[row])
