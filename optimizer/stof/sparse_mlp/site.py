# SPDX-License-Identifier: Apache-2.0
"""An MLP site: a matmul with the activations of neurons, many of which are zero, and the nodes before it."""

from __future__ import annotations

from dataclasses import dataclass

OP = "StofSparseMLP"
OP_INPUTS = (
    *("input", "gate", "gate_weight", "up_weight", "down_weight", "gate_bias", "up_bias", "down_bias"),
    *("threshold", "predictor_down", "predictor_up", "gate_scales", "gate_zero_points", "up_scales", "up_zero_points"),
    *("down_scales", "down_zero_points"),
)
INPUT_INDEX = {name: i for i, name in enumerate(OP_INPUTS)}


@dataclass(frozen=True)
class Weight:
    """The constant factor of a matmul.

    Attributes:
        tensor: an initializer of rank 2.
        is_by_neuron: a row of it belongs to one neuron; else a column does.
        bias: the constant that is added to the matmul; empty: none.
    """

    tensor: str
    is_by_neuron: bool
    bias: str = ""


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
        dtype: element type of all of them.
    """

    name: str
    gate: str
    activation: str
    activated: str
    down: Weight
    output: str
    neurons: int
    output_size: int
    dtype: int
    input: str = ""
    up: Weight | None = None
    input_size: int = 0

    @property
    def sizes(self) -> str:
        """The sizes for people."""
        kind = "plain" if self.up is None else "gated"
        return f"{kind}, {self.neurons} neurons"

    def share_read(self, density: float) -> float:
        """The share of the MLP's weights that one token reads where this share of the neurons is active."""
        before = self.input_size or self.output_size
        skipped = self.output_size + (before if self.up is not None else 0)
        return (before + density * skipped) / (before + skipped)
