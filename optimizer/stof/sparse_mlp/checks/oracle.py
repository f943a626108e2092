# SPDX-License-Identifier: Apache-2.0
"""The MLP of docs/reference/sparse-mlp.md in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stof.arguments.precisions import RoundedOperands
from stof.sparse_mlp.activations import find_activation
from stof.sparse_mlp.constants import Constants, read_bias, read_rows
from stof.sparse_mlp.site import MlpSite

_BLOCK = 1024  # neurons that are multiplied together, in fp64
_FP32_SUM_ERROR = 2.0**-20  # of a sum in fp32, over the sum of absolute values: it is assumed to be this much at most


@dataclass(frozen=True)
class MlpWeights:
    """The weights of a site that its operator reads, [F, other] each, and its biases; None: there is none."""

    down: np.ndarray
    up: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    gate: np.ndarray | None = None
    gate_bias: np.ndarray | None = None

    def rounded(self, precision: RoundedOperands) -> MlpWeights:
        """The same with weights rounded to a type, and biases as they are."""
        gate, up = (None if w is None else precision.round(w) for w in (self.gate, self.up))
        return replace(self, down=precision.round(self.down), up=up, gate=gate)

    @classmethod
    def of(cls, site: MlpSite, constants: Constants) -> MlpWeights:
        """Those of a site in a model."""
        weights = cls(read_rows(site.down, constants, True), down_bias=read_bias(site.down, constants))
        if site.up is not None:
            weights = replace(weights, up=read_rows(site.up, constants), up_bias=read_bias(site.up, constants))
        if site.selection == "predictor" and site.gate_weight is not None:
            gate, bias = read_rows(site.gate_weight, constants), read_bias(site.gate_weight, constants)
            weights = replace(weights, gate=gate, gate_bias=bias)
        return weights


def compute_mlp(
    site: MlpSite,
    gate: np.ndarray,
    inputs: np.ndarray | None,
    weights: MlpWeights,
    kind: type[np.floating[Any]],
    *,
    rounds_tokens: bool = False,
    factor_type: RoundedOperands | None = None,
    active: np.ndarray | None = None,
) -> np.ndarray:
    """The MLP behind its gate, in one type.

    Args:
        site: what is computed.
        gate: [tokens, F], before the activation.
        inputs: [tokens, K]; None where the site has no up matmul.
        weights: of the site.
        kind: the type to compute in.
        rounds_tokens: whether what quantized weights multiply is rounded to int8 in blocks, as accuracy_level 4 allows.
        factor_type: the type that tokens and hidden values are rounded to before they are multiplied; None: they are not.
        active: bool [tokens, F], the neurons that count; None: all.

    Returns:
        [tokens, N] of that type.
    """
    if rounds_tokens and inputs is not None:
        inputs = _round_to_int8(inputs.astype(kind), site)
    if factor_type is not None and inputs is not None:
        inputs = factor_type.round(inputs)
    total: np.ndarray = np.zeros((len(gate), site.output_size), kind)
    for start in range(0, site.neurons, _BLOCK):
        block = slice(start, min(start + _BLOCK, site.neurons))
        hidden = _compute_hidden(site, gate, inputs, weights, kind, block)
        if active is not None:
            hidden = np.where(active[:, block], hidden, kind(0))
        if rounds_tokens:
            hidden = _round_to_int8(hidden, site)
        if factor_type is not None:
            hidden = factor_type.round(hidden)
        total += hidden @ np.asarray(weights.down[block]).astype(kind)
    return total if weights.down_bias is None else total + weights.down_bias.astype(kind)


def bound_rounding(
    site: MlpSite, gate: np.ndarray, inputs: np.ndarray | None, weights: MlpWeights, factor_type: RoundedOperands
) -> np.ndarray:
    """How far outputs [tokens, N] may be from the definition that rounds to ``factor_type``.

    Kernels add in fp32, and such a sum decides which way a hidden value near the middle of two numbers is rounded.
    """
    inputs = None if inputs is None else factor_type.round(inputs)
    absolute = replace(weights, up=_absolute(weights.up), up_bias=_absolute(weights.up_bias))
    total: np.ndarray = np.zeros((len(gate), site.output_size))
    for start in range(0, site.neurons, _BLOCK):
        block = slice(start, min(start + _BLOCK, site.neurons))
        hidden = _compute_hidden(site, gate, inputs, weights, np.float64, block)
        sizes = np.abs(_compute_hidden(site, gate, _absolute(inputs), absolute, np.float64, block))
        errors = _FP32_SUM_ERROR * sizes
        near = [np.abs(factor_type.round(hidden + x) - factor_type.round(hidden)) for x in (errors, -errors)]
        total += np.maximum(*near) @ np.abs(weights.down[block].astype(np.float64))
    return total


def _absolute(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else np.abs(array)


def _compute_hidden(
    site: MlpSite,
    gate: np.ndarray,
    inputs: np.ndarray | None,
    weights: MlpWeights,
    kind: type[np.floating[Any]],
    block: slice,
) -> np.ndarray:
    """The hidden values of a block of neurons."""
    hidden = activate(site.activation, gate[:, block].astype(kind))
    if weights.up is None or inputs is None:
        return hidden
    factor: np.ndarray = inputs.astype(kind) @ np.asarray(weights.up[block]).astype(kind).T
    if weights.up_bias is not None:
        factor = factor + weights.up_bias[block].astype(kind)
    product: np.ndarray = hidden * factor
    return product


def compute_gate(
    site: MlpSite,
    inputs: np.ndarray,
    weights: MlpWeights,
    kind: type[np.floating[Any]],
    *,
    rounds_tokens: bool = False,
    factor_type: RoundedOperands | None = None,
) -> np.ndarray:
    """The gate [tokens, F] of a site whose operator computes it from tokens [tokens, K]."""
    assert weights.gate is not None
    tokens = _round_to_int8(inputs.astype(kind), site) if rounds_tokens else inputs.astype(kind)
    if factor_type is not None:
        tokens = factor_type.round(tokens)
    gate: np.ndarray = tokens @ np.asarray(weights.gate).astype(kind).T
    return gate if weights.gate_bias is None else gate + weights.gate_bias.astype(kind)


def activate(activation: str, gate: np.ndarray) -> np.ndarray:
    """Activated neurons in the gate's type, by the names in docs/reference/sparse-mlp.md."""
    with np.errstate(over="ignore", invalid="ignore"):
        return find_activation(activation).compute(gate)


def _round_to_int8(array: np.ndarray, site: MlpSite) -> np.ndarray:
    """Rows rounded to int8 in blocks of the quantization's size, each with a scale of its own."""
    assert site.quantization is not None
    size = site.quantization.block_size
    blocks = np.pad(array, ((0, 0), (0, -array.shape[1] % size))).reshape(len(array), -1, size)
    scales = np.abs(blocks).max(2, keepdims=True) / 127
    rounded = np.round(blocks / np.where(scales > 0, scales, 1)) * scales
    rows: np.ndarray = rounded.reshape(len(array), -1)[:, : array.shape[1]]
    return rows
