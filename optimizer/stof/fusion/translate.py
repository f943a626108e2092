# SPDX-License-Identifier: Apache-2.0
"""A region of a graph, and its translation to a chain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx

from stof.errors import UnsupportedError
from stof.fusion.description import MOST_AXES, MOST_INPUTS, REDUCTIONS, Description, Output, Pool, describe_chain
from stof.fusion.element_ops import TYPES, kind_of_node
from stof.fusion.index_terms import Limits, Puller
from stof.graph.index import producers
from stof.symbolic import Int, Symbolic, integer, var
from stof.symbolic.rules.movement_helpers import element_count
from stof.symbolic.tensor import Shape

_ZERO, _ONE = integer(0), integer(1)
_NAMES = ("a", "b", "c", "d", "e")
_ROW = "n"
_MOST_TRIES = 8


@dataclass(frozen=True)
class Region:
    """Nodes of a graph by their places, with the tensors that others read of what they write, in order."""

    places: tuple[int, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Chain:
    """A region as one operator. ``sizes`` are the axes', outermost first; ``dtypes`` are ONNX types of the outputs."""

    region: Region
    description: Description
    inputs: tuple[str, ...]
    dtypes: tuple[int, ...]
    sizes: tuple[Int, ...]


@dataclass(frozen=True)
class _Axes:
    """Names and sizes, the row last."""

    of: tuple[tuple[str, Int], ...]

    @property
    def row(self) -> tuple[str, Int]:
        return self.of[-1]


def translate(region: Region, nodes: Sequence[onnx.NodeProto], symbolic: Symbolic) -> Chain:
    """The chain of a region.

    Args:
        region: which nodes, and what others read of them.
        nodes: of the graph that the places count in.
        symbolic: of the model.

    Raises:
        UnsupportedError: with the first reason found.
    """
    own = [nodes[p] for p in region.places]
    writers = producers(own)
    shapes = []
    for name in region.outputs:
        shape = symbolic.shape(name)
        if shape is None:
            raise UnsupportedError(f"the shape of {name!r} is not known")
        if symbolic.dtype(name) not in TYPES:
            raise UnsupportedError(f"{name!r} is of element type {symbolic.dtype(name)}, expected a float type")
        shapes.append(shape)
    first: UnsupportedError | None = None
    for i, axes in enumerate(_candidates(own, shapes, symbolic)):
        try:
            return _translated(region, writers, shapes, axes, symbolic)
        except UnsupportedError as error:
            first = first or error
        if i + 1 == _MOST_TRIES:
            break
    raise first or UnsupportedError("its outputs have no axes")


def _candidates(own: Sequence[onnx.NodeProto], shapes: Sequence[Shape], symbolic: Symbolic) -> Iterator[_Axes]:
    """Axes to try: of the largest output, then of other tensors with as many elements, finest first."""
    main = max(shapes, key=lambda s: (len(_long(s)), sum(d.constant or 0 for d in _long(s))))
    known = [symbolic.shape(n) for node in own for n in (*node.output, *node.input) if n]
    same = [s for s in known if s is not None and element_count(s) == element_count(main)]
    tried: set[tuple[Int, ...]] = set()
    rows = [
        d
        for node in own
        if kind_of_node(node) in ("reducing", "rowwise")
        and (d := (symbolic.shape(node.input[0]) or (_ONE,))[-1]) != _ONE
    ]
    for shape in [main, *sorted(same, key=lambda s: -len(_long(s)))]:
        sizes = _long(shape)
        if sizes in tried or len(sizes) > MOST_AXES:
            continue
        tried.add(sizes)
        if rows and rows[0] not in sizes and len(sizes) < MOST_AXES:  # only a value of each row comes out
            yield _named((*sizes, rows[0]))
        for last in sorted(range(len(sizes)), key=lambda i: (bool(rows) and sizes[i] != rows[0], -i)):
            yield _named((*sizes[:last], *sizes[last + 1 :], sizes[last]))
    if len(_long(main)) > MOST_AXES and not tried:
        raise UnsupportedError(f"an output of shape {_words(main)}, expected at most {MOST_AXES} axes")
    if not tried - {()}:
        yield _named((_ONE,))


def _long(shape: Shape) -> Shape:
    return tuple(d for d in shape if d != _ONE)


