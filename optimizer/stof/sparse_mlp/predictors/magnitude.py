# SPDX-License-Identifier: Apache-2.0
"""Thresholds on the magnitudes of activations, as CATS (arXiv 2404.08763) and TEAL (arXiv 2408.14690) take them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.order_statistics import limit_to_fp32, row_blocks, threshold_above
from stof.sparse_mlp.predictors.selection_target import check_share
from stof.sparse_mlp.predictors.selector import Floats, NeuronSelector


def fit_magnitude_selector(activations: Floats, active_share: float, by_neuron: bool = False) -> NeuronSelector:
    """Selects a share of the neurons by the magnitudes of their activations.

    Equal magnitudes at the threshold are left out, so that fewer neurons may be selected: zeros never are. Memory beyond
    ``activations`` is a few ten MiB.

    Args:
        activations: activated gate values [T, F] of T calibration tokens. NaN counts as above each threshold.
        active_share: the share of all values [T, F] that is selected, 0 to 1; with ``by_neuron``, of each neuron's values.
        by_neuron: a threshold for each neuron; else one for all.

    Raises:
        ArgumentError: without a token, or for a share that is none.
    """
    check_share("active_share", active_share)
    if activations.ndim != 2 or activations.dtype != np.float32 or not activations.size:
        raise ArgumentError(
            f"activations are {activations.dtype} {list(activations.shape)}, expected fp32 [tokens, neurons] with a token"
        )
    tokens, neurons = activations.shape

    def magnitudes() -> Iterator[Floats]:
        for rows in row_blocks(tokens, neurons):
            yield np.abs(activations[rows])

    if not by_neuron:
        one = threshold_above(magnitudes, int(active_share * activations.size))
        return NeuronSelector(np.array([one], np.float32))
    most = int(active_share * tokens)
    if most >= tokens:
        return NeuronSelector(np.full(neurons, limit_to_fp32(-np.inf), np.float32))
    thresholds = np.empty(neurons, np.float32)
    for columns in row_blocks(neurons, tokens):
        values = np.abs(activations[:, columns])
        values.partition(tokens - most - 1, axis=0)  # NaN goes to the end
        thresholds[columns] = values[tokens - most - 1]
    largest = np.float32(limit_to_fp32(np.inf))
    return NeuronSelector(np.where(thresholds <= largest, thresholds, largest))
