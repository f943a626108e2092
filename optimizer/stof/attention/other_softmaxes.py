# SPDX-License-Identifier: Apache-2.0
"""Names a softmax that is no attention, or whose attention is quantized, in one sentence for the report.

Asked only after matching has failed: a layout or a mask that is not supported must not be called a classifier.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx

from stof.graph.index import GraphIndex, describe, is_standard
from stof.symbolic import Symbolic
from stof.symbolic.tensor import SMALL

_MOST_NODES = 64  # of a walk: scores are a few nodes away from their product
_PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "Einsum", "Conv", "FusedConv", "ConvTranspose", "ConvInteger"})
_QUANTIZED_PRODUCTS = frozenset({"MatMulInteger", "QLinearMatMul", "QGemm", "DynamicQuantizeMatMul", "QLinearConv"})
_HALF_QUANTIZED = frozenset({"MatMulNBits", "MatMulIntegerToFloat"})  # of a weight, with a float result
_QUANTIZES = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"})
_MOVES = frozenset({"Identity", "Cast", "Transpose", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split"})
_ELEMENTWISE = frozenset(
    {
        "Add",
        "Sub",
        "Mul",
        "Div",
        "Max",
        "Min",
        "Sum",
        "Neg",
        "Tanh",
        "Where",
        "Clip",
        "Relu",
        "Expand",
        "Gather",
        "BiasGelu",
    }
)
_WEIGHT_INPUTS = {"QLinearMatMul": (0, 3), "QGemm": (0, 3), "QLinearConv": (0, 3)}


@dataclass
class _Origins:
    """Where the scores of a softmax come from."""

    weights: list[str]  # constants that a product multiplies something computed with
    quantized: list[onnx.NodeProto]  # nodes by which the scores pass through integers
    constants: list[str]  # that are scores, or a part of them
    has_pairs: bool = False  # a product of two computed tensors, as of queries and keys
    has_others: bool = False  # inputs, and operators that say nothing


def explain_other_softmax(index: GraphIndex, symbolic: Symbolic, softmax: onnx.NodeProto) -> str | None:
    """Why a softmax is no attention that could be replaced; None where nothing speaks against it.

    Args:
        index: of the graph.
        symbolic: shapes of its tensors.
        softmax: a node that matching has refused.
    """
    shape = symbolic.shape(softmax.input[0])
    axis = next((a.i for a in softmax.attribute if a.name == "axis"), -1)
    found = _origins(index, symbolic, softmax.input[0])
    if shape and axis % len(shape) != len(shape) - 1:
        last = f"the softmax runs along axis {axis}, expected the last"
        kind = "classifier" if softmax.output[0] in index.outputs else "pooling"
        return last if found.has_pairs else f"no attention but a {kind}: {last}"
    if not found.has_pairs and not found.has_others:
        if found.weights:
            return f"no attention but a classifier: the scores are a product with the weight {found.weights[0]!r}"
        if found.constants:
            return f"no attention but learned weights: the scores are the constant {found.constants[0]!r}"
    if found.quantized and found.has_pairs:
        return (
            f"the scores are quantized by {describe(found.quantized[0])}; attention is replaced where its core is float"
        )
    if shape is not None and len(shape) < 3 and not found.has_pairs:
        return (
            f"no attention but a classifier: the scores are {'one vector' if len(shape) < 2 else 'rows of one matrix'}"
        )
    user = _quantizes_weights(index, softmax.output[0])
    if user is not None:
        return f"the attention weights are quantized by {describe(user)}; attention is replaced where its core is float"
    return None


def name_default_inputs(index: GraphIndex, softmax: onnx.NodeProto) -> str:
    """Words on the small initializers near a softmax that are also graph inputs; empty where there are none.

    A caller may override them, so that shapes, axes and scales which they hold are not known.
    """
    found: dict[str, None] = {}
    pending, seen = [*softmax.output, *softmax.input], set[str]()
    while pending and len(seen) < _MOST_NODES:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        tensor = index.initializers.get(name)
        if tensor is not None and name in index.inputs and math.prod(tensor.dims) <= SMALL:
            found[name] = None
        node = index.producer(name)
        pending.extend(node.input if node is not None else ())
        if name == softmax.output[0]:
            pending.extend(n for user in index.consumers(name) for n in (*user.input, *user.output))
    if not found:
        return ""
    first, *others = found
    if others:
        return (
            f"; the initializers {first!r} and {len(others)} more are among the graph's inputs, where a caller may override "
            "them: remove them from the inputs"
        )
    return f"; the initializer {first!r} is among the graph's inputs, where a caller may override it: remove it from the inputs"


def _quantizes_weights(index: GraphIndex, tensor: str) -> onnx.NodeProto | None:
    """The node that turns the weights into integers, where one does."""
    users = index.consumers(tensor)
    quantized = [n for n in users if n.op_type in _QUANTIZES]
    return quantized[0] if quantized and all(n.op_type in (*_QUANTIZES, "Shape") for n in users) else None


def _origins(index: GraphIndex, symbolic: Symbolic, tensor: str) -> _Origins:
    found = _Origins([], [], [])
    pending, seen = [tensor], set[str]()
    while pending:
        name = pending.pop(0)
        if name in seen:
            continue
        seen.add(name)
        node = index.producer(name)
        if _is_weight(index, symbolic, name):
            found.constants.append(name)
        elif node is None or len(seen) > _MOST_NODES:
            found.has_others = True
        elif node.op_type in _PRODUCTS | _QUANTIZED_PRODUCTS | _HALF_QUANTIZED:
            _read_product(index, symbolic, node, found)
        elif node.op_type in _QUANTIZES:
            found.quantized.append(node)
            pending.append(node.input[0])
        elif is_standard(node) and node.op_type in _MOVES:
            pending.append(node.input[0])
        elif is_standard(node) and node.op_type in _ELEMENTWISE:
            # A mask or a scale made from sizes and inputs says nothing of the scores.
            pending.extend(n for n in node.input if n and not _is_beside(index, symbolic, n))
        else:
            found.has_others = True
    return found


def _read_product(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto, found: _Origins) -> None:
    if node.op_type in _QUANTIZED_PRODUCTS:
        found.quantized.append(node)
    places = _WEIGHT_INPUTS.get(node.op_type, (0, 1))
    weights = [node.input[i] for i in places if i < len(node.input) and _is_weight(index, symbolic, node.input[i])]
    found.weights.extend(weights)
    found.has_pairs |= not weights


def _is_beside(index: GraphIndex, symbolic: Symbolic, tensor: str) -> bool:
    """Whether a tensor is a mask or a scale: a value of sizes and inputs, or a constant."""
    return symbolic.value(tensor) is not None or _is_weight(index, symbolic, tensor)


def _is_weight(index: GraphIndex, symbolic: Symbolic, tensor: str) -> bool:
    """Whether a tensor is a constant, also moved, cast or dequantized."""
    for _ in range(_MOST_NODES):
        node = index.producer(tensor)
        if node is None or node.op_type not in _MOVES | _QUANTIZES:
            break
        tensor = node.input[0]
    if node is not None:
        return node.op_type in ("Constant", "ConstantOfShape") or symbolic.constant(tensor) is not None
    return tensor in index.initializers