def _named(sizes: Shape) -> _Axes:
    return _Axes(tuple(zip((*_NAMES[: len(sizes) - 1], _ROW), sizes, strict=True)))


def _translated(
    region: Region, writers: dict[str, onnx.NodeProto], shapes: Sequence[Shape], axes: _Axes, symbolic: Symbolic
) -> Chain:
    limits = Limits(tuple((name, _ZERO, size - _ONE) for name, size in axes.of))
    puller = Puller(symbolic, writers, axes.row, limits)
    outputs = []
    for name, shape in zip(region.outputs, shapes, strict=True):
        dims = _dims(shape, axes)
        if dims is None:
            raise UnsupportedError(f"{name!r} of shape {_words(shape)} is not made of the axes {_words(_sizes(axes))}")
        term = puller.at(name, tuple(_index(d, dict(axes.of)) for d in dims), limits)
        if _ROW not in [a for d in dims for a in d] and axes.row[1] != _ONE and _varies(puller.pool, term):
            raise UnsupportedError(f"{name!r} differs along the row that it has no axis for")
        dtype = TYPES[symbolic.dtype(name)]
        op, args = puller.pool.terms[term]
        if op == dtype and isinstance(args[0], int):  # an output is rounded anyway
            term = args[0]
        outputs.append(Output(dtype, dims, term))
    if not puller.inputs:
        raise UnsupportedError("it reads nothing")
    if len(puller.inputs) > MOST_INPUTS:
        raise UnsupportedError(f"{len(puller.inputs)} inputs, expected at most {MOST_INPUTS}")
    given = [(name, size, _size_text(size, puller)) for name, size in axes.of]
    description = describe_chain(puller.pool, [(n, t) for n, _, t in given], outputs, len(puller.inputs))
    dtypes = tuple(symbolic.dtype(n) for n in region.outputs)
    return Chain(region, description, tuple(puller.inputs), dtypes, _sizes(axes))


def _sizes(axes: _Axes) -> Shape:
    return tuple(size for _, size in axes.of)


def _words(shape: Shape) -> str:
    return f"[{', '.join(str(d) for d in shape)}]"


def _dims(shape: Shape, axes: _Axes) -> tuple[tuple[str, ...], ...] | None:
    """The axes of each dim of an output; every axis once, the row at most once."""
    free = list(axes.of)
    # In memory order, which the row may be anywhere in.
    found: list[tuple[str, ...]] = []
    for size in shape:
        if size == _ONE:
            found.append(())
            continue
        part = next(([a] for a in free if a[1] == size), None) or _merged(free, size)
        if part is None:
            return None
        found.append(tuple(name for name, _ in part))
        free = [a for a in free if a not in part]
    return tuple(found) if all(a == axes.row or a[1] == _ONE for a in free) else None


def _merged(free: Sequence[tuple[str, Int]], size: Int) -> list[tuple[str, Int]] | None:
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


def _varies(pool: Pool, term: int) -> bool:
    """Whether a term differs along the row."""
    seen: set[int] = set()
    pending = [term]
    while pending:
        one = pending.pop()
        if one in seen:
            continue
        seen.add(one)
        op, args = pool.terms[one]
        if op in REDUCTIONS:
            continue
        if op == "below" and args[0] == _ROW:
            return True
        if op == "read" and isinstance(args[1], tuple) and any(_ROW in _variables(i) for i in args[1]):
            return True
        pending += pool.arguments(one)
    return False


def _variables(index: object) -> set[str]:
    found: set[str] = set()
    pending = [index]
    while pending:
        one = pending.pop()
        if isinstance(one, Int):
            for atom in one.atoms():
                if atom.kind == "var":
                    found.add(str(atom.args[0]))
                pending.extend(atom.args)
    return found


def _size_text(size: Int, puller: Puller) -> str:
    """An axis's size: a number, or a dimension of an input."""
    if size.constant is not None:
        return str(size.constant)
    quotient = ""
    for name, number in puller.inputs.items():
        for i, d in enumerate(puller.shape(name)):
            if d == size:
                return f"x{number}.{i}"
            part = d.divide(size)
            if part is not None and part.constant is not None and part.constant > 1:
                quotient = quotient or f"x{number}.{i} / {part.constant}"
    if not quotient:
        raise UnsupportedError(f"size {size} of an axis is no input's")
    return quotient
