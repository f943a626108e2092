# SPDX-License-Identifier: Apache-2.0
"""Translates a region of a graph to a fused chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx

from stof.errors import UnsupportedError
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.format import MOST_AXES, MOST_DIMENSIONS, MOST_INPUTS, REDUCTIONS
from stof.fusion.description.from_terms import OutputTerm, describe_chain
from stof.fusion.description.nodes import AxisSize
from stof.fusion.element_ops import TYPES, kind_of_node
from stof.fusion.index_terms import AxisRanges, TermBuilder
from stof.fusion.terms import TermPool
from stof.symbolic import Int, Symbolic, integer, var
from stof.symbolic.rules.movement_helpers import element_count
from stof.symbolic.tensor import Shape

_ZERO, _ONE = integer(0), integer(1)
_NAMES = ("a", "b", "c", "d", "e")
_ROW = "n"
_MOST_TRIES = 8


@dataclass(frozen=True)
class Region:
    """Nodes of a graph by index, and the tensors they write that other nodes or the graph's outputs read, in order."""

    node_indices: tuple[int, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class FusedChain:
    """A region as one operator.

    Attributes:
        region: the nodes that it replaces, and its outputs.
        description: what it computes.
        inputs: the tensors that it reads.
        dtypes: ONNX element types of the outputs.
        sizes: sizes of its axes, outermost first.
    """

    region: Region
    description: ChainDescription
    inputs: tuple[str, ...]
    dtypes: tuple[int, ...]
    sizes: tuple[Int, ...]


@dataclass(frozen=True)
class RefusedRegion:
    """Nodes that cannot become a chain, and why."""

    node_indices: tuple[int, ...]
    reason: str


@dataclass(frozen=True)
class _Axes:
    """Names and sizes of a chain's axes, the row last."""

    of: tuple[tuple[str, Int], ...]

    @property
    def row(self) -> tuple[str, Int]:
        return self.of[-1]


def translate(region: Region, nodes: Sequence[onnx.NodeProto], symbolic: Symbolic) -> FusedChain:
    """Translates a region to a chain, by the first axes that express all of its outputs.

    Args:
        region: the nodes and their outputs.
        nodes: all nodes of the graph.
        symbolic: shapes, types and constants of the model.

    Raises:
        UnsupportedError: when no axes do, with the reason of the first that were tried.
    """
    members = [nodes[p] for p in region.node_indices]
    producers = {o: n for n in members for o in n.output if o}
    shapes = []
    for name in region.outputs:
        shape = symbolic.shape(name)
        if shape is None:
            raise UnsupportedError(f"the shape of {name!r} is not known")
        if symbolic.dtype(name) not in TYPES:
            raise UnsupportedError(f"{name!r} is of element type {symbolic.dtype(name)}, expected a float type")
        shapes.append(shape)
    first: UnsupportedError | None = None
    for i, axes in enumerate(_candidate_axes(members, shapes, symbolic)):
        try:
            return _translate_over(region, producers, shapes, axes, symbolic)
        except UnsupportedError as error:
            first = first or error
        if i + 1 == _MOST_TRIES:
            break
    raise first or UnsupportedError("its outputs have no axes")


def _candidate_axes(members: Sequence[onnx.NodeProto], shapes: Sequence[Shape], symbolic: Symbolic) -> Iterator[_Axes]:
    """Axes to try: those of the largest output, then of other tensors with as many elements, most axes first."""
    main = max(shapes, key=lambda s: (len(_without_ones(s)), sum(d.constant or 0 for d in _without_ones(s))))
    operand_shapes = [symbolic.shape(n) for node in members for n in (*node.output, *node.input) if n]
    same = [s for s in operand_shapes if s is not None and element_count(s) == element_count(main)]
    tried: set[tuple[Int, ...]] = set()
    rows = [
        d
        for node in members
        if kind_of_node(node) in ("reducing", "rowwise")
        and (d := (symbolic.shape(node.input[0]) or (_ONE,))[-1]) != _ONE
    ]
    for shape in [main, *sorted(same, key=lambda s: -len(_without_ones(s)))]:
        sizes = _without_ones(shape)
        if sizes in tried or len(sizes) > MOST_AXES:
            continue
        tried.add(sizes)
        if rows and rows[0] not in sizes and len(sizes) < MOST_AXES:  # the output is one value for each row
            yield _name_axes((*sizes, rows[0]))
        for last in sorted(range(len(sizes)), key=lambda i: (bool(rows) and sizes[i] != rows[0], -i)):
            yield _name_axes((*sizes[:last], *sizes[last + 1 :], sizes[last]))
    if len(_without_ones(main)) > MOST_AXES and not tried:
        raise UnsupportedError(f"an output of shape {_shape_text(main)}, expected at most {MOST_AXES} axes")
    if not tried - {()}:
        yield _name_axes((_ONE,))


def _without_ones(shape: Shape) -> Shape:
    return tuple(d for d in shape if d != _ONE)


def _name_axes(sizes: Shape) -> _Axes:
    return _Axes(tuple(zip((*_NAMES[: len(sizes) - 1], _ROW), sizes, strict=True)))


def _translate_over(
    region: Region, producers: dict[str, onnx.NodeProto], shapes: Sequence[Shape], axes: _Axes, symbolic: Symbolic
) -> FusedChain:
    ranges = AxisRanges(tuple((name, _ZERO, size - _ONE) for name, size in axes.of))
    builder = TermBuilder(symbolic, producers, axes.row, ranges)
    outputs = []
    for name, shape in zip(region.outputs, shapes, strict=True):
        dims = _dims(shape, axes)
        if dims is None:
            raise UnsupportedError(
                f"{name!r} of shape {_shape_text(shape)} is not made of the axes {_shape_text(_sizes(axes))}"
            )
        term = builder.term_at(name, tuple(_index(d, dict(axes.of)) for d in dims), ranges)
        if _ROW not in [a for d in dims for a in d] and axes.row[1] != _ONE and _varies(builder.pool, term):
            raise UnsupportedError(f"{name!r} differs along the row that it has no axis for")
        dtype = TYPES[symbolic.dtype(name)]
        op, args = builder.pool.terms[term]
        if op == dtype and isinstance(args[0], int):  # the output is rounded to this type anyway
            term = args[0]
        outputs.append(OutputTerm(dtype, dims, term))
    if not builder.inputs:
        raise UnsupportedError("it reads nothing")
    if len(builder.inputs) > MOST_INPUTS:
        raise UnsupportedError(f"{len(builder.inputs)} inputs, expected at most {MOST_INPUTS}")
    axis_sizes = tuple((name, _axis_size(size, builder)) for name, size in axes.of)
    description = describe_chain(builder.pool, axis_sizes, outputs, len(builder.inputs))
    dtypes = tuple(symbolic.dtype(n) for n in region.outputs)
    return FusedChain(region, description, tuple(builder.inputs), dtypes, _sizes(axes))


def _sizes(axes: _Axes) -> Shape:
    return tuple(size for _, size in axes.of)


def _shape_text(shape: Shape) -> str:
    return f"[{', '.join(str(d) for d in shape)}]"


def _dims(shape: Shape, axes: _Axes) -> tuple[tuple[str, ...], ...] | None:
    """The axes of each dimension of an output: every axis once, the row at most once. None where the shape has others."""
    free = list(axes.of)
    # Axes stay in memory order; the row may be any of them.
    dims: list[tuple[str, ...]] = []
    for size in shape:
        if size == _ONE:
            dims.append(())
            continue
        part = next(([a] for a in free if a[1] == size), None) or _adjacent_axes(free, size)
        if part is None:
            return None
        dims.append(tuple(name for name, _ in part))
        free = [a for a in free if a not in part]
    return tuple(dims) if all(a == axes.row or a[1] == _ONE for a in free) else None


def _adjacent_axes(free: Sequence[tuple[str, Int]], size: Int) -> list[tuple[str, Int]] | None:
    for start in range(len(free)):
        total = _ONE
        for end in range(start, len(free)):
            total = total * free[end][1]
            if total == size:
                return list(free[start : end + 1])
    return None


def _index(dim: tuple[str, ...], sizes: dict[str, Int]) -> Int:
    total = _ZERO
    for name in dim:
        total = total * sizes[name] + var(name)
    return total


def _varies(pool: TermPool, term: int) -> bool:
    """Whether a term depends on the position in the row."""
    seen: set[int] = set()
    pending = [term]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        op, args = pool.terms[current]
        if op in REDUCTIONS:
            continue
        if op == "below" and args[0] == _ROW:
            return True
        if op == "read" and isinstance(args[1], tuple) and any(_ROW in _variables(i) for i in args[1]):
            return True
        pending += pool.arguments(current)
    return False


def _variables(index: object) -> set[str]:
    names: set[str] = set()
    pending = [index]
    while pending:
        one = pending.pop()
        if isinstance(one, Int):
            for atom in one.atoms():
                if atom.kind == "var":
                    names.add(str(atom.args[0]))
                pending.extend(atom.args)
    return names


def _axis_size(size: Int, builder: TermBuilder) -> AxisSize:
    """An axis's size: a number, or a dimension of an input, or that divided by a number."""
    if size.constant is not None:
        return AxisSize(size.constant)
    quotient: AxisSize | None = None
    for name, number in builder.inputs.items():
        for i, d in enumerate(builder.shape(name)[:MOST_DIMENSIONS]):
            if d == size:
                return AxisSize(1, number, i)
            part = d.divide(size)
            if part is not None and part.constant is not None and part.constant > 1:
                quotient = quotient or AxisSize(part.constant, number, i)
    if quotient is None:
        raise UnsupportedError(f"size {size} of an axis is no input's")
    return quotient
