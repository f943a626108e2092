# SPDX-License-Identifier: Apache-2.0
"""Mask expressions as standard ONNX nodes, for function bodies and for generated tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from stof.errors import ModelError
from stof.graph.node_builder import Builder
from stof.mask.expression_nodes import (
    INDICES,
    SIZES,
    B,
    Binary,
    Call,
    Constant,
    H,
    K,
    Lookup,
    Name,
    Node,
    Truth,
    Unary,
    fold,
    in_order,
)

_OPERATORS = {
    "and": "And",
    "or": "Or",
    "<": "Less",
    "<=": "LessOrEqual",
    ">": "Greater",
    ">=": "GreaterOrEqual",
    "==": "Equal",
    "+": "Add",
    "-": "Sub",
    "*": "Mul",
    "%": "Mod",  # of integers it takes the divisor's sign, as ours does
}
_KEY_PADDING = Lookup("pad", (B, K))


@dataclass(frozen=True)
class ScoreSizes:
    """Names of int64 scalars: the sizes of the scores [B, H, S, T], and the past length P."""

    B: str
    H: str
    S: str
    T: str
    P: str


def emit_mask(
    builder: Builder,
    root: Node,
    sizes: ScoreSizes,
    operands: Mapping[str, str],
    *,
    tables_have_rank: bool = False,
    is_condition: bool = True,
) -> str:
    """Nodes that compute a condition as booleans that broadcast to [B, H, S, T]; returns the tensor's name.

    Without ``is_condition`` the root is an integer, and so is the result, int64.
    ``tables_have_rank``: every table is a tensor of as many axes as the expression has indices for it. Then axes stay apart
    where they can. A function body has slots, which other calls fill with tensors of any rank.

    Raises:
        ModelError: when an operand is missing.
    """
    # The padding vector gets its axes by one Unsqueeze, without indices.
    emitter = _Emitter(builder, sizes, operands, tables_have_rank, _boolean_tables(root, is_condition))
    return fold(root, emitter.emit, lambda node: node == _KEY_PADDING)


def _boolean_tables(root: Node, is_condition: bool) -> frozenset[str]:
    """The tables whose elements stand where a condition does."""
    condition_nodes = [root] if is_condition else []
    for node in in_order(root):
        if isinstance(node, Unary | Binary) and node.symbol in ("and", "or", "not"):
            condition_nodes += node.children
    return frozenset(node.name for node in condition_nodes if isinstance(node, Lookup) and node.is_table)


def _is_natural(node: Node) -> bool:
    """Whether an integer is shown to be at least 0 by its form alone: sizes and indices are."""

    def combine(part: Node, sides: Sequence[bool]) -> bool:
        match part:
            case Constant(value=value):
                return value >= 0
            case Name():
                return True
            case Binary(symbol="+" | "*"):
                return all(sides)
            case Binary(symbol="//", right=Constant(value=divisor)):
                return sides[0] and divisor > 0
            case Binary(symbol="%", right=Constant(value=divisor)):
                return divisor > 0
            case Call(name="abs"):
                return True
            case Call(name="max"):
                return any(sides)
            case Call(name="min"):
                return all(sides)
        return False

    return fold(node, combine)


class _Emitter:
    def __init__(
        self,
        builder: Builder,
        sizes: ScoreSizes,
        operands: Mapping[str, str],
        tables_have_rank: bool,
        boolean_tables: frozenset[str],
    ) -> None:
        self.tables_have_rank = tables_have_rank
        self.boolean_tables = boolean_tables
        self.builder = builder
        self.sizes = sizes
        self.operands = operands
        self.ranges: dict[str, str] = {}  # indices as tensors

    def emit(self, node: Node, inputs: Sequence[str]) -> str:
        """The tensor of a node, from those of its children."""
        builder = self.builder
        match node:
            case Constant():
                return builder.constant(node.value)
            case Truth():
                return builder.constant(node.value, np.bool_)
            case Name():
                return self.index(node.name)
            case Unary():
                return builder.add("Not" if node.symbol == "not" else "Neg", inputs)
            case Binary():
                return self.binary(node, inputs)
            case Call():
                return builder.add(node.name.capitalize(), inputs)
            case Lookup():
                return self.lookup(node, inputs)
        raise AssertionError(node)

    def binary(self, node: Binary, inputs: Sequence[str]) -> str:
        symbol = node.symbol
        if symbol == "!=":
            return self.builder.add("Not", [self.builder.add("Equal", inputs)])
        if symbol == "//" and _is_natural(node):
            return self.builder.add("Div", inputs)
        if symbol == "//":  # integer Div truncates; without the remainder it is exact
            rest = self.builder.add("Mod", inputs)
            return self.builder.add("Div", [self.builder.add("Sub", [inputs[0], rest]), inputs[1]])
        return self.builder.add(_OPERATORS[symbol], inputs)

    def index(self, name: str) -> str:
        if name in SIZES:
            return str(getattr(self.sizes, name))
        if name not in self.ranges:
            self.ranges[name] = self.range(name)
        return self.ranges[name]

    def range(self, name: str) -> str:
        """All values of an index, with axes that broadcast to the scores."""
        builder = self.builder
        limit, axes = {
            "b": (self.sizes.B, [1, 2, 3]),
            "h": (self.sizes.H, [1, 2]),
            "q": (self.sizes.S, [1]),
            "k": (self.sizes.T, [0]),
        }[name]
        result = builder.add("Range", [builder.constant(0), limit, builder.constant(1)])
        if name == "q":
            result = builder.add("Add", [result, self.sizes.P])
        return builder.unsqueeze(result, axes)

    def lookup(self, node: Lookup, indices: Sequence[str]) -> str:
        builder = self.builder
        if node.name not in self.operands:
            raise ModelError(f"mask expression reads {node.name!r}, which is no operand")
        tensor = self.operands[node.name]
        # Slots of a function body hold tensors of other types for other calls, and runtimes infer types in every branch.
        is_condition = node.is_padding or node.name in self.boolean_tables
        tensor = builder.add("Cast", [tensor], to=TensorProto.BOOL if is_condition else TensorProto.INT64)
        if node == _KEY_PADDING:
            return builder.unsqueeze(tensor, [1, 2])
        shape = builder.add("Shape", [tensor])
        sizes = [builder.add("Gather", [shape, builder.constant(axis)]) for axis in range(len(indices))]
        positions = [
            # An axis of size 1 serves every batch or head.
            builder.add("Min", [position, builder.add("Sub", [size, builder.constant(1)])])
            if index in (B, H)
            else position
            for position, size, index in zip(indices, sizes, node.indices, strict=True)
        ]
        axes = _separate_axes(node) if self.tables_have_rank else None
        if axes is not None:
            return self.gather_each_axis(tensor, positions, axes)
        flat = positions[0]
        for position, size in zip(positions[1:], sizes[1:], strict=True):
            flat = builder.add("Add", [builder.add("Mul", [flat, size]), position])
        vector = builder.add("Reshape", [tensor, builder.constant([-1])])
        return builder.add("Gather", [vector, flat])

    def gather_each_axis(self, tensor: str, positions: Sequence[str], axes: Sequence[int | None]) -> str:
        """The elements of a tensor of which each axis is indexed by b, h, q or k alone, in that order, or by a number."""
        builder = self.builder
        for axis in reversed(range(len(positions))):
            position = positions[axis]
            if axes[axis] is not None:
                position = builder.add("Reshape", [position, builder.constant([-1])])
            tensor = builder.add("Gather", [tensor, position], axis=axis)
        used_axes = [axis for axis in axes if axis is not None]
        missing = (
            [a - used_axes[0] for a in range(used_axes[0], len(INDICES)) if a not in used_axes] if used_axes else []
        )
        return builder.unsqueeze(tensor, missing) if missing else tensor


def _separate_axes(node: Lookup) -> list[int | None] | None:
    """For each index of a table the number of the one of b, h, q and k that it reads, ascending; None where it reads none.

    None in place of the list where an index reads several, or operands of the run, or where they do not ascend.
    """
    if not node.is_table:
        return None
    axes: list[int | None] = []
    for index in node.indices:
        parts = in_order(index)
        names = {part.name for part in parts if isinstance(part, Name) and part.name in INDICES}
        if len(names) > 1 or any(isinstance(part, Lookup) for part in parts):
            return None
        axes.append(INDICES.index(names.pop()) if names else None)
    used_axes = [axis for axis in axes if axis is not None]
    return axes if used_axes == sorted(set(used_axes)) else None
