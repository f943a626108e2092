# SPDX-License-Identifier: Apache-2.0
"""Matmuls with constant weights, as MLPs have them: their weights and biases, and parts of packed ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import onnx

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, is_standard
from stof.sparse_mlp.dequantize_linear import is_dequantized, is_plain_gemm, read_dequantized, read_integer_matmul
from stof.sparse_mlp.quantized import is_quantized_matmul, read_quantized
from stof.sparse_mlp.site import MlpWeight
from stof.symbolic import Symbolic


@dataclass(frozen=True)
class Matmul:
    """A node that multiplies a tensor by a constant weight.

    Attributes:
        node: the node that reads the weight.
        input: the tensor [..., K].
        output: the tensor [..., N] without a bias that another node adds.
    """

    node: onnx.NodeProto
    input: str
    output: str


@dataclass(frozen=True)
class Projection:
    """A tensor [..., F] that a matmul with its bias gives, or a part of what it gives.

    Attributes:
        tensor: the tensor.
        input: what the matmul multiplies.
        weight: the weight, cut to the part.
        node: the matmul.
    """

    tensor: str
    input: str
    weight: MlpWeight
    node: onnx.NodeProto


@dataclass(frozen=True)
class _Part:
    """A part of a tensor along its last axis."""

    tensor: str
    first: int
    count: int


class MatmulReader:
    """Reads the matmuls of a graph.

    Args:
        index: of the graph.
        symbolic: facts of its model.
    """

    def __init__(self, index: GraphIndex, symbolic: Symbolic) -> None:
        self.index, self.symbolic = index, symbolic

    def read(self, node: onnx.NodeProto | None) -> Matmul | None:
        """A node as a matmul by a constant; None where it is none."""
        if node is None or len(node.input) < 2:
            return None
        if node.op_type == "MatMulInteger" and is_standard(node):
            return self._read_integer(node)
        if is_dequantized(self.index, node):
            return Matmul(node, node.input[0], node.output[0])
        weight = self.constant(node.input[1])
        if weight is None:
            return None
        if is_quantized_matmul(node):
            return Matmul(node, node.input[0], node.output[0]) if len(weight.dims) == 3 else None
        if not is_standard(node) or node.op_type not in ("MatMul", "Gemm") or len(weight.dims) != 2:
            return None
        return Matmul(node, node.input[0], node.output[0]) if is_plain_gemm(node) else None

    def behind(self, tensor: str) -> Matmul | None:
        """The matmul that gives a tensor or a whole that the tensor is a part of, perhaps with a bias."""
        part = self._part_of(tensor)
        node = self.index.producer(tensor if part is None else part.tensor)
        if node is not None and is_standard(node) and node.op_type == "Add":
            inner = [t for t in node.input if not self.is_vector(t)]
            node = self.index.producer(inner[0]) if len(inner) == 1 else None
        if node is not None and node.op_type == "Mul":  # the scales of a MatMulInteger
            node = self._integer_behind(node)
        return self.read(node)

    def read_weight(self, matmul: Matmul, sums_over_neurons: bool) -> tuple[MlpWeight, str]:
        """The weight of a matmul with its bias, and the tensor behind the bias.

        Args:
            matmul: the matmul.
            sums_over_neurons: whether it sums over neurons; else it gives them.

        Raises:
            UnsupportedError: naming what the operator does not support.
        """
        weight, bias = self.read_factor(matmul, sums_over_neurons)
        if bias:
            if not self.is_vector(bias):
                raise UnsupportedError(f"its summand {bias!r} is no constant vector")
            return self._with_bias(weight, bias), matmul.output
        readers = self.index.consumers(matmul.output)
        is_only = len(readers) == 1 and not self.is_visible(matmul.output)
        if is_only and readers[0].op_type == "Add" and is_standard(readers[0]):
            other = [t for t in readers[0].input if t != matmul.output]
            if len(other) == 1 and self.is_vector(other[0]):
                return self._with_bias(weight, other[0]), readers[0].output[0]
        return weight, matmul.output

    def read_projection(self, tensor: str) -> Projection:
        """The matmul that gives a tensor of neurons.

        Raises:
            UnsupportedError: naming what is not supported.
        """
        matmul, part = self.behind(tensor), self._part_of(tensor)
        if matmul is None:
            raise UnsupportedError(f"no matmul by a constant gives {tensor!r}")
        weight, written = self.read_weight(matmul, sums_over_neurons=False)
        if written != (tensor if part is None else part.tensor):
            raise UnsupportedError(f"{tensor!r} is not the matmul with its bias alone")
        if part is not None:
            if part.first + part.count > weight.outer:
                raise UnsupportedError(f"{tensor!r} is cut beyond the {weight.outer} elements of {part.tensor!r}")
            weight = replace(weight, first=part.first, outer=part.count, whole=weight.outer)
        return Projection(tensor, matmul.input, weight, matmul.node)

    def read_factor(self, matmul: Matmul, sums_over_neurons: bool) -> tuple[MlpWeight, str]:
        """The weight of a matmul without its bias, and the bias that the node itself adds."""
        node = matmul.node
        if node.op_type == "MatMulInteger":
            return read_integer_matmul(self.index, node, matmul.output, sums_over_neurons), ""
        if is_dequantized(self.index, node):
            return read_dequantized(self.index, node, sums_over_neurons)
        if is_quantized_matmul(node):
            return read_quantized(node, self.index.initializers, self.index.inputs, sums_over_neurons)
        tensor = self.root(node.input[1])
        is_transposed = any(a.name == "transB" and a.i for a in node.attribute)
        inner, outer = (int(d) for d in self.index.initializers[tensor].dims)
        if is_transposed:
            inner, outer = outer, inner
        bias = node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""
        return MlpWeight(tensor, inner, outer, sums_over_neurons != is_transposed), bias

    def root(self, tensor: str) -> str:
        """The tensor that Identity nodes copy: tracers share equal constants so."""
        for _ in range(8):
            node = self.index.producer(tensor)
            if node is None or node.op_type != "Identity" or not is_standard(node):
                break
            tensor = node.input[0]
        return tensor

    def constant(self, tensor: str) -> onnx.TensorProto | None:
        """The initializer that a tensor is; None where it is none, or a caller may replace it."""
        name = self.root(tensor)
        return None if name in self.index.inputs else self.index.initializers.get(name)

    def is_vector(self, tensor: str) -> bool:
        """Whether a tensor is a constant with one axis."""
        stored = self.constant(tensor)
        return stored is not None and len(stored.dims) == 1

    def is_visible(self, tensor: str) -> bool:
        """Whether the graph's outputs or subgraphs read a tensor."""
        return tensor in self.index.outputs or tensor in self.index.captured

    def _with_bias(self, weight: MlpWeight, bias: str) -> MlpWeight:
        name = self.root(bias)
        elements = int(self.index.initializers[name].dims[0])
        if elements != weight.outer:
            raise UnsupportedError(f"its summand {name!r} has {elements} elements, expected {weight.outer}")
        return replace(weight, bias=name)

    def _part_of(self, tensor: str) -> _Part | None:
        """What a tensor is cut from by Split or Slice along the last axis; None where it is no part."""
        node = self.index.producer(tensor)
        if node is None or not is_standard(node) or node.op_type not in ("Slice", "Split"):
            return None
        shape, part_shape = self.symbolic.shape(node.input[0]), self.symbolic.shape(tensor)
        if not shape or not part_shape or len(part_shape) != len(shape):
            return None
        whole, count = shape[-1].constant, part_shape[-1].constant
        if whole is None or count is None:
            return None
        if node.op_type == "Split":
            axis = next((int(a.i) for a in node.attribute if a.name == "axis"), 0)
            sizes = [s[-1].constant if (s := self.symbolic.shape(o)) else None for o in node.output]
            if axis not in (-1, len(shape) - 1) or any(s is None for s in sizes) or sum(s or 0 for s in sizes) != whole:
                return None
            return _Part(node.input[0], sum(s or 0 for s in sizes[: list(node.output).index(tensor)]), count)
        numbers = [self._integer(t) for t in node.input[1:] if t]
        if len(numbers) < 3 or any(n is None for n in numbers):
            return None
        start, _, axis, step = (*(n or 0 for n in numbers), 1)[:4]
        if axis not in (-1, len(shape) - 1) or step != 1:
            return None
        return _Part(node.input[0], min(max(start + whole if start < 0 else start, 0), whole), count)

    def _integer(self, tensor: str) -> int | None:
        """A constant of one element."""
        values = self.symbolic.constant(tensor)
        if values is None or values.size != 1 or values.dtype.kind not in "iu":
            return None
        return int(values.reshape(-1)[0])

    def _read_integer(self, node: onnx.NodeProto) -> Matmul | None:
        """MatMulInteger of a tensor that DynamicQuantizeLinear quantizes, with the Mul that scales it."""
        weight = self.constant(node.input[1])
        if weight is None or len(weight.dims) != 2 or len(node.input) < 3:
            return None
        quantize = self.index.producer(node.input[0])
        is_dynamic = quantize is not None and quantize.op_type == "DynamicQuantizeLinear" and is_standard(quantize)
        if quantize is None or not is_dynamic or node.input[2] != quantize.output[2]:
            return None
        dequantized = [n for n in self.index.consumers(quantize.output[0]) if n.op_type == "DequantizeLinear"]
        dequantized = [n for n in dequantized if list(n.input) == list(quantize.output)]
        scaled = self._only_reader(node.output[0], "Cast")
        scaled = None if scaled is None else self._only_reader(scaled.output[0], "Mul")
        if not dequantized or scaled is None:
            return None
        return Matmul(node, dequantized[0].output[0], scaled.output[0])

    def _integer_behind(self, mul: onnx.NodeProto) -> onnx.NodeProto | None:
        for tensor in mul.input:
            cast = self.index.producer(tensor)
            if cast is not None and cast.op_type == "Cast" and is_standard(cast):
                node = self.index.producer(cast.input[0])
                if node is not None and node.op_type == "MatMulInteger":
                    return node
        return None

    def _only_reader(self, tensor: str, op: str) -> onnx.NodeProto | None:
        readers = self.index.consumers(tensor)
        is_only = len(readers) == 1 and not self.is_visible(tensor) and readers[0].op_type == op
        return readers[0] if is_only and is_standard(readers[0]) else None
