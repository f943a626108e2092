# SPDX-License-Identifier: Apache-2.0
"""The one table of activations that StofSparseMLP computes: how graphs write them, their function bodies, their oracles.

plugins/core/base/activation.h has the same list for kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx

from stof.graph.index import GraphIndex, is_standard
from stof.graph.node_builder import Builder
from stof.graph.node_fields import attributes_of
from stof.sparse_mlp.activation_nodes import ActivationReader, is_known
from stof.symbolic import Symbolic

# Functions of one value that the operator does not compute: their results are the gate.
_OTHERS = frozenset({"HardSwish", "Mish", "QuickGelu", "Swish"})


@dataclass(frozen=True)
class Activation:
    """An activation.

    Attributes:
        read: the tensor in front of it, of the node that gives its result, in every form that exporters write; None: the
            node gives something else.
        emit: adds its nodes in standard ONNX, and returns their result. Constants are fp32, as its operand is. One that
            gives zeros has operands of all float types.
        compute: its results in NumPy, in the type of its operand.
        gives_zeros: whether results are exactly zero for negative arguments, so that such neurons are left out without a
            change.
    """

    read: Callable[[ActivationReader, onnx.NodeProto], str | None]
    emit: Callable[[Builder, str], str]
    compute: Callable[[np.ndarray], np.ndarray]
    gives_zeros: bool


def _read_relu(reader: ActivationReader, node: onnx.NodeProto) -> str | None:
    return node.input[0] if node.op_type == "Relu" and is_standard(node) else None


def _emit_relu(builder: Builder, gate: str) -> str:
    return builder.add("Relu", [gate])


def _compute_relu(gate: np.ndarray) -> np.ndarray:
    return np.asarray(np.maximum(gate, gate.dtype.type(0)))


def _read_relu2(reader: ActivationReader, node: onnx.NodeProto) -> str | None:
    base = reader.read_square(node)
    return None if base is None else _read_relu(reader, base)


def _emit_relu2(builder: Builder, gate: str) -> str:
    positive = _emit_relu(builder, gate)
    return builder.add("Mul", [positive, positive])


def _compute_relu2(gate: np.ndarray) -> np.ndarray:
    positive = _compute_relu(gate)
    return np.asarray(positive * positive)


def _read_gelu(reader: ActivationReader, node: onnx.NodeProto) -> str | None:
    gate = reader.read_operand(node, "Gelu")
    if gate is not None and attributes_of(node).get("approximate", b"none") != b"tanh":
        return gate
    return reader.read_gelu(node, "gelu")


def _emit_gelu(builder: Builder, gate: str) -> str:
    scaled = builder.add("Mul", [gate, builder.constant(math.sqrt(0.5), np.float32)])
    return _emit_distribution(builder, gate, builder.add("Erf", [scaled]))


def _compute_gelu(gate: np.ndarray) -> np.ndarray:
    kind = gate.dtype.type
    bounded = _erf(gate * kind(math.sqrt(0.5))).astype(kind)
    return np.asarray(gate * kind(0.5) * (kind(1) + bounded))


def _read_gelu_tanh(reader: ActivationReader, node: onnx.NodeProto) -> str | None:
    gate = reader.read_operand(node, "Gelu", "FastGelu")
    if gate is not None and (node.op_type == "FastGelu" or attributes_of(node).get("approximate") == b"tanh"):
        return gate
    return reader.read_gelu(node, "gelu_tanh")


def _emit_gelu_tanh(builder: Builder, gate: str) -> str:
    b = builder
    square = b.add("Mul", [b.add("Mul", [gate, gate]), b.constant(0.044715, np.float32)])
    inner = b.add("Mul", [gate, b.add("Add", [square, b.constant(1, np.float32)])])
    scaled = b.add("Mul", [inner, b.constant(math.sqrt(2 / math.pi), np.float32)])
    return _emit_distribution(b, gate, b.add("Tanh", [scaled]))


def _compute_gelu_tanh(gate: np.ndarray) -> np.ndarray:
    kind = gate.dtype.type
    inner = kind(math.sqrt(2 / math.pi)) * (gate + kind(0.044715) * gate * gate * gate)
    return np.asarray(gate * kind(0.5) * (kind(1) + np.tanh(inner)))


def _emit_distribution(builder: Builder, gate: str, bounded: str) -> str:
    """Adds gate · (1 + bounded) / 2, where ``bounded`` is from -1 to 1."""
    half = builder.add("Mul", [gate, builder.constant(0.5, np.float32)])
    return builder.add("Mul", [half, builder.add("Add", [bounded, builder.constant(1, np.float32)])])


_erf = np.vectorize(math.erf, otypes=[np.float64])


def _read_silu(reader: ActivationReader, node: onnx.NodeProto) -> str | None:
    gate = reader.read_operand(node, "QuickGelu", "Swish")
    default = 1.702 if node.op_type == "QuickGelu" else 1.0
    if gate is not None and attributes_of(node).get("alpha", default) == 1.0:
        return gate
    return reader.read_product(node, "Sigmoid")


def _emit_silu(builder: Builder, gate: str) -> str:
    return builder.add("Mul", [gate, builder.add("Sigmoid", [gate])])


def _compute_silu(gate: np.ndarray) -> np.ndarray:
    return np.asarray(gate / (gate.dtype.type(1) + np.exp(-gate)))


# By the names of attribute ``activation``, in the order of the library; tests/sparse_mlp/test_activations.py compares them.
ACTIVATIONS = {
    "none": Activation(lambda reader, node: None, lambda builder, gate: gate, lambda gate: gate, gives_zeros=False),
    "relu": Activation(_read_relu, _emit_relu, _compute_relu, gives_zeros=True),
    "relu2": Activation(_read_relu2, _emit_relu2, _compute_relu2, gives_zeros=True),
    "gelu": Activation(_read_gelu, _emit_gelu, _compute_gelu, gives_zeros=False),
    "gelu_tanh": Activation(_read_gelu_tanh, _emit_gelu_tanh, _compute_gelu_tanh, gives_zeros=False),
    "silu": Activation(_read_silu, _emit_silu, _compute_silu, gives_zeros=False),
}


def find_activation(name: str) -> Activation:
    """The activation of a name.

    Raises:
        ValueError: for a name that is none of ``ACTIVATIONS``.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"the activation is {name!r}, expected one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_activation(index: GraphIndex, symbolic: Symbolic, tensor: str) -> tuple[str, str] | None:
    """The tensor in front of the activation that gives ``tensor``, and its name in docs/reference/sparse-mlp.md.

    Of an activation that the operator does not compute it is ``tensor`` itself with ``none``. None: there is no activation.
    """
    node = index.producer(tensor)
    if node is None or not node.input:
        return None
    reader = ActivationReader(index, symbolic)
    for name, activation in ACTIVATIONS.items():
        if (gate := activation.read(reader, node)) is not None:
            return gate, name
    is_other = node.op_type in _OTHERS and is_known(node)
    return (tensor, "none") if is_other else None


def read_activation_with_zeros(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto) -> tuple[str, str] | None:
    """Likewise of the node that gives a tensor, where the activation gives zeros; None: there is no such one."""
    reader = ActivationReader(index, symbolic)
    for name, activation in ACTIVATIONS.items():
        if activation.gives_zeros and (gate := activation.read(reader, node)) is not None:
            return gate, name
    return None
