# SPDX-License-Identifier: Apache-2.0
"""Lifted expressions (docs/reference/mask-format.md) by Python's parser and NumPy: an evaluator apart from stof's own."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import numpy as np

_BINARY = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.FloorDiv: np.floor_divide,
    ast.Mod: np.mod,
}
_COMPARE = {
    ast.Lt: np.less,
    ast.LtE: np.less_equal,
    ast.Gt: np.greater,
    ast.GtE: np.greater_equal,
    ast.Eq: np.equal,
    ast.NotEq: np.not_equal,
}


def evaluate(text: str, sizes: Mapping[str, int], operands: Mapping[str, np.ndarray]) -> np.ndarray:
    """A printed mask as booleans [B, H, S, T]; ``operands`` by role, ``pad`` as booleans."""
    B, H, S, T, P = (sizes[x] for x in "BHSTP")
    names: dict[str, Any] = {x: np.int64(sizes[x]) for x in "STP"}
    for axis, (name, count) in enumerate([("b", B), ("h", H), ("q", S), ("k", T)]):
        names[name] = np.arange(count).reshape([-1 if a == axis else 1 for a in range(4)])
    names["q"] = names["q"] + P

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=x):
                return np.asarray(x)
            case ast.Name(id=name):
                return names[name]
            case ast.BoolOp(op=op, values=values):
                parts = [value(v) for v in values]
                result = parts[0]
                for part in parts[1:]:
                    result = result & part if isinstance(op, ast.And) else result | part
                return result
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return ~value(inner)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -value(inner)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return _COMPARE[type(op)](value(left), value(right))
            case ast.BinOp(left=left, op=op, right=right):
                return _BINARY[type(op)](value(left), value(right))  # type: ignore[index]
            case ast.Call(func=ast.Name(id=name), args=args):
                return {"abs": np.abs, "min": np.minimum, "max": np.maximum}[name](*map(value, args))
            case ast.Subscript(value=ast.Name(id=name), slice=index):
                table = operands[name]
                places = index.elts if isinstance(index, ast.Tuple) else [index]
                at = np.broadcast_arrays(*(value(p) for p in places))
                single = [
                    isinstance(p, ast.Name) and p.id in "bh" and n == 1
                    for p, n in zip(places, table.shape, strict=True)
                ]
                at = [np.zeros_like(a) if one else a for a, one in zip(at, single, strict=True)]
                assert all(a.min(initial=0) >= 0 for a in at), f"{name} is read at a negative index"
                return table[tuple(at)]
        raise AssertionError(f"{ast.dump(node)} is not in the grammar")

    result = value(ast.parse(text or "True", mode="eval").body)
    assert np.asarray(result).dtype == bool
    return np.broadcast_to(result, (B, H, S, T))
