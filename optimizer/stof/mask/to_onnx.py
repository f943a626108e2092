# SPDX-License-Identifier: Apache-2.0
"""Mask expressions as standard ONNX nodes, for function bodies and for generated tests.

The grammar of docs/reference/mask-format.md is a subset of Python's, so Python's parser reads it; every node kind that is
not in the grammar is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto

from stof.errors import ModelError
from stof.graph.node_builder import Builder

_COMPARE = {
    ast.Lt: "Less",
    ast.LtE: "LessOrEqual",
    ast.Gt: "Greater",
    ast.GtE: "GreaterOrEqual",
    ast.Eq: "Equal",
}


@dataclass(frozen=True)
class Sizes:
    """Names of int64 scalars."""

    B: str
    H: str
    S: str
    T: str
    P: str


def mask_nodes(builder: Builder, expression: str, sizes: Sizes, operands: Mapping[str, str]) -> str:
    """Nodes that compute the mask as booleans that broadcast to [B, H, S, T]; returns the tensor's name.

    ``operands`` maps roles (``pad``, ``table0``, ...) to tensors. Opset 13 or later.

    Raises:
        ModelError: when the text is outside the grammar.
    """
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, RecursionError, ValueError) as error:
        raise ModelError(f"mask expression {expression[:80]!r} does not parse: {error}") from None
    return _Emitter(builder, sizes, operands).visit(tree.body)


class _Emitter:
    def __init__(self, builder: Builder, sizes: Sizes, operands: Mapping[str, str]) -> None:
        self.builder = builder
        self.sizes = sizes
        self.operands = operands
        self.indices: dict[str, str] = {}

    def visit(self, node: ast.expr) -> str:
        match node:
            case ast.BoolOp():
                op = "And" if isinstance(node.op, ast.And) else "Or"
                result = self.visit(node.values[0])
                for value in node.values[1:]:
                    result = self.builder.add(op, [result, self.visit(value)])
                return result
            case ast.UnaryOp(op=ast.Not()):
                return self.builder.add("Not", [self.visit(node.operand)])
            case ast.UnaryOp(op=ast.USub()):
                return self.builder.add("Neg", [self.visit(node.operand)])
            case ast.Compare(ops=[op], comparators=[right]):
                return self.compare(op, self.visit(node.left), self.visit(right))
            case ast.BinOp():
                return self.binary(node)
            case ast.Constant(value=bool()):
                return self.builder.constant(node.value, np.bool_)
            case ast.Constant(value=int()):
                return self.builder.constant(node.value)
            case ast.Name():
                return self.index(node.id)
            case ast.Call(func=ast.Name(id=name)) if name in ("abs", "min", "max"):
                return self.builder.add(name.capitalize(), [self.visit(a) for a in node.args])
            case ast.Subscript(value=ast.Name(id=name)):
                axes = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                return self.lookup(name, axes)
        raise ModelError(f"mask expression holds {ast.dump(node)[:80]}, which is not in the grammar")

    def compare(self, op: ast.cmpop, left: str, right: str) -> str:
        if isinstance(op, ast.NotEq):
            return self.builder.add("Not", [self.builder.add("Equal", [left, right])])
        return self.builder.add(_COMPARE[type(op)], [left, right])

    def binary(self, node: ast.BinOp) -> str:
        left, right = self.visit(node.left), self.visit(node.right)
        match node.op:
            case ast.Add():
                return self.builder.add("Add", [left, right])
            case ast.Sub():
                return self.builder.add("Sub", [left, right])
            case ast.Mult():
                return self.builder.add("Mul", [left, right])
            case ast.Mod():  # integer Mod takes the divisor's sign, as ours does
                return self.builder.add("Mod", [left, right])
            case ast.FloorDiv():  # integer Div truncates; without the remainder it is exact
                rest = self.builder.add("Mod", [left, right])
                return self.builder.add("Div", [self.builder.add("Sub", [left, rest]), right])
        raise ModelError(f"mask expression holds operator {type(node.op).__name__}, which is not in the grammar")

    def index(self, name: str) -> str:
        if name in ("S", "T", "P"):
            return str(getattr(self.sizes, name))
        if name in self.indices:
            return self.indices[name]
        if name not in ("b", "h", "q", "k"):
            raise ModelError(f"mask expression reads {name!r}, expected b, h, q, k, S, T or P")
        limit, axes = {
            "b": (self.sizes.B, [1, 2, 3]),
            "h": (self.sizes.H, [1, 2]),
            "q": (self.sizes.S, [1]),
            "k": (self.sizes.T, [0]),
        }[name]
        builder = self.builder
        result = builder.add("Range", [builder.constant(0), limit, builder.constant(1)])
        if name == "q":
            result = builder.add("Add", [result, self.sizes.P])
        result = builder.unsqueeze(result, axes)
        self.indices[name] = result
        return result

    def lookup(self, name: str, axes: Sequence[ast.expr]) -> str:
        builder = self.builder
        if name not in self.operands:
            raise ModelError(f"mask expression reads {name!r}, which is no operand")
        tensor = self.operands[name]
        if name == "pad":
            tensor = builder.add("Cast", [tensor], to=TensorProto.BOOL)
        words = [a.id if isinstance(a, ast.Name) else "" for a in axes]
        if name == "pad" and words == ["b", "k"]:
            return builder.unsqueeze(tensor, [1, 2])
        if name.startswith("segment") or name == "lengths":
            tensor = builder.add("Cast", [tensor], to=TensorProto.INT64)
        shape = builder.add("Shape", [tensor])
        flat = ""
        for i, axis in enumerate(axes):
            size = builder.add("Gather", [shape, builder.constant(i)])
            position = self.visit(axis)
            if words[i] in ("b", "h"):  # an axis of size 1 serves every batch or head
                last = builder.add("Sub", [size, builder.constant(1)])
                position = builder.add("Min", [position, last])
            flat = builder.add("Add", [builder.add("Mul", [flat, size]), position]) if flat else position
        vector = builder.add("Reshape", [tensor, builder.constant([-1])])
        return builder.add("Gather", [vector, flat])
