# SPDX-License-Identifier: Apache-2.0
"""What an MLP asks of kernels, which estimates and reasons are about."""

from __future__ import annotations

from dataclasses import dataclass

from stof.sparse_mlp.site import MlpSite

UNKNOWN_DENSITY = 0.5  # of neurons that were not counted: half of the outputs of a random matmul are negative


@dataclass(frozen=True, kw_only=True)
class MlpProblem:
    """An MLP as a kernel sees it. The names of its tensors are for emission alone.

    Attributes:
        activation: of docs/reference/sparse-mlp.md.
        neurons: F.
        features: the size of a token in front of the first matmul.
        output_size: N.
        is_gated: it has an up matmul.
        weights: how many weights the operator reads.
        bits: of a quantized weight's value; 0: weights are not quantized.
        block_size: values that share a scale; 1 where weights are not quantized.
        rounds_tokens: the operator may round what quantized weights multiply to int8.
        predictor_rank: of the predictor that stands for the gate's matmul; 0: there is none.
        density: the share of neurons that are computed for a token; None: not measured.
    """

    activation: str
    neurons: int
    features: int
    output_size: int
    is_gated: bool
    weights: int
    bits: int
    block_size: int
    rounds_tokens: bool
    predictor_rank: int
    density: float | None

    @classmethod
    def of(cls, site: MlpSite, density: float | None = None) -> MlpProblem:
        """The problem of a site of which this share of the neurons is computed for a token."""
        stored, selector = site.quantization, site.selector
        return cls(
            activation=site.activation,
            neurons=site.neurons,
            features=site.input_size or site.output_size,
            output_size=site.output_size,
            is_gated=site.up is not None,
            weights=len(site.weights),
            bits=0 if stored is None else stored.bits,
            block_size=1 if stored is None else stored.block_size,
            rounds_tokens=site.rounds_tokens,
            predictor_rank=selector.rank if selector is not None and selector.has_predictor else 0,
            density=density,
        )

    @property
    def is_quantized(self) -> bool:
        """Whether weights are stored in fewer bits than tokens."""
        return self.bits > 0

    @property
    def assumed_density(self) -> float:
        """The density, or what is assumed where it was not measured."""
        return UNKNOWN_DENSITY if self.density is None else self.density

    @property
    def sizes(self) -> str:
        """The sizes for people."""
        bits = f", int{self.bits}" if self.is_quantized else ""
        return f"{'gated' if self.is_gated else 'plain'}, {self.neurons} neurons{bits}"

    @property
    def _held_bytes(self) -> tuple[float, float]:
        """The bytes of a weight's value and of its part of a scale, as ONNX Runtime holds them on a CPU: fp16 as fp32."""
        return (self.bits / 8, 4 / self.block_size) if self.is_quantized else (4.0, 0.0)

    @property
    def dense_bytes(self) -> float:
        """The bytes of weights and scales that one token reads in the dense MLP, as ONNX Runtime holds them on a CPU."""
        before = (2 if self.is_gated else 1) * self.features
        return self.neurons * sum(self._held_bytes) * (before + self.output_size)

    @property
    def rows_read(self) -> float:
        """The rows of weights that the operator reads for one token."""
        rows = self.assumed_density * self.neurons * self.weights
        return rows + (self.predictor_rank + self.neurons if self.predictor_rank else 0)

    @property
    def share_read(self) -> float:
        """The share of the MLP's weights that one token reads."""
        density = self.assumed_density
        values, scales = self._held_bytes
        # A scale of the last matmul is read where one neuron of its block is active.
        down = (density * values + (1 - (1 - density) ** self.block_size) * scales) * self.output_size
        rows = (values + scales) * self.features
        up = density * rows if self.is_gated else 0.0
        gate = rows
        if self.predictor_rank:
            held = 1.0 if self.is_quantized else values  # a predictor of quantized weights has values of 8 bits
            gate = density * rows + held * self.predictor_rank * (1 + self.features / self.neurons)
        return (gate + up + down) * self.neurons / self.dense_bytes
