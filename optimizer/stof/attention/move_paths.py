# SPDX-License-Identifier: Apache-2.0
"""Follows a tensor through movement operators, and says where each of its axes lies in the source tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx
from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe, is_standard
from stof.symbolic import Int, Symbolic
from stof.symbolic.axis_atoms import ONE, Axes, AxisAtom, merge_parts, regroup, size_of, whole_axes
from stof.symbolic.rules.dropout import may_drop
from stof.symbolic.tensor import Shape

MOVES = frozenset({"Transpose", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Identity", "Flatten"})
_REGROUPING = frozenset({"Reshape", "Unsqueeze", "Squeeze", "Flatten"})
CASTS = frozenset({"Cast", "CastLike"})
_MAX_PATH = 24  # nodes
_FLOAT_WIDTHS: dict[int, int] = {TensorProto.FLOAT16: 1, TensorProto.BFLOAT16: 1, TensorProto.FLOAT: 2}


@dataclass(frozen=True)
class MovePath:
    """The nodes from a source tensor to a MatMul operand, and the constant factor by which they scale it."""

    source: str
    nodes: tuple[onnx.NodeProto, ...]  # in order of execution
    scale: float = 1.0


def is_move(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a node only moves its first input's elements: a view, or a cast to the same type."""
    if not is_standard(node):
        return False
    if node.op_type in CASTS:
        dtype = symbolic.dtype(node.output[0])
        return dtype != 0 and dtype == symbolic.dtype(node.input[0])
    return node.op_type in MOVES


def move_paths(index: GraphIndex, symbolic: Symbolic, tensor: str) -> list[MovePath]:
    """The paths to an operand from every tensor behind movements and scalar factors, shortest first.

    Casts to a wider float are passed as well: they lose nothing, and the op computes in fp32 anyway.
    """
    paths = [MovePath(tensor, ())]
    while len(paths) <= _MAX_PATH:
        last = paths[-1]
        node = index.producer(last.source)
        if node is None:
            break
        if is_move(symbolic, node) or _is_widening_cast(symbolic, node):
            paths.append(MovePath(node.input[0], (node, *last.nodes), last.scale))
            continue
        factor = scalar_factor(symbolic, node)
        if factor is None:
            break
        paths.append(MovePath(factor[0], last.nodes, last.scale * factor[1]))
    return paths


