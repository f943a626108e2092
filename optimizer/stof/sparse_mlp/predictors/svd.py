# SPDX-License-Identifier: Apache-2.0
"""A predictor that needs no training: the truncated SVD of the gate weight, with thresholds fitted on tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.fit_tokens import check_rank, check_tokens, choose_held_out_tokens
from stof.sparse_mlp.predictors.low_rank import approximate_weight, measure_matmul_errors
from stof.sparse_mlp.predictors.order_statistics import row_blocks
from stof.sparse_mlp.predictors.selection_target import check_target, fit_margin_threshold
from stof.sparse_mlp.predictors.selector import Flags, Floats, NeuronSelector

_HELD_OUT = 4  # one token in so many fits thresholds and the shrinkage


def fit_svd_selector(
    gate_weight: Floats,
    gate_bias: Floats | None,
    inputs: Floats,
    active: Flags,
    rank: int,
    active_share: float | None = None,
    recall: float | None = None,
    by_neuron: bool = True,
) -> NeuronSelector:
    """Predicts active neurons by a low-rank approximation of the gate weight.

    Longer than 60 lines: nearly half of them are this contract.

    The score of a neuron approximates ``gate_weight[j] · x``. Its threshold contains the bias, and the mean of what the
    approximation leaves out. With ``by_neuron`` it is lower for neurons whose scores are less exact: a margin of the same
    probability for each, if errors are normal. One number for all neurons is fitted, on tokens that the approximation has
    not seen.

    Args:
        gate_weight: fp32 [F, K]; of a plain MLP, that of the first matmul.
        gate_bias: fp32 [F], or None.
        inputs: fp32 [T, K], calibration tokens.
        active: bool [T, F], the neurons that should be selected.
        rank: R, at most F and K.
        active_share: the share of neurons to select.
        recall: the share of active neurons to select; with neither, ``DEFAULT_RECALL``.
        by_neuron: whether the margin follows the errors of each neuron.

    Raises:
        ArgumentError: for arrays of other types or shapes, values that are not finite, no token, or a wrong number.
    """
    _check_gate(gate_weight, gate_bias, inputs, active)
    check_rank(rank, *gate_weight.shape)
    check_target(active_share, recall)
    is_held_out = choose_held_out_tokens(len(inputs), _HELD_OUT)
    mean = inputs[~is_held_out].mean(0, dtype=np.float64).astype(np.float32)
    centered = inputs - mean
    fitted, rest = centered[~is_held_out], centered[is_held_out]
    up, down = approximate_weight(gate_weight, fitted, rest, rank)

    seen = rest if len(rest) else fitted
    flags = active[is_held_out] if len(rest) else active
    # score + offset approximates the gate value of the neuron.
    offset = gate_weight @ mean - up @ (down @ mean)
    if gate_bias is not None:
        offset += gate_bias
    spread = np.ones(len(up), np.float32)
    bound = 0.0
    if by_neuron:
        errors = measure_matmul_errors(gate_weight, up, down, seen)
        least = max(1e-3 * float(errors.mean()), 1e-5 * float(np.abs(offset).mean()), 1e-20)
        spread = np.maximum(errors, np.float32(least))
        bound = _activity_bound(gate_weight, gate_bias, seen + mean, flags)
    low = (seen + mean) @ down.T

    def margins() -> Iterator[tuple[Floats, Flags]]:
        for rows in row_blocks(len(up), len(seen)):
            scores = low @ up[rows].T
            yield (scores + (offset[rows] - np.float32(bound))) / spread[rows], flags[:, rows]

    level = fit_margin_threshold(margins, active_share, recall)
    limit = float(np.finfo(np.float32).max)
    threshold = np.clip(level * spread.astype(np.float64) + bound - offset, -limit, limit)
    return NeuronSelector(threshold.astype(np.float32), down, up)


def _activity_bound(weight: Floats, bias: Floats | None, tokens: Floats, active: Flags) -> float:
    """The gate value above which neurons are active, as well as one bound for all says so: 0 for ReLU."""
    bins = 512
    largest = 1e-30
    for rows in row_blocks(len(weight), len(tokens)):
        largest = max(largest, float(np.abs(tokens @ weight[rows].T + (0 if bias is None else bias[rows])).max()))
    edges = np.linspace(-largest, largest, 2 * bins + 1)  # 0 is one of them
    counts = np.zeros((2, 2 * bins), np.int64)
    for rows in row_blocks(len(weight), len(tokens)):
        values = tokens @ weight[rows].T + (0 if bias is None else bias[rows])
        for i, kind in enumerate((~active[:, rows], active[:, rows])):
            counts[i] += np.histogram(values[kind], edges)[0]
    # Wrong with the bound at each edge: idle ones above it, active ones below it.
    above = np.append(np.cumsum(counts[0][::-1])[::-1], 0)
    below = np.append(0, np.cumsum(counts[1]))
    return float(edges[int(np.argmin(above + below))])


def _check_gate(gate_weight: Floats, gate_bias: Floats | None, inputs: Floats, active: Flags) -> None:
    if gate_weight.ndim != 2 or gate_weight.dtype != np.float32 or not gate_weight.size:
        raise ArgumentError(f"gate_weight is {gate_weight.dtype} {list(gate_weight.shape)}, expected fp32 [F, K]")
    neurons, size = gate_weight.shape
    if gate_bias is not None and (gate_bias.shape != (neurons,) or gate_bias.dtype != np.float32):
        raise ArgumentError(f"gate_bias is {gate_bias.dtype} {list(gate_bias.shape)}, expected fp32 [{neurons}]")
    for name, values in (("gate_weight", gate_weight), ("gate_bias", gate_bias)):
        if values is not None and not np.isfinite(values).all():
            raise ArgumentError(f"{name} has values that are not finite; such a model cannot be predicted")
    check_tokens(inputs, active)
    if inputs.shape[1] != size:
        raise ArgumentError(
            f"inputs are {list(inputs.shape)}, expected [tokens, {size}], the size of gate_weight's rows"
        )
    if active.shape[1] != neurons:
        raise ArgumentError(f"active is {list(active.shape)}, expected [tokens, {neurons}], the rows of gate_weight")
