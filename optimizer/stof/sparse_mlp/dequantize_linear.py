# SPDX-License-Identifier: Apache-2.0
"""Weights that DequantizeLinear or MatMulInteger read, as MatMulNBits stores the same values.

A value means (value - zero point) · scale. There is one scale for the tensor, for each output of the matmul, or for each block of
what the matmul sums over. Scales of a tensor or an output are repeated for blocks. Values of signed types are shifted by half of
their range with their zero points. Neither changes a matmul.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof.errors import UnsupportedError
from stof.graph.external_data import is_external, location_of, map_array
from stof.graph.index import GraphIndex, all_nodes, is_standard, node_tensors
from stof.graph.names import FreshNames
from stof.graph.node_fields import attributes_of
from stof.graph.protobuf import copy_with_nodes
from stof.sparse_mlp.limits import mlp_limits
from stof.sparse_mlp.site import DequantizeLinearForm, MlpWeight, Quantization

_BITS = {
    int(TensorProto.UINT8): 8,
    int(TensorProto.INT8): 8,
    int(TensorProto.UINT4): 4,
    int(TensorProto.INT4): 4,
}
_PLAIN_GEMM = {"alpha": 1.0, "beta": 1.0, "transA": 0}
_SIGNED = ("int8", "int4")  # types of NumPy


def is_dequantized(index: GraphIndex, node: onnx.NodeProto) -> bool:
    """Whether a node is a matmul whose weight is a DequantizeLinear of a constant, perhaps transposed."""
    return is_standard(node) and node.op_type in ("MatMul", "Gemm") and _dequantize(index, node) is not None


def is_plain_gemm(node: onnx.NodeProto) -> bool:
    """Whether a MatMul or Gemm scales neither its matmul nor its bias, and reads its first input as it is."""
    attributes = attributes_of(node)
    return all(attributes.get(name, value) == value for name, value in _PLAIN_GEMM.items())


def _dequantize(index: GraphIndex, node: onnx.NodeProto) -> tuple[onnx.NodeProto, bool] | None:
    """The DequantizeLinear of a matmul's weight, and whether its result is transposed."""
    if len(node.input) < 2 or not is_plain_gemm(node):
        return None
    is_transposed = any(a.name == "transB" and a.i for a in node.attribute)
    producer = index.producer(node.input[1])
    if producer is not None and producer.op_type == "Transpose" and is_standard(producer):
        if [list(a.ints) for a in producer.attribute] not in ([], [[1, 0]]):
            return None
        is_transposed, producer = not is_transposed, index.producer(producer.input[0])
    if (
        producer is None
        or producer.op_type != "DequantizeLinear"
        or not is_standard(producer)
        or len(producer.input) < 2
    ):
        return None
    values = index.initializers.get(producer.input[0])
    if values is None or values.name in index.inputs or len(values.dims) != 2 or values.data_type not in _BITS:
        return None
    return producer, is_transposed


def read_dequantized(index: GraphIndex, node: onnx.NodeProto, sums_over_neurons: bool) -> tuple[MlpWeight, str]:
    """The weight of a matmul of which :func:`is_dequantized`, and the bias that the node adds.

    Raises:
        UnsupportedError: naming what the operator does not support.
    """
    source = _dequantize(index, node)
    assert source is not None
    dequantize, is_transposed = source
    values = attributes_of(dequantize)
    axis, block = int(values.get("axis", 1)), int(values.get("block_size", 0))
    weight = _read(index, list(dequantize.input), axis, block, is_transposed, sums_over_neurons)
    return weight, node.input[2] if node.op_type == "Gemm" and len(node.input) > 2 else ""


