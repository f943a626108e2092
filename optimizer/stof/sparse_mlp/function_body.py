# SPDX-License-Identifier: Apache-2.0
"""The function body of StofSparseMLP in standard ONNX: the dense MLP, in which idle neurons are zero.

It reads the weights in the operator's layout, so that a model holds them once. Several variants are branches of an If on
``mlp_id``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.graph.index import DOMAIN
from stof.graph.node_builder import Builder
from stof.sparse_mlp.activations import find_activation
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
    selection: str = "nonzero"
    has_gate_bias: bool = False
    predictor: _QuantizedPredictor | None = None
    predictor_activation: str = "none"

    @classmethod
    def of(cls, site: MlpSite) -> MlpVariant:
        """The variant of a site."""
        up_bias = site.up is not None and bool(site.up.bias)
        quantization = None if site.quantization is None else _Quantization.of(site)
        variant = cls(site.activation, site.up is not None, up_bias, bool(site.down.bias), site.dtype, quantization)
        if site.selection != "predictor":
            return replace(variant, selection=site.selection)
        assert site.selector is not None
        assert site.gate_weight is not None
        predictor = None
        if site.quantization is not None:
            predictor = _QuantizedPredictor(site.gate_weight.inner, site.selector.rank)
        return replace(
            variant,
            selection="predictor",
            has_gate_bias=bool(site.gate_weight.bias),
            predictor=predictor,
            predictor_activation=site.selector.predictor_activation,
        )

    def emit(self, builder: Builder) -> str:
        """Adds the nodes. Returns the output's tensor."""
        hidden = self._hidden(builder)
        if self.has_up:
            factor = self._multiply(builder, "up")
            factor = builder.add("Add", [factor, "up_bias"]) if self.has_up_bias else factor
            hidden = builder.add("Mul", [hidden, factor])
        weight = "down_weight"
        if self.quantization is not None:
            weight = self.quantization.dequantize_down(builder, self.dtype)
        output = builder.add("MatMul", [hidden, weight])
        return builder.add("Add", [output, "down_bias"]) if self.has_down_bias else output

    def _hidden(self, builder: Builder) -> str:
        """Activated neurons, zero where one is idle. Comparisons are in fp32, and not true for NaN."""
        b, activation = builder, find_activation(self.activation)
        if self.selection == "nonzero":
            return activation.emit(b, "gate")
        gate = "gate"
        if self.selection == "predictor":
            gate = self._multiply(b, "gate")
            gate = b.add("Add", [gate, "gate_bias"]) if self.has_gate_bias else gate
        activated = activation.emit(b, self._cast(b, gate))
        scores = self._scores(b) if self.selection == "predictor" else b.add("Abs", [activated])
        idle = b.add("LessOrEqual", [scores, "threshold"])
        hidden = b.add("Where", [idle, b.constant(0, np.float32), activated])
        return hidden if self.dtype == TensorProto.FLOAT else b.add("Cast", [hidden], to=self.dtype)

    def _scores(self, builder: Builder) -> str:
        """A predictor's scores [..., F] in fp32."""
        scores = self._cast(builder, "input")
        for name in ("predictor_down", "predictor_up"):
            if self.predictor is None:
                factor = self._cast(builder, name)
            else:
                factor = self.predictor.dequantize(builder, name, self._cast(builder, f"{name}_scales"))
            scores = builder.add("MatMul", [scores, builder.add("Transpose", [factor], perm=[1, 0])])
            if name == "predictor_down" and self.predictor_activation == "relu":
                scores = builder.add("Relu", [scores])
        return scores

    def _cast(self, builder: Builder, tensor: str) -> str:
        """A tensor of the site's type in fp32."""
        return tensor if self.dtype == TensorProto.FLOAT else builder.add("Cast", [tensor], to=TensorProto.FLOAT)

    def _multiply(self, builder: Builder, name: str) -> str:
        """The gate or up matmul without its bias."""
        if self.quantization is not None:
            return self.quantization.multiply(builder, name)
        weight = builder.add("Transpose", [f"{name}_weight"], perm=[1, 0])
        return builder.add("MatMul", ["input", weight])


@dataclass(frozen=True)
class _QuantizedPredictor:
    """What the body depends on where the predictor is quantized: the sizes of rows without their padding."""

    input_size: int
    rank: int

    def dequantize(self, builder: Builder, name: str, scales: str) -> str:
        """A factor in fp32."""
        b, size = builder, self.input_size if name == "predictor_down" else self.rank
        values = b.add("Slice", [name, *map(b.constant, ([0], [size], [1]))])
        numbers = b.add("Sub", [b.add("Cast", [values], to=TensorProto.FLOAT), b.constant(128, np.float32)])
        return b.add("Mul", [numbers, b.unsqueeze(scales, [1])])


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
    gate_has_zeros: bool = False

    @classmethod
    def of(cls, site: MlpSite) -> _Quantization:
        q = site.quantization
        assert q is not None
        gate = site.gate_weight if site.selection == "predictor" else None
        rows = [w.quantization for w in (gate, site.up) if w is not None and w.quantization is not None]
        sizes = (site.neurons, site.input_size if rows else 0, site.output_size)
        zeros = [
            w is not None and w.quantization is not None and w.quantization.has_zero_points for w in (site.up, gate)
        ]
        return cls(q.bits, q.block_size, rounding_level(site), *sizes, zeros[0], q.has_zero_points, zeros[1])

    def multiply(self, builder: Builder, name: str) -> str:
        """The gate or up matmul: MatMulNBits reads the same tensors."""
        has_zeros = self.gate_has_zeros if name == "gate" else self.up_has_zeros
        inputs = ["input", f"{name}_weight", f"{name}_scales", *([f"{name}_zero_points"] if has_zeros else [])]
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


def rounding_level(site: MlpSite) -> int:
    """The accuracy_level of a node with quantized weights: that of the matmuls of tokens, else of the last one."""
    rows = [w.quantization for w in site.weights[:-1] if w.quantization is not None]
    quantization = rows[-1] if rows else site.quantization
    return 0 if quantization is None else quantization.accuracy_level


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
