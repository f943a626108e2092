# SPDX-License-Identifier: Apache-2.0
"""Weights of ONNX Runtime's MatMulNBits: how they are stored, and the same values by neuron.

Source: the operator's schema in ONNX Runtime 1.31. B is [N, ceil(K / block_size), block_size · bits / 8], two 4-bit values in a
byte, the first one in its low half; a value means (value - zero point) · scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto

from stof.errors import UnsupportedError
from stof.graph.node_fields import attributes_of
from stof.sparse_mlp.dequantize_linear import BlockedArrays, to_blocks
from stof.sparse_mlp.limits import mlp_limits
from stof.sparse_mlp.site import MlpWeight, Quantization

_OP, _DOMAIN = "MatMulNBits", "com.microsoft"
_INPUTS = ("A", "B", "scales", "zero_points", "g_idx", "bias")
_ATTRIBUTES = frozenset({"K", "N", "bits", "block_size", "accuracy_level", "weight_prepacked"})
_BITS = (4, 8)


def is_quantized_matmul(node: onnx.NodeProto) -> bool:
    """Whether a node is a MatMulNBits."""
    return node.domain == _DOMAIN and node.op_type == _OP


def read_quantized(
    node: onnx.NodeProto,
    stored: Mapping[str, onnx.TensorProto],
    inputs: Collection[str],
    sums_over_neurons: bool,
) -> tuple[MlpWeight, str]:
    """The weight of a MatMulNBits, and its bias.

    Args:
        node: the node.
        stored: the graph's initializers.
        inputs: the graph's inputs; a caller may replace initializers among them.
        sums_over_neurons: whether it sums over neurons; else it gives them.

    Raises:
        UnsupportedError: naming what the operator does not support.
    """
    values = attributes_of(node)
    if unknown := sorted(set(values) - _ATTRIBUTES):
        raise UnsupportedError(f"{node.name!r} has attribute {unknown[0]!r}, whose meaning is not known")
    if values.get("weight_prepacked", 0):
        raise UnsupportedError(f"the weight of {node.name!r} is packed for one kernel")
    tensors = {name: t for name, t in zip(_INPUTS, node.input, strict=False) if t}
    if "g_idx" in tensors:
        raise UnsupportedError(f"{node.name!r} permutes the rows of its weight (input g_idx)")
    inner, outer, bits, block = (int(values.get(k, d)) for k, d in (("K", 0), ("N", 0), ("bits", 4), ("block_size", 0)))
    limits = mlp_limits()
    if bits not in _BITS or not limits.has_block_size(block) or min(inner, outer) < 1:
        raise UnsupportedError(f"{node.name!r} has K {inner}, N {outer}, bits {bits}, block_size {block}")
    level = int(values.get("accuracy_level", 0))
    if not 0 <= level <= limits.most_accuracy_level:
        raise UnsupportedError(f"{node.name!r} has accuracy_level {level}, expected 0 to {limits.most_accuracy_level}")
    if inner % block:
        raise UnsupportedError(f"{node.name!r} sums over {inner} elements, no multiple of its block_size {block}")
    blocks = inner // block
    wanted = {"B": (TensorProto.UINT8, outer * blocks * block * bits // 8), "scales": (0, outer * blocks)}
    if "zero_points" in tensors:
        wanted["zero_points"] = (TensorProto.UINT8, outer * -(-blocks * bits // 8))
    for name, (dtype, elements) in wanted.items():
        tensor = stored.get(tensors.get(name, ""))
        if tensor is None or tensor.name in inputs:
            raise UnsupportedError(f"input {name} of {node.name!r} is no constant")
        if (dtype and tensor.data_type != dtype) or int(np.prod(tensor.dims, dtype=np.int64)) != elements:
            raise UnsupportedError(
                f"input {name} of {node.name!r} is {TensorProto.DataType.Name(tensor.data_type)} {list(tensor.dims)}, "
                f"expected {elements} elements{' of uint8' if dtype else ''}"
            )
    quantization = Quantization(bits, block, tensors["scales"], tensors.get("zero_points", ""), level)
    return MlpWeight(tensors["B"], inner, outer, not sums_over_neurons, "", quantization), tensors.get("bias", "")


@dataclass(frozen=True)
class QuantizedArrays:
    """A quantized weight by neuron, as docs/reference/sparse-mlp.md has it for ``down_weight``.

    Attributes:
        values: uint8 [F, ceil(N · bits / 8)].
        scales: [F / block_size, N].
        zero_points: uint8 [F / block_size, N]; None: 2^(bits - 1).
    """

    values: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray | None


def _unpack_weight(
    weight: MlpWeight, values: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None
) -> BlockedArrays:
    """The outputs of a weight that are meant."""
    q = weight.quantization
    assert q is not None
    blocks, whole = weight.inner // q.block_size, weight.whole or weight.outer
    taken = slice(weight.first, weight.first + weight.outer)
    if q.dequantize_linear is not None:
        blocked = to_blocks(weight, values, scales, zero_points)
        zeros = None if blocked.zero_points is None else blocked.zero_points[taken]
        return BlockedArrays(blocked.values[taken], blocked.scales[taken], zeros)
    zeros = None
    if zero_points is not None:
        zeros = unpack(zero_points.reshape(whole, -1)[taken], q.bits, blocks)
    numbers = unpack(values.reshape(whole, -1)[taken], q.bits, weight.inner)
    return BlockedArrays(numbers, scales.reshape(whole, blocks)[taken], zeros)


def regroup_by_neuron(
    weight: MlpWeight,
    values: np.ndarray,
    scales: np.ndarray,
    zero_points: np.ndarray | None,
    order: np.ndarray | None = None,
) -> QuantizedArrays:
    """The same values with those of a neuron, which the matmul sums over, beside each other.

    Args:
        weight: what the arrays belong to.
        values: B of the node.
        scales: of the node.
        zero_points: of the node.
        order: of the neurons, which keeps those of a block together; None: as they are.
    """
    q = weight.quantization
    assert q is not None
    blocked = _unpack_weight(weight, values, scales, zero_points)
    by_neuron, by_block = blocked.values.T, blocked.scales.T
    zeros = None if blocked.zero_points is None else blocked.zero_points.T
    if order is not None:
        blocks = order[:: q.block_size] // q.block_size
        by_neuron, by_block = by_neuron[order], by_block[blocks]
        zeros = None if zeros is None else zeros[blocks]
    zeros = None if zeros is None else np.ascontiguousarray(zeros)
    return QuantizedArrays(pack(np.ascontiguousarray(by_neuron), q.bits), np.ascontiguousarray(by_block), zeros)


def to_rows(
    weight: MlpWeight, values: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None
) -> QuantizedArrays:
    """The same values as MatMulNBits stores them, of a matmul that gives neurons.

    Returns:
        values [F, K / block_size, block_size · bits / 8], scales [F, K / block_size], zero points packed by row.
    """
    q = weight.quantization
    assert q is not None
    blocked = _unpack_weight(weight, values, scales, zero_points)
    zeros = None if blocked.zero_points is None else pack(blocked.zero_points, q.bits)
    shape = (weight.outer, weight.inner // q.block_size, q.block_size * q.bits // 8)
    packed = np.ascontiguousarray(pack(blocked.values, q.bits)).reshape(shape)
    return QuantizedArrays(packed, np.ascontiguousarray(blocked.scales), zeros)


def unpack(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """The first values [rows, count] of rows of packed ones, one in a byte."""
    if bits == 8:
        return packed[:, :count]
    unpacked = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    unpacked[:, ::2] = packed & 15
    unpacked[:, 1::2] = packed >> 4
    return unpacked[:, :count]


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Rows of values, one in a byte, packed; the last byte of a row may hold one."""
    if bits == 8:
        return values
    if values.shape[1] % 2:
        values = np.pad(values, ((0, 0), (0, 1)))
    packed: np.ndarray = values[:, ::2] | (values[:, 1::2] << 4)
    return packed