def read_integer_matmul(index: GraphIndex, node: onnx.NodeProto, scaled: str, sums_over_neurons: bool) -> MlpWeight:
    """The weight of a MatMulInteger.

    Args:
        index: of the graph.
        node: the node.
        scaled: the node's sums times the scales of both factors.
        sums_over_neurons: whether it sums over neurons; else it gives them.

    Raises:
        UnsupportedError: naming what the operator does not support.
    """
    mul, quantize = index.producer(scaled), index.producer(node.input[0])
    assert mul is not None
    assert quantize is not None
    scales = [n for n in map(index.producer, mul.input) if n is not None and n.op_type == "Mul" and is_standard(n)]
    weight_scales = [t for n in scales for t in n.input if t != quantize.output[1]]
    if len(scales) != 1 or len(weight_scales) != 1 or weight_scales[0] not in index.initializers:
        raise UnsupportedError(f"the scale of {node.name!r} is not that of its input times a constant")
    zero = node.input[3] if len(node.input) > 3 else ""
    return _read(index, [node.input[1], weight_scales[0], zero], 1, 0, False, sums_over_neurons)


def _read(
    index: GraphIndex, inputs: list[str], axis: int, block: int, is_transposed: bool, sums_over_neurons: bool
) -> MlpWeight:
    """A weight from the inputs of DequantizeLinear."""
    values = index.initializers[inputs[0]]
    name = values.name
    rows, columns = (int(d) for d in values.dims)
    inner_axis = int(is_transposed)
    inner, outer = (columns, rows) if is_transposed else (rows, columns)
    axis = axis + 2 if axis < 0 else axis
    scales = index.initializers.get(inputs[1])
    zeros = index.initializers.get(inputs[2]) if len(inputs) > 2 and inputs[2] else None
    for what, tensor, is_required in (
        ("scale", scales, True),
        ("zero point", zeros, len(inputs) > 2 and bool(inputs[2])),
    ):
        if is_required and (tensor is None or tensor.name in index.inputs):
            raise UnsupportedError(f"the {what} of {name!r} is no constant")
    assert scales is not None
    count = int(np.prod(scales.dims, dtype=np.int64))
    if zeros is not None and (
        zeros.data_type != values.data_type or int(np.prod(zeros.dims, dtype=np.int64)) not in (1, count)
    ):
        raise UnsupportedError(f"the zero point of {name!r} has another type or shape than its values and scales")
    if block:
        if axis != inner_axis:
            raise UnsupportedError(f"{name!r} has blocks along its outputs, expected along what the matmul sums over")
        wanted = [int(d) for d in values.dims]
        wanted[axis] = -(-wanted[axis] // block)
        if list(scales.dims) != wanted:
            raise UnsupportedError(f"the scales of {name!r} have shape {list(scales.dims)}, expected {wanted}")
        if inner % block:
            raise UnsupportedError(f"{name!r} sums over {inner} elements, no multiple of its block_size {block}")
    elif count != 1 and (axis == inner_axis or count != outer):
        raise UnsupportedError(f"{name!r} has {count} scales, expected one for each of {outer} outputs")
    limits = mlp_limits()
    size = block or min(inner & -inner, limits.largest_block_size)
    if not limits.has_block_size(size):
        raise UnsupportedError(
            f"{name!r} sums over {inner} elements: no blocks of a power of two from {limits.smallest_block_size} to "
            f"{limits.largest_block_size} divide them"
        )
    form = DequantizeLinearForm(inner_axis, block == 0, _is_centered(values, zeros))
    quantization = Quantization(
        _BITS[values.data_type], size, scales.name, "" if zeros is None else zeros.name, 0, form
    )
    return MlpWeight(name, inner, outer, sums_over_neurons != is_transposed, "", quantization)


def _is_centered(values: onnx.TensorProto, zeros: onnx.TensorProto | None) -> bool:
    """Whether all zero points are the middle of the values of this type."""
    bits = _BITS[values.data_type]
    is_signed = values.data_type in (TensorProto.INT8, TensorProto.INT4)
    middle = 0 if is_signed else 1 << (bits - 1)
    if zeros is None:
        return is_signed
    return not is_external(zeros) and bool(np.all(numpy_helper.to_array(zeros).astype(np.int16) == middle))


def read_values(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """A constant as an array, with one value in an element also where two 4-bit ones share a byte.

    Raises:
        OSError: when its external data cannot be read.
    """
    if not is_external(tensor) or _BITS.get(tensor.data_type) != 4:
        return map_array(tensor, folder)
    where, count = location_of(tensor), int(np.prod(tensor.dims, dtype=np.int64))
    packed = np.memmap(folder / where.location, np.uint8, "r", where.offset, (-(-count // 2),))
    inline = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=packed.tobytes())
    values: np.ndarray = numpy_helper.to_array(inline)
    return values


@dataclass(frozen=True)
class BlockedArrays:
    """A quantized weight by output, one value in a byte: values [N, K], scales and zero points [N, K / block_size]."""

    values: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


def to_blocks(weight: MlpWeight, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None) -> BlockedArrays:
    """A weight in the form of DequantizeLinear as blocks of MatMulNBits.

    Args:
        weight: what the arrays belong to.
        values: its matrix.
        scales: of a tensor, its outputs or its blocks.
        zeros: likewise; None: 0.
    """
    q = weight.quantization
    assert q is not None
    assert q.dequantize_linear is not None
    outer = weight.whole or weight.outer
    blocks = weight.inner // q.block_size
    half = 1 << (q.bits - 1)
    is_signed = np.dtype(values.dtype).name in _SIGNED

    def to_unsigned(array: np.ndarray) -> np.ndarray:
        wide = array.astype(np.int16) + (half if is_signed else 0)
        return wide.astype(np.uint8)

    def by_output(array: np.ndarray) -> np.ndarray:
        if q.dequantize_linear is not None and q.dequantize_linear.is_uniform:
            return np.broadcast_to(array.reshape(-1, 1), (outer, blocks))
        return array if q.dequantize_linear is not None and q.dequantize_linear.inner_axis else array.T

    matrix = to_unsigned(np.asarray(values))
    zero_points = None
    if zeros is not None:
        # One zero point may stand beside many scales.
        zero_points = to_unsigned(
            np.broadcast_to(np.asarray(zeros).reshape(-1), (1,)) if zeros.size == 1 else np.asarray(zeros)
        )
        zero_points = (
            np.full((outer, blocks), zero_points.reshape(-1)[0]) if zero_points.size == 1 else by_output(zero_points)
        )
    else:
        zero_points = np.full((outer, blocks), half if is_signed else 0, np.uint8)
    if q.dequantize_linear.is_centered:
        zero_points = None
    matrix = matrix if q.dequantize_linear.inner_axis else matrix.T
    return BlockedArrays(np.ascontiguousarray(matrix), np.ascontiguousarray(by_output(np.asarray(scales))), zero_points)


def with_dequantized_tokens(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which a DequantizeLinear beside each MatMulInteger gives the real values of what that multiplies.

    StofSparseMLP reads them in its place. DynamicQuantizeLinear stays: its scale is that of the whole tensor, and zeros, which
    are always in its range, do not change it. Where nothing is quantized so, it is the model itself.
    """
    read = {n.input[0] for n in model.graph.node if n.op_type == "MatMulInteger" and is_standard(n)}
    quantized = {
        n.output[0]
        for n in model.graph.node
        if n.op_type == "DynamicQuantizeLinear" and is_standard(n) and len(n.output) == 3 and n.output[0] in read
    }
    if not quantized:
        return model
    names = FreshNames({t for n in all_nodes(model.graph.node) for t in (*node_tensors(n), n.name)})
    nodes = []
    for node in model.graph.node:
        nodes.append(node)
        if node.output and node.output[0] in quantized:
            name = names.make(f"{node.output[0]}/dequantized")
            nodes.append(helper.make_node("DequantizeLinear", list(node.output), [name], name=name))
    return copy_with_nodes(model, nodes)
