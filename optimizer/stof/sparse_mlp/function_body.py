# SPDX-License-Identifier: Apache-2.0
"""The function body of StofSparseMLP in standard ONNX: the dense MLP, whose idle neurons add zero.

It reads the weights in the operator's layout, so that a model holds them once. Several variants are branches of an If on
``mlp_id``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper

from stof.graph.index import DOMAIN
from stof.graph.node_builder import Builder
from stof.sparse_mlp.site import OP, OP_INPUTS, MlpSite

_MLP_ID = "mlp_id"


@dataclass(frozen=True)
class MlpVariant:
    """What the body of a call depends on."""

    activation: str
    has_up: bool
    has_up_bias: bool
    has_down_bias: bool
    dtype: int
    quantization: _Quantization | None = None

    @classmethod
    def of(cls, site: MlpSite) -> MlpVariant:
        """The variant of a site."""
        up_bias = site.up is not None and bool(site.up.bias)
        quantization = None if site.quantization is None else _Quantization.of(site)
        return cls(site.activation, site.up is not None, up_bias, bool(site.down.bias), site.dtype, quantization)

    def emit(self, builder: Builder) -> str:
        """Adds the nodes. Returns the output's tensor."""
        hidden = _activate(builder, self.activation)
        if self.has_up:
            factor = self._multiply_up(builder)
            factor = builder.add("Add", [factor, "up_bias"]) if self.has_up_bias else factor
            hidden = builder.add("Mul", [hidden, factor])
        weight = "down_weight"
        if self.quantization is not None:
            weight = self.quantization.dequantize_down(builder, self.dtype)
        output = builder.add("MatMul", [hidden, weight])
        return builder.add("Add", [output, "down_bias"]) if self.has_down_bias else output

    def _multiply_up(self, builder: Builder) -> str:
        if self.quantization is not None:
            return self.quantization.multiply_up(builder)
        weight = builder.add("Transpose", ["up_weight"], perm=[1, 0])
        return builder.add("MatMul", ["input", weight])


@dataclass(frozen=True)
class _Quantization:
    """What the body depends on where weights are quantized."""

    bits: int
    block_size: int
    accuracy_level: int
    neurons: int
    input_size: int
    output_size: int
    up_has_zeros: bool
    down_has_zeros: bool

    @classmethod
    def of(cls, site: MlpSite) -> _Quantization:
        q = site.quantization
        assert q is not None
        up = q if site.up is None or site.up.quantization is None else site.up.quantization
        has_zeros = site.up is not None and bool(up.zero_points)
        sizes = (site.neurons, site.input_size if site.up is not None else 0, site.output_size)
        return cls(q.bits, q.block_size, up.accuracy_level, *sizes, has_zeros, bool(q.zero_points))

    def multiply_up(self, builder: Builder) -> str:
        """The up matmul: MatMulNBits reads the same tensors."""
        inputs = ["input", "up_weight", "up_scales", *(["up_zero_points"] if self.up_has_zeros else [])]
        attributes = {"K": self.input_size, "N": self.neurons, "bits": self.bits, "block_size": self.block_size}
        return builder.add(
            "MatMulNBits", inputs, domain="com.microsoft", accuracy_level=self.accuracy_level, **attributes
        )

    def dequantize_down(self, builder: Builder, dtype: int) -> str:
        """The down weight [F, N]: (value - zero point) · scale, with a scale for each block of neurons."""
        values = "down_weight"
        if self.bits == 4:
            four = builder.constant(4, np.uint8)
            low = builder.add("BitShift", [values, four], direction="LEFT")
            low = builder.add("BitShift", [low, four], direction="RIGHT")
            high = builder.add("BitShift", [values, four], direction="RIGHT")
            pair = builder.add("Concat", [builder.unsqueeze(low, [2]), builder.unsqueeze(high, [2])], axis=2)
            values = builder.add("Reshape", [pair, builder.constant([self.neurons, -1])])
            if self.output_size % 2:
                values = builder.add("Slice", [values, *map(builder.constant, ([0], [self.output_size], [1]))])
        blocks = builder.constant([self.neurons // self.block_size, self.block_size, self.output_size])
        numbers = builder.add("Cast", [builder.add("Reshape", [values, blocks])], to=dtype)
        if self.down_has_zeros:
            zeros = builder.add("Cast", [builder.unsqueeze("down_zero_points", [1])], to=dtype)
        else:
            zeros = builder.add("Cast", [builder.constant(1 << (self.bits - 1), np.float32)], to=dtype)
        scaled = builder.add("Mul", [builder.add("Sub", [numbers, zeros]), builder.unsqueeze("down_scales", [1])])
        return builder.add("Reshape", [scaled, builder.constant([self.neurons, self.output_size])])


def _activate(builder: Builder, activation: str) -> str:
    if activation == "none":
        return "gate"
    positive = builder.add("Relu", ["gate"])
    return builder.add("Mul", [positive, positive]) if activation == "relu2" else positive


def make_mlp_function(
    variants: Sequence[MlpVariant], inputs: int, opset: int, contrib_version: int = 1
) -> onnx.FunctionProto:
    """The local function ``stof::StofSparseMLP`` for the variants of a model.

    Args:
        variants: distinct; ``mlp_id`` is the index.
        inputs: the number of inputs that calls have at most.
        opset: of the standard domain.
        contrib_version: of domain com.microsoft, which bodies of quantized weights use.
    """
    builder = Builder(opset, "mlp_")
    read: list[str] = []
    if len(variants) > 1:
        number = helper.make_node("Constant", [], [_MLP_ID], name=_MLP_ID)
        reference = number.attribute.add()
        reference.name, reference.ref_attr_name, reference.type = "value_int", _MLP_ID, onnx.AttributeProto.INT
        builder.nodes.append(number)
        read = [_MLP_ID]
    output = _select(builder, variants, 0)
    builder.nodes.append(helper.make_node("Identity", [output], ["y"], name="mlp_output"))
    opsets = [helper.make_opsetid("", opset)]
    if any(v.quantization is not None for v in variants):
        opsets.append(helper.make_opsetid("com.microsoft", contrib_version))
    return helper.make_function(DOMAIN, OP, list(OP_INPUTS[:inputs]), ["y"], builder.nodes, opsets, read)


def _select(builder: Builder, variants: Sequence[MlpVariant], i: int) -> str:
    """Nodes that compute variant i if ``mlp_id`` is i, else a later one."""
    if i + 1 == len(variants):
        return variants[i].emit(builder)
    same = builder.add("Equal", [_MLP_ID, builder.constant(i)])
    graphs = []
    for word in ("then", "else"):
        inner = Builder(builder.opset, f"{word}{i}_")
        output = variants[i].emit(inner) if word == "then" else _select(inner, variants, i + 1)
        info = helper.make_tensor_value_info(output, variants[i].dtype, None)
        graphs.append(helper.make_graph(inner.nodes, f"{word}{i}", [], [info]))
    return builder.add("If", [same], then_branch=graphs[0], else_branch=graphs[1])
