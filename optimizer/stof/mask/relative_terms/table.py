# SPDX-License-Identifier: Apache-2.0
"""Where in a graph the rows of a relative table lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

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
    """A tensor of rows: its axes, and the row that a pair of query and key reads.

    With ``is_padded`` a row of zeros stands in front of those of the tensor, and behind them; ``row`` and ``rows`` count both.
    With ``key_axis`` the tensor is a constant that holds rows for pairs: the row of positions i on ``row_axis`` and j on
    ``key_axis`` is i - j plus the last j, and ``data`` has the rows, fp32 [rows, D].
    """

    tensor: str
    head_axis: int | None
    row_axis: int
    column_axis: int
    row: Int
    rows: Int
    key_axis: int | None = None
    data: bytes = b""
    is_padded: bool = False


def find_table(trace: Trace, domain: Domain, element: TensorElement) -> FoundTable | None:
    """The tensor whose rows a pair reads; None where there is none that all batches share.

    It is the last one before it is repeated for batches, or gathered for pairs, or one that is padded with zeros for long inputs.
    """
    found = _find_repeated(trace, domain, element)
    if found is None or found.data or found.rows.constant is not None:
        return found
    return _without_padding(trace, domain, found) or found


def _without_padding(trace: Trace, domain: Domain, found: FoundTable) -> FoundTable | None:
    """The rows before zeros are put around them, as many as the inputs are long; None where they are not."""
    shape = trace.symbolic.shape(found.tensor) or ()
    index = [integer(0)] * len(shape)
    for axis, value in ((found.head_axis, H), (found.row_axis, found.row), (found.column_axis, D)):
        if axis is not None:
            index[axis] = value
    element = TensorElement(found.tensor, tuple(index))
    for _ in range(_MOST_MOVES):
        moved = trace.step(element.tensor, element.index, pads=True)
        if moved is None:
            return None
        element = TensorElement(moved[0], tuple(domain.integer(i) for i in moved[1]))
        read = _read_axes(trace, element)
        if read is not None and read.rows.constant is not None:
            two = integer(2)
            return replace(read, row=read.row + integer(1), rows=read.rows + two, is_padded=True)
    return None


def _find_repeated(trace: Trace, domain: Domain, element: TensorElement) -> FoundTable | None:
    candidates = list(_walk_back(trace, domain, element))
    for candidate in candidates:
        if "b" not in variables_of(candidate.index) and (found := _read_axes(trace, candidate)) is not None:
            return found
    for candidate in candidates:
        if (found := _read_diagonals(trace, candidate)) is not None:
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


def _read_diagonals(trace: Trace, element: TensorElement) -> FoundTable | None:
    """The rows of a constant that an exporter gathered for pairs, where they depend on the difference of two positions."""
    array = trace.symbolic.constant(element.tensor)
    axes: dict[str, int] = {}
    for axis, index in enumerate(element.index):
        names = variables_of(index)
        word = "column" if index == D else next(iter(names)) if len(names) == 1 and names <= _PAIR else ""
        if not word or word in axes:
            return None
        axes[word] = axis
    if array is None or axes.keys() != {"q", "k", "column"}:
        return None
    pairs = np.transpose(array, [axes["q"], axes["k"], axes["column"]]).astype(np.float32)
    queries, keys, _ = pairs.shape
    if 0 in pairs.shape:
        return None
    rows = np.concatenate([pairs[0, :0:-1], pairs[:, 0]])  # of differences from 1 - keys to queries - 1
    numbers = np.arange(queries)[:, None] - np.arange(keys)[None, :] + keys - 1
    if not np.array_equal(rows[numbers], pairs):
        return None
    row = element.index[axes["q"]] - element.index[axes["k"]] + integer(keys - 1)
    return FoundTable(
        element.tensor, None, axes["q"], axes["column"], row, integer(len(rows)), axes["k"], rows.tobytes()
    )
