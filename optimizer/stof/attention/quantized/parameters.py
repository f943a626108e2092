# SPDX-License-Identifier: Apache-2.0
"""What quantized operators are told of their tensors: a scale and a zero point each; and which nodes round."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from stof.attention.move_paths import MOVES
from stof.graph.index import GraphIndex, domain_of, is_standard
from stof.graph.node_fields import input_of
from stof.mask.roundings import Quantizer, Steps

CONTRIB = "com.microsoft"
_QUANTIZES = frozenset({("", "QuantizeLinear"), (CONTRIB, "QuantizeLinear")})
_DEQUANTIZES = frozenset({("", "DequantizeLinear"), (CONTRIB, "DequantizeLinear")})
_KEEPS_CONSTANTS = frozenset({"QuantizeLinear", "DequantizeLinear", "Transpose", "Identity", "Cast", "Reshape"})
_MOST_DEPTH = 8
_MOST_MOVES = 24  # as of paths to operands


def describe_rounding(node: onnx.NodeProto) -> str:
    """A QuantizeLinear or DequantizeLinear for people, by its scale: the node may be one of the common form, not of the graph."""
    return f"{node.op_type} by {node.input[1]!r}"


def quantizer_of(node: onnx.NodeProto, first: int) -> Quantizer:
    """What inputs ``first`` and ``first + 1`` of a node say."""
    return Quantizer(input_of(node, first), input_of(node, first + 1))


def is_quantize(node: onnx.NodeProto) -> bool:
    """Whether a node rounds a float tensor by a scale that it is given."""
    return (domain_of(node), node.op_type) in _QUANTIZES


def is_dequantize(node: onnx.NodeProto) -> bool:
    """Whether a node makes floats of codes."""
    return (domain_of(node), node.op_type) in _DEQUANTIZES


def match_rounding_by_range(index: GraphIndex, node: onnx.NodeProto) -> tuple[onnx.NodeProto, Quantizer] | None:
    """The DequantizeLinear behind a DynamicQuantizeLinear, where all that reads that is this node."""
    if node.op_type != "DynamicQuantizeLinear" or len(node.output) != 3:
        return None
    readers = [index.consumers(o) for o in node.output]
    dequantize = readers[0][0] if readers[0] else None
    if dequantize is None or any(r != [dequantize] for r in readers) or not is_dequantize(dequantize):
        return None
    return (
        (dequantize, Quantizer(node.output[1], node.output[2])) if list(dequantize.input) == list(node.output) else None
    )


def match_rounding(index: GraphIndex, node: onnx.NodeProto) -> tuple[onnx.NodeProto, Quantizer] | None:
    """The QuantizeLinear before a DequantizeLinear, where both are of one scale: together they round."""
    if not is_dequantize(node):
        return None
    quantize = index.producer(node.input[0])
    if quantize is None or not is_quantize(quantize):
        return None
    quantizer = quantizer_of(node, 1)
    are_equal = QuantizedConstants(index).are_equal(quantizer_of(quantize, 1), quantizer)
    return (quantize, quantizer) if are_equal else None


def find_dequantize(index: GraphIndex, tensor: str) -> onnx.NodeProto | None:
    """The DequantizeLinear whose numbers a tensor has, perhaps moved; None where it has others."""
    for _ in range(_MOST_MOVES):
        node = index.producer(tensor)
        if node is None or is_dequantize(node):
            return node
        if not is_standard(node) or node.op_type not in MOVES:
            return None
        tensor = node.input[0]
    return None


class QuantizedConstants:
    """The constants of a graph: initializers, Constant nodes, and what is made of them alone."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index

    def array(self, tensor: str) -> np.ndarray | None:
        """A stored constant, the output of a Constant node, or its codes; None where it is neither, or lies in another file."""
        stored = self._index.initializers.get(tensor)
        if stored is not None and tensor not in self._index.inputs:
            return None if stored.data_location == onnx.TensorProto.EXTERNAL else numpy_helper.to_array(stored)
        node = self._index.producer(tensor)
        if node is not None and is_quantize(node):
            return self._codes(node)
        if node is None or node.op_type != "Constant":
            return None
        value = next((a.t for a in node.attribute if a.name == "value"), None)
        return None if value is None else numpy_helper.to_array(value)

    def _codes(self, node: onnx.NodeProto) -> np.ndarray | None:
        """The codes of a constant that a node quantizes."""
        numbers, steps = self.array(node.input[0]), self.steps(quantizer_of(node, 1))
        return None if numbers is None or steps is None else steps.quantize(numbers)

    def is_constant(self, tensor: str, depth: int = 0) -> bool:
        """Whether a tensor does not depend on inputs of the graph: a weight, perhaps quantized."""
        if tensor in self._index.initializers:
            return tensor not in self._index.inputs
        node = self._index.producer(tensor)
        if node is None or depth > _MOST_DEPTH:
            return False
        if node.op_type == "Constant":
            return True
        return node.op_type in _KEEPS_CONSTANTS and self.is_constant(node.input[0], depth + 1)

    def is_per_tensor(self, quantizer: Quantizer) -> bool:
        """Whether a scale is one number, for all elements."""
        if self.is_by_range(quantizer):
            return True
        scale = self.array(quantizer.scale)
        return scale is not None and scale.size == 1

    def is_by_range(self, quantizer: Quantizer) -> bool:
        """Whether a scale is found in the run, by the range of what is rounded."""
        node = self._index.producer(quantizer.scale)
        return node is not None and node.op_type == "DynamicQuantizeLinear"

    def are_equal(self, one: Quantizer, other: Quantizer) -> bool:
        """Whether two quantizers are the same function, so that a code of the one is a code of the other."""
        if one == other:
            return True
        pairs = ((self.array(one.scale), self.array(other.scale)), (self._zero_point(one), self._zero_point(other)))
        return all(
            a is not None and b is not None and a.dtype == b.dtype and a.size == b.size == 1 and a.item() == b.item()
            for a, b in pairs
        )

    def _zero_point(self, quantizer: Quantizer) -> np.ndarray | None:
        return self.array(quantizer.zero_point) if quantizer.zero_point else np.zeros((), np.uint8)

    def steps(self, quantizer: Quantizer) -> Steps | None:
        """The numbers of a quantizer to 8 bits; None where they are no constants, or of another type."""
        scale, point = self.array(quantizer.scale), None
        if quantizer.zero_point and (point := self.array(quantizer.zero_point)) is None:
            return None
        if scale is None or scale.size != 1 or (point is not None and point.dtype.name not in ("int8", "uint8")):
            return None
        return Steps.of(scale, point)