def _is_widening_cast(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    if node.op_type not in CASTS or not is_standard(node):
        return False
    source, result = (_FLOAT_WIDTHS.get(symbolic.dtype(n), 0) for n in (node.input[0], node.output[0]))
    return bool(0 < source < result)


def is_float_cast(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a node casts between the float types of the op."""
    if node.op_type not in CASTS or not is_standard(node):
        return False
    return all(symbolic.dtype(n) in _FLOAT_WIDTHS for n in (node.input[0], node.output[0]))


def is_identity(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a node of the standard domain is an Identity, or a Dropout of inference.

    Raises:
        UnsupportedError: for a Dropout that drops.
    """
    if node.op_type == "Dropout" and may_drop(node, symbolic.constant):
        raise UnsupportedError(
            f"{describe(node)} may drop elements: its training_mode is not known to be false, nor its ratio to be 0"
        )
    return node.op_type in ("Identity", "Dropout")


def scalar_factor(symbolic: Symbolic, node: onnx.NodeProto) -> tuple[str, float] | None:
    """(x, c) of a Mul or Div of x by one number that does not change x's shape."""
    if not is_standard(node) or node.op_type not in ("Mul", "Div") or len(node.input) != 2:
        return None
    for i in (1, 0) if node.op_type == "Mul" else (1,):
        number = symbolic.uniform(node.input[i])
        if number is None:
            continue
        shape, other = symbolic.shape(node.output[0]), symbolic.shape(node.input[1 - i])
        factor_shape = symbolic.shape(node.input[i])
        scalar = (
            factor_shape is not None
            and all(d == ONE for d in factor_shape)
            and (other is None or len(factor_shape) <= len(other))
        )
        if not scalar and (shape is None or shape != other):
            continue
        if node.op_type == "Div":
            return (node.input[0], 1.0 / number) if number != 0 else None
        return (node.input[1 - i], number)
    return None


def subtracts_row_max(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a node is x - ReduceMax(x) along the last axis."""
    if node.op_type != "Sub":
        return False
    maximum = index.producer(node.input[1])
    while maximum is not None and maximum.op_type == "Identity":  # as a stopped gradient is exported
        maximum = index.producer(maximum.input[0])
    if maximum is None or maximum.op_type != "ReduceMax" or maximum.input[0] != node.input[0]:
        return False
    shape, maximum_shape = symbolic.shape(node.input[0]), symbolic.shape(node.input[1])
    return (
        shape is not None
        and maximum_shape is not None
        and maximum_shape[:-1] == shape[:-1]
        and maximum_shape[-1].constant == 1
    )


def trace_axes(symbolic: Symbolic, path: MovePath) -> Axes | None:
    """The axes of the path's last tensor as atoms of its source; None where a movement is not understood."""
    shape = symbolic.shape(path.source)
    if shape is None:
        return None
    axes = whole_axes(shape)
    for node in path.nodes:
        result = symbolic.shape(node.output[0])
        if result is None:
            return None
        moved = _apply_move(symbolic, node, axes, result)
        if moved is None:
            return None
        axes = moved
    return axes


def _apply_move(symbolic: Symbolic, node: onnx.NodeProto, axes: Axes, result: tuple[Int, ...]) -> Axes | None:
    if node.op_type == "Identity" or node.op_type in CASTS:
        return axes
    if node.op_type == "Transpose":
        perm = next((list(a.ints) for a in node.attribute if a.name == "perm"), list(range(len(axes)))[::-1])
        return tuple(axes[p] for p in perm)
    if node.op_type == "Expand":
        if len(result) < len(axes) or may_broadcast(symbolic, node):
            return None
        padded: Axes = ((),) * (len(result) - len(axes)) + axes
        broadcasts = len({a.part for group in axes for a in group if a.axis == -1})
        grown = []
        for group, size in zip(padded, result, strict=True):
            if size_of(group) == size:
                grown.append(group)
            elif size_of(group) == ONE:
                grown.append((AxisAtom(-1, broadcasts, size),))
                broadcasts += 1
            else:
                return None
        return tuple(grown)
    return regroup(axes, result)


def may_broadcast(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether an Expand meets two sizes of different names: at run time one of them may be 1 and broadcast."""
    shape, value = symbolic.shape(node.input[0]), symbolic.value(node.input[1])
    wanted = None if value is None else value.elements()
    if shape is None or wanted is None:
        return True
    pairs = zip(reversed(shape), reversed(wanted), strict=False)
    return any(ONE not in (size, other) and size != other for size, other in pairs)


def keeps_last_two_axes(symbolic: Symbolic, node: onnx.NodeProto) -> bool:
    """Whether a movement leaves the last two axes as they are."""
    before, after = symbolic.shape(node.input[0]), symbolic.shape(node.output[0])
    if before is None or after is None or len(before) < 2 or len(after) < 2 or node.op_type in ("Transpose", "Expand"):
        return node.op_type == "Identity" or node.op_type in CASTS
    return before[-2:] == after[-2:]


def swapped_order(symbolic: Symbolic, tensor: str) -> tuple[int, ...]:
    """The permutation that exchanges the last two axes of a tensor."""
    rank = len(symbolic.shape(tensor) or ())
    return (*range(rank - 2), rank - 1, rank - 2)


def trace_views(symbolic: Symbolic, source: str, moves: Sequence[onnx.NodeProto]) -> list[Axes]:
    """The axes of a tensor behind none, one, ... of its moves, as atoms of the tensor; fewer where a move is not understood.

    Between moves there may be nodes that broadcast a mask to the tensor: their output has its sizes, perhaps by other names.
    """
    shape = symbolic.shape(source)
    if shape is None:
        return []
    views = [merge_parts(whole_axes(shape))]
    for node in moves:
        before, result = symbolic.shape(node.input[0]), symbolic.shape(node.output[0])
        named = None if before is None else _rename_sizes(views[-1], before)
        if named is not None and node.op_type in _REGROUPING:  # by other factors than before, perhaps
            named = merge_parts((tuple(a for group in named for a in group),))
        axes = None if named is None or result is None else _apply_move(symbolic, node, named, result)
        if axes is None or any(a.axis < 0 for group in axes for a in group):
            break
        views.append(merge_parts(axes))
    return views


def _rename_sizes(axes: Axes, shape: Shape) -> Axes | None:
    """The axes with the sizes of a shape; None where a size of 1 became another, or one of several atoms has another size."""
    if len(axes) != len(shape):
        return None
    renamed: list[tuple[AxisAtom, ...]] = []
    for group, size in zip(axes, shape, strict=True):
        if size_of(group) == size:
            renamed.append(group)
            continue
        if len(group) != 1 or ONE in (group[0].size, size):
            return None
        renamed.append((replace(group[0], size=size),))
    return tuple(renamed)
