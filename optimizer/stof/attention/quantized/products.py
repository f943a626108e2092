# SPDX-License-Identifier: Apache-2.0
"""Matmuls of two tensors that the graph computes, in float, in QOperator form and with MatMulInteger."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from stof.attention.quantized.parameters import QuantizedConstants, quantizer_of
from stof.graph.index import GraphIndex, is_standard
from stof.mask.roundings import Quantizer


@dataclass(frozen=True)
class QuantizedProduct:
    """A matmul of two computed tensors.

    Attributes:
        node: the node that writes the result.
        left: a float tensor, or codes.
        right: likewise.
        quantizers: of both, where they are codes.
        rounds: of the result, where that is codes.
    """

    node: onnx.NodeProto
    left: str
    right: str
    quantizers: tuple[Quantizer, Quantizer] | None = None
    rounds: Quantizer | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether it multiplies codes."""
        return self.quantizers is not None


def match_product(
    index: GraphIndex, constants: QuantizedConstants, node: onnx.NodeProto | None
) -> QuantizedProduct | None:
    """The product of two computed tensors whose result a node writes; None where it writes none."""
    found = None
    if node is None or not is_standard(node):
        return None
    if node.op_type == "MatMul":
        found = QuantizedProduct(node, node.input[0], node.input[1])
    elif node.op_type == "QLinearMatMul" and len(node.input) == 8:
        quantizers = quantizer_of(node, 1), quantizer_of(node, 4)
        found = QuantizedProduct(node, node.input[0], node.input[3], quantizers, quantizer_of(node, 6))
    elif node.op_type == "Mul":
        found = _match_integer_product(index, node)
    if found is None or any(map(constants.is_constant, (found.left, found.right))):
        return None
    return found if all(map(constants.is_per_tensor, found.quantizers or ())) else None


def _match_integer_product(index: GraphIndex, node: onnx.NodeProto) -> QuantizedProduct | None:
    """MatMulInteger of two dynamically quantized tensors, cast to float and multiplied by the product of their scales."""
    for i in (0, 1):
        cast, scale = (index.producer(n) for n in (node.input[i], node.input[1 - i]))
        integer = None if cast is None or cast.op_type != "Cast" else index.producer(cast.input[0])
        if scale is None or scale.op_type != "Mul" or integer is None or integer.op_type != "MatMulInteger":
            continue
        sources = [index.producer(n) for n in integer.input[:2]]
        if len(integer.input) != 4 or any(s is None or s.op_type != "DynamicQuantizeLinear" for s in sources):
            continue
        left, right = (s for s in sources if s is not None)
        written = [(s.output[0], s.output[2]) for s in (left, right)]
        read = [(integer.input[0], integer.input[2]), (integer.input[1], integer.input[3])]
        if written != read or sorted(scale.input) != sorted((left.output[1], right.output[1])):
            continue
        quantizers = Quantizer(left.output[1], left.output[2]), Quantizer(right.output[1], right.output[2])
        return QuantizedProduct(node, integer.input[0], integer.input[1], quantizers)
    return None
