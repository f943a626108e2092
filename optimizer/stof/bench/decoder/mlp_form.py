# SPDX-License-Identifier: Apache-2.0
"""The MLP of a bench's decoder: its form, how its weights are stored, and biases that give shares of active and idle neurons."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
from onnx import helper

if TYPE_CHECKING:
    from stof.bench.decoder.graph import DecoderGraph

GAIN = 0.7  # of a weight matrix: its values have the variance (gain^2 / rows)
NORM_SPREAD = 0.1  # the standard deviation of a norm's weights around 1
IDLE_BIAS = -100.0  # of a neuron that is never active: gates are within some units of 0
ACTIVATIONS = ("silu", "relu", "relu2", "gelu_tanh")


@dataclass(frozen=True)
class MlpForm:
    """The form of an MLP.

    Attributes:
        activation: one of ``ACTIVATIONS``.
        is_gated: whether an up projection is multiplied by the activated gate.
        active: the share of the neurons whose activation is above zero; None: as random weights have it, a half.
        has_top_k: Gemma 3n's: the gate counts only above the mean and some standard deviations of a token's gates, which
            ``active`` gives.
        idle: the share of the neurons that are never active, at random places; the others are more often, so that ``active`` is
            the share of all.

    Raises:
        ValueError: for an idle share of neurons that cannot be idle.
    """

    activation: str = "silu"
    is_gated: bool = True
    active: float | None = None
    has_top_k: bool = False
    idle: float = 0.0

    def __post_init__(self) -> None:
        """Checks the idle share."""
        if not self.idle:
            return
        if self.has_top_k or self.activation not in ("relu", "relu2"):
            kind = "the threshold of Gemma 3n" if self.has_top_k else self.activation
            raise ValueError(f"neurons with {kind} are never idle for all tokens; idle needs relu or relu2")
        active = self.active or 0.0
        if not 0 < self.idle < 1 - active:
            raise ValueError(
                f"the share of idle neurons is {self.idle:g}, expected 0 or more, and less than {1 - active:g} where {active:g} "
                "are active"
            )

    @property
    def shift(self) -> float:
        """The bias of the first matmul with which that share of its values is above zero; that of neurons that are not idle.

        Tokens are normed, so that the values are normal with the standard deviation ``GAIN`` over the norm's weights.
        """
        if self.active is None or self.has_top_k:
            return 0.0
        return NormalDist(0, GAIN * math.sqrt(1 + NORM_SPREAD**2)).inv_cdf(self.active / (1 - self.idle))


def count_idle(form: MlpForm, neurons: int) -> int:
    """How many of an MLP's neurons are never active."""
    return round(form.idle * neurons)


def gate_bias(form: MlpForm, neurons: int, seed: int) -> np.ndarray:
    """The bias of the first matmul, fp64 [F]; idle neurons are at random places."""
    found = np.full(neurons, form.shift)
    found[np.random.default_rng(seed).permutation(neurons)[: count_idle(form, neurons)]] = IDLE_BIAS
    return found


def add_mlp(graph: DecoderGraph, path: str, normed: str) -> str:
    """The nodes of an MLP; the name of what it adds to the hidden states."""
    form, shape = graph.shape.mlp, graph.shape
    gate = graph.matmul(f"{path}/{'gate_proj' if form.is_gated else 'fc1'}/MatMul", normed, shape.hidden, shape.inner)
    if form.shift or form.idle:
        bias = graph.weight(f"{path}/fc1.bias", (shape.inner,), "gate_bias")
        gate = graph.add("Add", f"{path}/fc1/Add", [gate, bias])[0]
    if form.has_top_k:
        gate = _top_k(graph, path, gate, form.active or 1.0)
    hidden = _activate(graph, path, gate, form.activation)
    if form.is_gated:
        up = graph.matmul(f"{path}/up_proj/MatMul", normed, shape.hidden, shape.inner)
        hidden = graph.add("Mul", f"{path}/Mul", [hidden, up])[0]
    return graph.matmul(f"{path}/{'down_proj' if form.is_gated else 'fc2'}/MatMul", hidden, shape.inner, shape.hidden)


def _activate(graph: DecoderGraph, path: str, gate: str, activation: str) -> str:
    path = f"{path}/act_fn"
    if activation == "silu":
        sigmoid = graph.add("Sigmoid", f"{path}/Sigmoid", [gate])[0]
        return graph.add("Mul", f"{path}/Mul", [gate, sigmoid])[0]
    if activation == "gelu_tanh":
        return graph.add("Gelu", f"{path}/Gelu", [gate], approximate="tanh")[0]
    positive = graph.add("Relu", f"{path}/Relu", [gate])[0]
    return graph.add("Mul", f"{path}/Mul", [positive, positive])[0] if activation == "relu2" else positive


def _top_k(graph: DecoderGraph, path: str, gate: str, active: float) -> str:
    """Gemma 3n's threshold: relu(gate - (mean + standard deviation x quantile)), over the neurons of a token."""
    path = f"{path}/top_k"
    axis = graph.constant(f"{path}/axis", [-1])
    mean = graph.add("ReduceMean", f"{path}/ReduceMean", [gate, axis], keepdims=1)[0]
    centered = graph.add("Sub", f"{path}/Sub", [gate, mean])[0]
    square = graph.add("Mul", f"{path}/Mul", [centered, centered])[0]
    variance = graph.add("ReduceMean", f"{path}/ReduceMean_1", [square, axis], keepdims=1)[0]
    deviation = graph.add("Sqrt", f"{path}/Sqrt", [variance])[0]
    quantile = graph.number(f"{path}/quantile", NormalDist().inv_cdf(1 - active))
    above = graph.add("Mul", f"{path}/Mul_1", [deviation, quantile])[0]
    threshold = graph.add("Add", f"{path}/Add", [mean, above])[0]
    return graph.add("Relu", f"{path}/Relu", [graph.add("Sub", f"{path}/Sub_1", [gate, threshold])[0]])[0]


def quantized_matmul(graph: DecoderGraph, name: str, given: str, rows: int, columns: int) -> str:
    """A MatMulNBits with random values of 4 bits, whose results have the variance of those of ``GAIN``."""
    block, bits = graph.shape.block_size, 4
    blocks = -(-rows // block)
    spread = math.sqrt(((2**bits - 1) ** 2 - 1) / 12)  # of values drawn evenly from 1 .. 2^bits - 1
    values = graph.weight(f"{name}.qweight", (columns, blocks, block * bits // 8), "uint8")
    scales = graph.weight(f"{name}.scales", (columns * blocks,), "scales", GAIN / math.sqrt(rows) / spread)
    output = f"{name}/output_0"
    graph.nodes.append(
        helper.make_node(
            "MatMulNBits", [given, values, scales], [output], name=name, domain="com.microsoft",
            K=rows, N=columns, bits=bits, block_size=block, accuracy_level=graph.shape.accuracy_level,
        )
    )  # fmt: skip
    return output
