# SPDX-License-Identifier: Apache-2.0
"""Reads an Einsum as a batched MatMul: which axes of operands and result are batch, rows and columns."""

from __future__ import annotations

import string
from dataclasses import dataclass

import onnx

from stof.graph.einsum import read_equation, split_equation
from stof.graph.index import is_standard
from stof.symbolic import Symbolic

Order = tuple[int, ...]


@dataclass(frozen=True)
class EinsumMatmul:
    """An Einsum as ``left`` [.., R, C] times the transpose of ``right`` [.., K, C].

    The orders are permutations: ``left`` transposed by ``left_order`` is [.., R, C], and so on; the output transposed by
    ``result_order`` is [.., R, K].
    """

    left: str
    right: str
    left_order: Order
    right_order: Order
    result_order: Order


def einsum_matmuls(symbolic: Symbolic, node: onnx.NodeProto) -> list[EinsumMatmul]:
    """The ways to read a node as a batched MatMul, with either input on the left; [] when it is no such Einsum."""
    terms = _axis_letters(symbolic, node)
    if terms is None:
        return []
    return [p for first in (0, 1) for p in _matmuls_with_first(node, terms, first)]


def _axis_letters(symbolic: Symbolic, node: onnx.NodeProto) -> tuple[str, str, str] | None:
    """Letters of the two inputs and of the output, with an ellipsis replaced by letters."""
    if node.op_type != "Einsum" or not is_standard(node) or len(node.input) != 2:
        return None
    equation = read_equation(node)
    inputs, result = split_equation(equation)
    shapes = [symbolic.shape(i) for i in node.input]
    if result is None or len(inputs) != 2 or any(s is None for s in shapes):
        return None
    spare = [c for c in string.ascii_letters if c not in equation]
    extra = {len(s or ()) - len(t.replace("...", "")) for s, t in zip(shapes, inputs, strict=True) if "..." in t}
    if len(extra) > 1 or (extra and min(extra) < 0):
        return None
    dots = "".join(spare[: next(iter(extra), 0)])
    first, second, last = (t.replace("...", dots) for t in (*inputs, result))
    if any(len(set(t)) < len(t) for t in (first, second, last)):
        return None
    fits = all(len(t) == len(s or ()) for t, s in zip((first, second), shapes, strict=True))
    return (first, second, last) if fits else None


def _matmuls_with_first(node: onnx.NodeProto, terms: tuple[str, str, str], first: int) -> list[EinsumMatmul]:
    """The readings with input ``first`` on the left.

    Beside a batch of two axes there may be two row axes: one of them counts the query heads of a key head.
    """
    left, right, result = terms[first], terms[1 - first], terms[2]
    shared = set(left) & set(right)
    rows = [c for c in left if c not in shared]
    columns = [c for c in right if c not in shared]
    summed = [c for c in left if c in shared and c not in result]
    batch = [c for c in left if c in shared and c in result]
    shared_by_heads = len(rows) == len(batch) == 2
    if not (len(rows) == 1 or shared_by_heads) or (len(columns), len(summed)) != (1, 1):
        return []
    if set(result) != {*batch, *rows, *columns}:
        return []
    return [
        EinsumMatmul(
            node.input[first],
            node.input[1 - first],
            tuple(left.index(c) for c in (*batch, *order, *summed)),
            tuple(right.index(c) for c in (*batch, *columns, *summed)),
            tuple(result.index(c) for c in (*batch, *order, *columns)),
        )
        for order in ((rows, rows[::-1]) if shared_by_heads else (rows,))
    ]