def dequantize(weight: MlpWeight, values: np.ndarray, scales: np.ndarray, zero_points: np.ndarray | None) -> np.ndarray:
    """The outputs of a quantized weight that are meant, as fp64 [K, N]."""
    q = weight.quantization
    assert q is not None
    blocked = _unpack_weight(weight, values, scales, zero_points)
    blocks = weight.inner // q.block_size
    zeros: np.ndarray = np.full((weight.outer, blocks), float(1 << (q.bits - 1)))
    if blocked.zero_points is not None:
        zeros = blocked.zero_points.astype(np.float64)
    grouped = blocked.values.astype(np.float64).reshape(weight.outer, blocks, q.block_size) - zeros[:, :, None]
    grouped *= blocked.scales.reshape(weight.outer, blocks, 1).astype(np.float64)
    dequantized: np.ndarray = grouped.reshape(weight.outer, weight.inner).T
    return dequantized


def with_equal_blocks(first: MlpWeight, second: MlpWeight) -> tuple[MlpWeight, MlpWeight]:
    """Two weights with one number of bits and one block size, which the operator has for all weights.

    A scale that is repeated for blocks may be repeated for smaller ones.

    Raises:
        UnsupportedError: where they differ otherwise.
    """
    weights = [first, second]
    kinds = [w.quantization for w in weights]
    if all(q is not None and q.bits == kinds[0].bits for q in kinds if kinds[0] is not None):
        sizes = [q.block_size for q in kinds if q is not None]
        for i, q in enumerate(kinds):
            if (
                q is not None
                and q.dequantize_linear is not None
                and q.dequantize_linear.is_uniform
                and q.block_size > min(sizes)
            ):
                weights[i] = replace(weights[i], quantization=replace(q, block_size=min(sizes)))
    words = []
    for weight in weights:
        q = weight.quantization
        words.append("not quantized" if q is None else f"int{q.bits} in blocks of {q.block_size}")
    if words[0] != words[1]:
        raise UnsupportedError(
            f"{first.tensor!r} is {words[0]} and {second.tensor!r} {words[1]}: they have to be alike"
        )
    return weights[0], weights[1]
