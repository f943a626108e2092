# SPDX-License-Identifier: Apache-2.0
"""An MLP site: a matmul with the activations of neurons, many of which are zero, and the nodes before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

OP = "StofSparseMLP"
_ROUNDS_TOKENS = 4  # accuracy_level of MatMulNBits with which its kernels quantize tokens to int8
OP_INPUTS = (
    *("input", "gate", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias"),
    *("threshold", "predictor_down", "predictor_up", "gate_scales", "gate_zero_points", "up_scales", "up_zero_points"),
    *("down_scales", "down_zero_points"),
)
INPUT_INDEX = {name: i for i, name in enumerate(OP_INPUTS)}


@dataclass(frozen=True)
class LinearForm:
    """How DequantizeLinear or MatMulInteger stores a weight.

    Attributes:
        inner_axis: of its matrix, the axis that the matmul sums over.
        is_uniform: one scale for the tensor or for an output; else one for each block.
    """

    inner_axis: int
    is_uniform: bool


@dataclass(frozen=True)
class Quantization:
    """How ONNX Runtime's MatMulNBits stores a weight [N, K], and how another operator stores the same values.

    Attributes:
        bits: 4 or 8, of a value.
        block_size: values along K that share a scale.
        scales: initializer with N · ceil(K / block_size) elements.
        zero_points: likewise, packed into bytes by row; empty: 2^(bits - 1).
        accuracy_level: of the node.
        linear: None: as MatMulNBits stores it. Else scales and zero points are those of the other operator.
    """

    bits: int
    block_size: int
    scales: str
    zero_points: str = ""
    accuracy_level: int = 0
    linear: LinearForm | None = None


@dataclass(frozen=True)
class MlpWeight:
    """The constant factor of a matmul.

    Attributes:
        tensor: an initializer of rank 2, or 3 where it is quantized.
        inner: how many elements the matmul sums over.
        outer: how many elements it gives for a token.
        is_by_neuron: a row of it belongs to one neuron; else a column does.
        bias: the constant that is added to the matmul; empty: none.
        quantization: None: its element type is that of the tokens.
        first: of what the stored weight and bias give, the first element that is meant.
        whole: the elements that the stored weight and bias give; 0: ``outer``.
    """

    tensor: str
    inner: int
    outer: int
    is_by_neuron: bool
    bias: str = ""
    quantization: Quantization | None = None
    first: int = 0
    whole: int = 0


@dataclass(frozen=True)
class GateProjection:
    """The matmul whose result, perhaps behind other operators, is the gate.

    Attributes:
        tensor: [..., F] that it gives behind its bias, a part of a larger one where ``weight`` is cut.
        product: what the matmul's node writes.
        weight: its weight and bias.
        is_movable: whether everything between ``tensor`` and the gate treats all neurons alike, so that they may be reordered.
    """

    tensor: str
    product: str
    weight: MlpWeight
    is_movable: bool

    @property
    def is_packed(self) -> bool:
        """Whether it is part of a larger matmul, which the up weight shares."""
        return self.weight.whole != 0


@dataclass(frozen=True, eq=False)
class NeuronOrder:
    """An order of neurons: the one at i was at ``indices[i]``.

    Attributes:
        indices: int64 [F].
        hot: how many of the first ones fired in the runs that the order is from.
    """

    indices: np.ndarray
    hot: int


@dataclass(frozen=True)
class MlpSite:
    """The part of an MLP behind its gate (without one: behind its first matmul), which need not compute idle neurons.

    Attributes:
        name: unique in the model, for options and reports.
        gate: tensor [..., F] to which the activation is applied.
        activation: of docs/reference/sparse-mlp.md; ``none``: ``gate`` is activated already.
        activated: tensor [..., F] of activated neurons, zero where one is idle.
        down: the last matmul.
        output: its tensor [..., N], behind the bias.
        input: tensor [..., K] that ``up`` multiplies; empty without one.
        up: the matmul whose result is multiplied by the activated neurons; None: there is none.
        neurons: F.
        input_size: K, or the size of a token in front of the first matmul; 0: not known.
        output_size: N.
        dtype: element type of all of them but quantized weights.
        has_zeros: whether the activation gives true zeros, so that idle neurons can be left out without a change.
        gate_input: tensor [..., K] that the gate's matmul multiplies; empty where ``gate_weight`` is None.
        gate_weight: the matmul with its bias that gives ``gate``; None: ``gate`` is computed otherwise.
        projection: the matmul behind the gate, where it may be written anew; None: it may not, or need not.
        order: of the neurons in the model to write; None: as they are.
    """

    name: str
    gate: str
    activation: str
    activated: str
    down: MlpWeight
    output: str
    neurons: int
    output_size: int
    dtype: int
    input: str = ""
    up: MlpWeight | None = None
    input_size: int = 0
    has_zeros: bool = True
    gate_input: str = ""
    gate_weight: MlpWeight | None = None
    projection: GateProjection | None = None
    order: NeuronOrder | None = None

    @property
    def quantization(self) -> Quantization | None:
        """Of its weights."""
        return self.down.quantization

    @property
    def rounds_tokens(self) -> bool:
        """Whether the operator may round what quantized weights multiply to int8."""
        weights = [w for w in (self.up, self.down) if w is not None and w.quantization is not None]
        return any(w.quantization is not None and w.quantization.accuracy_level == _ROUNDS_TOKENS for w in weights)

    @property
    def sizes(self) -> str:
        """The sizes for people."""
        kind = "plain" if self.up is None else "gated"
        bits = "" if self.quantization is None else f", int{self.quantization.bits}"
        return f"{kind}, {self.neurons} neurons{bits}"

    def share_read(self, density: float) -> float:
        """The share of the MLP's weights that one token reads where this share of the neurons is active."""
        before = self.input_size or self.output_size
        values, scales, block = 1.0, 0.0, 1
        if self.quantization is not None:
            block = self.quantization.block_size
            values, scales = self.quantization.bits / 8, 4 / block
        # A scale of the last matmul is read where one neuron of its block is active.
        down = (density * values + (1 - (1 - density) ** block) * scales) * self.output_size
        up = density * (values + scales) * before if self.up is not None else 0.0
        dense = (values + scales) * before
        whole = dense * (2 if self.up is not None else 1) + (values + scales) * self.output_size
        return (dense + up + down) / whole
