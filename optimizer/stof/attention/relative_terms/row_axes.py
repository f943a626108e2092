# SPDX-License-Identifier: Apache-2.0
"""Which elements of a node's inputs some rows of its result are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from stof.graph.einsum import read_equation, split_equation
from stof.graph.index import is_standard
from stof.graph.node_fields import attributes_of
from stof.symbolic import Int, Symbolic
from stof.symbolic.algebra.int_bounds import bound
from stof.symbolic.algebra.terms import integer
from stof.symbolic.axis_atoms import ONE, regroup, whole_axes
from stof.symbolic.tensor import Shape

_ARITHMETIC = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Sign", "Floor", "Ceil", "Mod", "Pow", "Min", "Max", "Clip"}
)
_FUNCTIONS = frozenset(
    {"Sin", "Cos", "Exp", "Log", "Sqrt", "Reciprocal", "Tanh", "Sigmoid", "Relu", "Gelu", "Erf", "Softplus"}
)
_LOGIC = frozenset({"Where", "And", "Or", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_ELEMENTWISE = _ARITHMETIC | _FUNCTIONS | _LOGIC | {"Cast", "Identity"}
REGROUPING = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten"})
AxisMap = Mapping[int, int]  # axes of a result to those of an input


@dataclass(frozen=True)
class Cut:
    """Rows along one axis of a tensor, if any, and the first elements along others.

    ``shift``: names of tensors that are added to the limits of the rows.
    """

    row: int | None
    firsts: frozenset[int] = frozenset()
    shift: tuple[str, ...] = ()

    @property
    def axes(self) -> list[int]:
        """All axes that are cut."""
        return sorted(self.firsts | ({self.row} if self.row is not None else set()))


def cuts_of_inputs(symbolic: Symbolic, node: onnx.NodeProto, cut: Cut) -> list[Cut | None] | None:
    """The cuts of a node's inputs that give a cut of its result, None for an input that is read whole.

    None where the node is none that works row by row.
    """
    output = symbolic.shape(node.output[0])
    shapes = [symbolic.shape(i) if i else () for i in node.input]
    if not is_standard(node) or output is None or any(s is None for s in shapes) or len(node.output) > 1:
        return None
    known = [s for s in shapes if s is not None]
    if node.op_type == "Slice":
        return _of_slice(symbolic, node, cut, known)
    maps = _axis_maps(node, output, known, cut)
    if maps is None:
        return None
    cuts = [_map_cut(cut, axes, shape) for axes, shape in zip(maps, known, strict=True)]
    return None if cut.row is not None and all(c is None or c.row is None for c in cuts) else cuts


def _map_cut(cut: Cut, axes: AxisMap, shape: Shape) -> Cut | None:
    kept = {axis: axes[axis] for axis in cut.axes if axis in axes and shape[axes[axis]] != ONE}
    if not kept:
        return None
    row = kept.get(cut.row) if cut.row is not None else None
    return Cut(row, frozenset(a for axis, a in kept.items() if axis != cut.row), cut.shift if row is not None else ())


def _axis_maps(node: onnx.NodeProto, output: Shape, shapes: Sequence[Shape], cut: Cut) -> list[AxisMap] | None:
    rank = len(output)
    nothing: list[AxisMap] = [{} for _ in shapes[1:]]
    if node.op_type in _ELEMENTWISE:
        return [_aligned(len(s), rank) for s in shapes]
    if node.op_type in REGROUPING:
        moved = _regrouped(shapes[0], output, cut)
        return None if moved is None else [moved, *nothing]
    attributes = attributes_of(node)
    match node.op_type:
        case "Transpose":
            perm = attributes.get("perm", list(range(rank))[::-1])
            return [dict(enumerate(perm))]
        case "Concat":
            axis = int(attributes["axis"]) % rank
            return None if axis in cut.axes else [{a: a for a in range(rank)} for _ in shapes]
        case "LayerNormalization":
            axis = int(attributes.get("axis", -1)) % rank
            return None if any(a >= axis for a in cut.axes) else [{a: a for a in range(rank)}, *nothing]
        case "Expand":
            return _of_expand(output, shapes, cut)
        case "MatMul" if min(map(len, shapes)) >= 2:
            left, right = ({**_aligned(len(s) - 2, rank - 2)} for s in shapes)
            return [{**left, rank - 2: len(shapes[0]) - 2}, {**right, rank - 1: len(shapes[1]) - 1}]
        case "Gemm":
            rows, columns = int(bool(attributes.get("transA", 0))), 1 - int(bool(attributes.get("transB", 0)))
            return [{0: rows}, {1: columns}, *(_aligned(len(s), rank) for s in shapes[2:])]
        case "Einsum":
            return _of_einsum(node)
        case "Gather":
            axis, count = int(attributes.get("axis", 0)) % len(shapes[0]), len(shapes[1])
            data = {a: a if a < axis else a - count + 1 for a in range(rank) if not axis <= a < axis + count}
            return [data, {axis + a: a for a in range(count)}]
    return None


def _aligned(rank: int, whole: int) -> dict[int, int]:
    """The axes of an operand that broadcasts to a rank."""
    return {axis + whole - rank: axis for axis in range(max(rank, 0)) if axis + whole >= rank}


def _regrouped(source: Shape, result: Shape, cut: Cut) -> AxisMap | None:
    """The axes of a result that a regrouping leaves whole; None where one that is cut is none, or its sizes are not known."""
    groups = regroup(whole_axes(source), result)
    unknown = [a for a, size in enumerate(result) if size.constant is None and a not in cut.axes]
    if groups is None or len(unknown) > (cut.row is None):  # a Reshape finds one size by itself
        return None
    moved = {}
    for axis, group in enumerate(groups):
        is_whole = len(group) == 1 and group[0].size == source[group[0].axis]
        if is_whole:
            moved[axis] = group[0].axis
        elif axis in cut.axes and group:
            return None
    return moved


def _of_expand(output: Shape, shapes: Sequence[Shape], cut: Cut) -> list[AxisMap] | None:
    """That of an Expand that repeats along the first elements alone, so that nothing is left of it."""
    moved = _aligned(len(shapes[0]), len(output))
    for axis, size in enumerate(output):
        if axis in cut.firsts:
            continue
        if axis not in moved or shapes[0][moved[axis]] != size:
            return None
    return [moved, {}]


def _of_einsum(node: onnx.NodeProto) -> list[AxisMap] | None:
    equation = read_equation(node)
    texts, result = split_equation(equation)
    if result is None or "." in equation or any(len(set(t)) < len(t) for t in (*texts, result)):
        return None
    return [{axis: text.index(letter) for axis, letter in enumerate(result) if letter in text} for text in texts]


def _of_slice(symbolic: Symbolic, node: onnx.NodeProto, cut: Cut, shapes: Sequence[Shape]) -> list[Cut | None] | None:
    """The cut of what is sliced: along other axes, or along the rows alone, whose limits it shifts."""
    starts, ends, axes, steps = (_numbers(symbolic, node, i, len(shapes[0])) for i in range(1, 5))
    if starts is None or ends is None or axes is None or any(a.constant is None for a in axes):
        return None
    sliced = [int(a.constant or 0) % len(shapes[0]) for a in axes]
    nothing: list[Cut | None] = [None] * (len(shapes) - 1)
    if not set(sliced) & set(cut.axes):
        return [cut, *nothing]
    size = (symbolic.shape(node.output[0]) or ())[sliced[0]]
    is_plain = sliced == [cut.row] and (steps is None or steps == [ONE])
    is_plain = is_plain and symbolic.dtype(node.input[1]) == TensorProto.INT64
    if not is_plain or ends[0] - starts[0] != size or bound(ends[0], upper=False) < 0 or not node.input[1]:
        return None  # a negative limit counts from the end
    return [Cut(cut.row, cut.firsts, (*cut.shift, node.input[1])), *nothing]


def _numbers(symbolic: Symbolic, node: onnx.NodeProto, place: int, rank: int) -> list[Int] | None:
    """The elements of an input of Slice; without axes all of them, without steps None."""
    if place >= len(node.input) or not node.input[place]:
        return [integer(a) for a in range(rank)] if place == 3 else None
    value = symbolic.value(node.input[place])
    elements = None if value is None else value.elements()
    if elements is None or not all(isinstance(e, Int) for e in elements):
        return None
    return [e for e in elements if isinstance(e, Int)]
