# SPDX-License-Identifier: Apache-2.0
"""Recognizes the activations that StofSparseMLP computes, as one node or as the primitives that exporters write."""

from __future__ import annotations

import onnx

from stof.fusion.gelu import match_gelu
from stof.graph.index import GraphIndex, is_standard
from stof.graph.node_fields import attributes_of
from stof.symbolic import Symbolic

# Functions of one value that the operator does not compute: their results are the gate.
_OTHERS = frozenset({"HardSwish", "Mish", "QuickGelu", "Swish"})
_TERMS = {"Add": "add", "Div": "div", "Erf": "erf", "Mul": "mul", "Pow": "pow", "Tanh": "tanh"}
_MOST_TERMS = 64
_DEPTH = 12  # operators of a GELU that stand behind each other
_MICROSOFT = "com.microsoft"


def read_activation(index: GraphIndex, symbolic: Symbolic, tensor: str) -> tuple[str, str] | None:
    """The tensor in front of the activation that gives ``tensor``, and its name in docs/reference/sparse-mlp.md.

    Of an activation that the operator does not compute it is ``tensor`` itself with ``none``. None: there is no activation.
    """
    node = index.producer(tensor)
    if node is None or not node.input:
        return None
    if (activation := _read_single(index, symbolic, node)) is not None:
        return activation
    if node.op_type == "Mul" and is_standard(node):
        return _read_silu(index, node) or _read_gelu(index, symbolic, node)
    if node.op_type in _OTHERS and (is_standard(node) or node.domain == _MICROSOFT):
        return tensor, "none"
    return None


def read_relu(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto) -> tuple[str, str] | None:
    """The tensor in front of Relu, or of its square, with ``relu`` or ``relu2``; None where a node is the end of neither."""
    if not is_standard(node):
        return None
    if node.op_type == "Relu":
        return node.input[0], "relu"
    base = index.producer(node.input[0]) if node.input else None
    is_square = node.op_type == "Mul" and node.input[0] == node.input[1]
    is_square |= node.op_type == "Pow" and symbolic.uniform(node.input[1]) == 2.0
    if is_square and base is not None and is_standard(base) and base.op_type == "Relu":
        return base.input[0], "relu2"
    return None


def _read_single(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto) -> tuple[str, str] | None:
    """Activations that are a node or, of Relu, its square."""
    if (relu := read_relu(index, symbolic, node)) is not None:
        return relu
    values = attributes_of(node)
    is_single = len([t for t in node.input if t]) == 1  # FastGelu may add a bias
    if not is_single or not (is_standard(node) or node.domain == _MICROSOFT):
        return None
    if node.op_type == "Gelu":
        is_tanh = values.get("approximate", b"none") == b"tanh"
        return node.input[0], "gelu_tanh" if is_tanh else "gelu"
    if node.op_type == "FastGelu":
        return node.input[0], "gelu_tanh"
    default = 1.702 if node.op_type == "QuickGelu" else 1.0
    if node.op_type in ("QuickGelu", "Swish") and values.get("alpha", default) == 1.0:
        return node.input[0], "silu"
    return None


def _read_silu(index: GraphIndex, node: onnx.NodeProto) -> tuple[str, str] | None:
    """The SiLU of x: x · Sigmoid(x)."""
    for x, other in (tuple(node.input), tuple(node.input)[::-1]):
        factor = index.producer(other)
        if factor is not None and factor.op_type == "Sigmoid" and is_standard(factor) and factor.input[0] == x:
            return x, "silu"
    return None


def _read_gelu(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto) -> tuple[str, str] | None:
    pool = _Terms(index, symbolic)
    left, right = (pool.add(t, _DEPTH) for t in node.input)
    is_half = symbolic.dtype(node.output[0]) == onnx.TensorProto.FLOAT16
    gelu = match_gelu(pool.terms, (left, right), is_half)
    return None if gelu is None else (pool.tensors[gelu[1]], gelu[0])


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
