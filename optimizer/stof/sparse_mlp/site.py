# SPDX-License-Identifier: Apache-2.0
"""An MLP site: a matmul with the activations of neurons, many of which are zero, and the nodes before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from stof.sparse_mlp.activations import find_activation
from stof.sparse_mlp.predictors.selector import NeuronSelector

OP = "StofSparseMLP"
_ROUNDS_TOKENS = 4  # accuracy_level of MatMulNBits with which its kernels quantize tokens to int8
OP_INPUTS = (
    *("input", "gate", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias"),
    *("threshold", "predictor_down", "predictor_up", "gate_scales", "gate_zero_points", "up_scales", "up_zero_points"),
    *("down_scales", "down_zero_points", "predictor_down_scales", "predictor_up_scales"),
)
INPUT_INDEX = {name: i for i, name in enumerate(OP_INPUTS)}


@dataclass(frozen=True)
class DequantizeLinearForm:
    """How DequantizeLinear stores a weight; MatMulInteger does the same.

    Attributes:
        inner_axis: of its matrix, the axis that the matmul sums over.
        is_uniform: one scale for the tensor or for an output; else one for each block.
        is_centered: every zero point is the middle of the values, 0 of signed ones.
    """

    inner_axis: int
    is_uniform: bool
    is_centered: bool


@dataclass(frozen=True)
class Quantization:
    """How ONNX Runtime's MatMulNBits stores a weight [N, K], and how another operator stores the same values.

    Attributes:
        bits: 4 or 8, of a value.
        block_size: values along K that share a scale.
        scales: initializer with N · ceil(K / block_size) elements.
        zero_points: likewise, packed into bytes by row; empty: 2^(bits - 1).
        accuracy_level: of the node.
        dequantize_linear: None: as MatMulNBits stores it. Else scales and zero points have this form.
    """

    bits: int
    block_size: int
    scales: str
    zero_points: str = ""
    accuracy_level: int = 0
    dequantize_linear: DequantizeLinearForm | None = None

    @property
    def has_zero_points(self) -> bool:
        """Whether zero points are stored beside the values in blocks."""
        return bool(self.zero_points) if self.dequantize_linear is None else not self.dequantize_linear.is_centered


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
        matmul_output: what the matmul's node writes.
        weight: its weight and bias.
        is_movable: whether everything between ``tensor`` and the gate treats all neurons alike, so that they may be reordered.
    """

    tensor: str
    matmul_output: str
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
        hot: how many of the first ones were active in the runs that the order is from.
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
        selector: which neurons are computed, where outputs change; None: those that are not zero.
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
    selector: NeuronSelector | None = None

    def __post_init__(self) -> None:
        find_activation(self.activation)  # an unknown name is an error

    @property
    def selection(self) -> str:
        """How neurons are selected, by its name in docs/reference/sparse-mlp.md."""
        if self.selector is None:
            return "nonzero"
        return "predictor" if self.selector.has_predictor else "magnitude"

    @property
    def rewrites_gate(self) -> bool:
        """Whether the gate's matmul is written anew."""
        if self.projection is None or self.selection == "predictor":
            return False
        return self.order is not None or (self.projection.is_packed and self.up is not None and self.up.whole != 0)

    @property
    def tokens_input(self) -> str:
        """The tensor [..., K] that the operator multiplies; empty where it reads the gate alone."""
        return self.gate_input if self.selection == "predictor" else self.input

    @property
    def weights(self) -> tuple[MlpWeight, ...]:
        """Those that the operator reads."""
        gate = self.gate_weight if self.selection == "predictor" else None
        return tuple(w for w in (gate, self.up, self.down) if w is not None)

    def reason_no_predictor(self) -> str:
        """Why a predictor cannot stand for the gate's matmul; empty where it can."""
        if self.gate_weight is None:
            return f"{self.gate!r} is not the matmul of tokens with a constant alone"
        if self.input and self.input != self.gate_input:
            return f"gate and up multiply different tensors, {self.gate_input!r} and {self.input!r}"
        return ""

    @property
    def quantization(self) -> Quantization | None:
        """Of its weights."""
        return self.down.quantization

    @property
    def rounds_tokens(self) -> bool:
        """Whether the operator may round what quantized weights multiply to int8."""
        kinds = [w.quantization for w in self.weights]
        return any(q is not None and q.accuracy_level == _ROUNDS_TOKENS for q in kinds)

    @property
    def row_bytes(self) -> int:
        """The bytes of the operator's weights that belong to one neuron, without those of scales."""
        width = 32 if self.dtype == onnx.TensorProto.FLOAT else 16
        width = width if self.quantization is None else self.quantization.bits
        return sum(w.outer if w is self.down else w.inner for w in self.weights) * width // 8
