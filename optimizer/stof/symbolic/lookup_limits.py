# SPDX-License-Identifier: Apache-2.0
"""How long axes may be for positions that a graph computes to stay inside the tables that they look up.

A run that gathers beyond a table fails. One that slices beyond it gets less, which may be meant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import onnx

from stof.graph.index import domain_of
from stof.symbolic.algebra.piecewise import to_int
from stof.symbolic.algebra.terms import ANY, Atom, Int, integer
from stof.symbolic.tensor import Shape, SymTensor

Limit = tuple[Int, Int]
ONE = integer(1)
_MOST_AXES = 4  # of positions, of which each is probed at both ends


class SizeFacts(Protocol):
    """Shapes and values of a graph's tensors, as :class:`Symbolic` knows them."""

    running_sums: dict[str, str]

    def shape(self, name: str) -> Shape | None: ...

    def value(self, name: str) -> SymTensor | None: ...


Reader = Callable[[onnx.NodeProto, SizeFacts], Iterator[Limit]]


def find_lookup_limits(nodes: Iterable[onnx.NodeProto], facts: SizeFacts) -> tuple[Limit, ...]:
    """Pairs of sizes of which the first is at most the second in every valid run.

    Args:
        nodes: those of subgraphs among them.
        facts: of their tensors.
    """
    return _find_limits(nodes, facts, _GATHERS)


def find_slice_limits(nodes: Iterable[onnx.NodeProto], facts: SizeFacts) -> tuple[Limit, ...]:
    """Pairs of sizes of which the first is at most the second in every run that slices no axis beyond its ends."""
    return _find_limits(nodes, facts, {("", "Slice"): _slice})


def _find_limits(
    nodes: Iterable[onnx.NodeProto], facts: SizeFacts, readers: Mapping[tuple[str, str], Reader]
) -> tuple[Limit, ...]:
    limits: dict[Limit, None] = {}
    for node in nodes:
        read = readers.get((domain_of(node), node.op_type))
        if read is None:
            continue
        try:
            pairs = list(read(node, facts))
        except (ValueError, IndexError, TypeError, KeyError, ArithmeticError):
            continue  # a node that breaks the standard's rules
        limits.update((pair, None) for pair in pairs if pair[0].constant is None and pair[0] != pair[1])
    return tuple(limits)


def _attributes(node: onnx.NodeProto) -> Mapping[str, int]:
    return {a.name: a.i for a in node.attribute if a.type == onnx.AttributeProto.INT}


def _gather(node: onnx.NodeProto, facts: SizeFacts) -> Iterator[Limit]:
    table, where = facts.shape(node.input[0]), facts.value(node.input[1])
    if table is not None and where is not None:
        attributes = _attributes(node)
        rows = table[attributes.get("gather_axis", attributes.get("axis", 0))]
        yield from _of_positions(where, rows, None, facts)


def _gather_nd(node: onnx.NodeProto, facts: SizeFacts) -> Iterator[Limit]:
    table, where = facts.shape(node.input[0]), facts.value(node.input[1])
    first = _attributes(node).get("batch_dims", 0)
    if table is not None and where is not None:
        for part in range(where.shape[-1].constant or 0):
            yield from _of_positions(where, table[first + part], part, facts)


def _of_positions(where: SymTensor, rows: Int, part: int | None, facts: SizeFacts) -> Iterator[Limit]:
    """The limits by the first and the last position along each axis."""
    rank = where.rank - (part is not None)
    if where.is_constant or rank > _MOST_AXES:
        return
    ends = [(integer(0),) if d == ONE else (integer(0), d - ONE) for d in where.shape[:rank]]
    for corner in itertools.product(*ends):
        index = corner if part is None else (*corner, integer(part))
        position = _without_reads(to_int(where.at(index)), facts)
        if position is not None:
            yield position + ONE, rows
            yield -position, rows  # negative ones count from the end


def _without_reads(position: Int, facts: SizeFacts) -> Int | None:
    """The position that masks of ones make of it, as inputs are drawn; None where it depends on other data."""
    total = integer(0)
    for monomial, coefficient in position.terms:
        product = integer(coefficient)
        for atom in monomial:
            factor = _find_largest(atom, facts)
            if factor is None:
                return None
            product = product * factor
        total = total + product
    return total


def _find_largest(atom: Atom, facts: SizeFacts) -> Int | None:
    if atom.kind == "read":
        name = str(atom.args[0])
        if name in facts.running_sums:  # of zeros and ones
            shape = facts.shape(name)
            return shape[-1] if shape else None
        return ONE if ANY not in atom.args[2:] else None
    return Int((((atom,), 1),))


def _slice(node: onnx.NodeProto, facts: SizeFacts) -> Iterator[Limit]:
    data = facts.shape(node.input[0])
    lists = [_elements(name, facts) for name in node.input[1:4]]
    if data is None or len(lists) < 2 or any(x is None for x in lists):
        return
    starts, ends = lists[0] or [], lists[1] or []
    axes = [x.constant for x in lists[2] or []] if len(lists) > 2 else list(range(len(starts)))
    for start, end, axis in zip(starts, ends, axes, strict=True):
        if axis is not None:
            for position in (start, end):
                yield position, data[axis]
                yield -position, data[axis]


def _elements(name: str, facts: SizeFacts) -> list[Int] | None:
    value = facts.value(name)
    elements = None if value is None else value.elements()
    sizes = [e for e in elements or () if isinstance(e, Int)]
    return None if elements is None or len(sizes) != len(elements) else sizes


def _embed(node: onnx.NodeProto, facts: SizeFacts) -> Iterator[Limit]:
    ids, table = facts.shape(node.input[0]), facts.shape(node.input[3])
    if ids is not None and table is not None and not any(node.input[8:9]):
        yield ids[-1], table[0]


_GATHERS: dict[tuple[str, str], Reader] = {
    ("", "Gather"): _gather,
    ("", "GatherElements"): _gather,
    ("com.microsoft", "GatherBlockQuantized"): _gather,
    ("", "GatherND"): _gather_nd,
    ("com.microsoft", "EmbedLayerNormalization"): _embed,
}
