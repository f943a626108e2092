# SPDX-License-Identifier: Apache-2.0
"""Reads the nodes that end activations: single ones, squares, and GELU as the primitives that exporters write."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from stof.fusion.gelu import match_gelu
from stof.graph.index import GraphIndex, is_standard
from stof.symbolic import Symbolic

_TERMS = {"Add": "add", "Div": "div", "Erf": "erf", "Mul": "mul", "Pow": "pow", "Tanh": "tanh"}
_MOST_TERMS = 64
_DEPTH = 12  # operators of a GELU that stand behind each other
_MICROSOFT = "com.microsoft"


@dataclass(frozen=True)
class ActivationReader:
    """Reads nodes of a graph that may end an activation."""

    index: GraphIndex
    symbolic: Symbolic

    def read_operand(self, node: onnx.NodeProto, *op_types: str) -> str | None:
        """What a node of one of these types reads, of the standard domain or ONNX Runtime's; None where it reads more."""
        is_single = len([t for t in node.input if t]) == 1  # FastGelu may add a bias
        return node.input[0] if node.op_type in op_types and is_single and is_known(node) else None

    def read_square(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The node whose result a node squares; None where it squares nothing."""
        if not is_standard(node):
            return None
        is_square = node.op_type == "Mul" and node.input[0] == node.input[1]
        is_square |= node.op_type == "Pow" and self.symbolic.uniform(node.input[1]) == 2.0
        return self.index.producer(node.input[0]) if is_square else None

    def read_product(self, node: onnx.NodeProto, op_type: str) -> str | None:
        """The x of a product x · f(x), where f is a standard operator; None where a node is no such product."""
        if node.op_type != "Mul" or not is_standard(node):
            return None
        sides: list[str] = list(node.input)
        for x, other in (sides, sides[::-1]):
            factor = self.index.producer(other)
            if factor is not None and factor.op_type == op_type and is_standard(factor) and factor.input[0] == x:
                return x
        return None

    def read_gelu(self, node: onnx.NodeProto, name: str) -> str | None:
        """The x of ``gelu`` or ``gelu_tanh`` written as primitives; None where a node does not end it."""
        if node.op_type != "Mul" or not is_standard(node):
            return None
        pool = _Terms(self.index, self.symbolic)
        left, right = (pool.add(t, _DEPTH) for t in node.input)
        is_half = self.symbolic.dtype(node.output[0]) == onnx.TensorProto.FLOAT16
        gelu = match_gelu(pool.terms, (left, right), is_half)
        return None if gelu is None or gelu[0] != name else pool.tensors[gelu[1]]


def is_known(node: onnx.NodeProto) -> bool:
    """Whether a node is of the standard domain or ONNX Runtime's."""
    return is_standard(node) or node.domain == _MICROSOFT


class _Terms:
    """The expression behind a tensor as terms that :func:`stof.fusion.gelu.match_gelu` reads."""

    def __init__(self, index: GraphIndex, symbolic: Symbolic) -> None:
        self._index, self._symbolic = index, symbolic
        self.terms: list[tuple[str, tuple[object, ...]]] = []
        self.tensors: list[str] = []
        self._numbers: dict[str, int] = {}

    def add(self, tensor: str, depth: int) -> int:
        """The number of a tensor's term."""
        if tensor in self._numbers:
            return self._numbers[tensor]
        term: tuple[str, tuple[object, ...]] = ("value", (tensor,))
        node = self._index.producer(tensor)
        number = self._symbolic.uniform(tensor)
        if number is not None:
            term = ("num", (float(number),))
        elif node is not None and is_standard(node) and node.op_type in _TERMS and depth and self._has_room():
            term = (_TERMS[node.op_type], tuple(self.add(t, depth - 1) for t in node.input))
        self._numbers[tensor] = len(self.terms)
        self.terms.append(term)
        self.tensors.append(tensor)
        return self._numbers[tensor]

    def _has_room(self) -> bool:
        return len(self.terms) < _MOST_TERMS
