# SPDX-License-Identifier: Apache-2.0
"""Magnitude thresholds against sorted values, and the memory that they take."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors import order_statistics
from stof.sparse_mlp.predictors.magnitude import fit_magnitude_selector
from stof.sparse_mlp.predictors.order_statistics import threshold_above

SHARES = [0.0, 0.03, 0.1, 0.5, 0.999, 1.0]


def draw(tokens: int = 60, neurons: int = 70) -> np.ndarray:
    rng = np.random.default_rng(3)
    return (rng.standard_normal((tokens, neurons)) * rng.uniform(0.1, 10, neurons)).astype(np.float32)


@pytest.mark.parametrize("share", SHARES)
def test_one_threshold_selects_the_largest(share: float) -> None:
    values = draw()
    selector = fit_magnitude_selector(values, share)
    assert selector.threshold.shape == (1,)
    selected = selector.select(values, values)
    count = int(share * values.size)
    assert np.count_nonzero(selected) == count
    assert np.abs(values)[selected].min(initial=np.inf) > np.abs(values)[~selected].max(initial=0)


@pytest.mark.parametrize("share", SHARES)
def test_thresholds_of_neurons_select_the_largest_of_each(share: float) -> None:
    values = draw()
    selector = fit_magnitude_selector(values, share, by_neuron=True)
    assert selector.threshold.shape == (70,)
    np.testing.assert_array_equal(selector.select(values, values).sum(0), int(share * 60))


@pytest.mark.parametrize("by_neuron", [False, True])
def test_chunks_change_nothing(by_neuron: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    values = draw()
    expected = fit_magnitude_selector(values, 0.2, by_neuron).threshold
    monkeypatch.setattr(order_statistics, "CHUNK_VALUES", 130)
    np.testing.assert_array_equal(fit_magnitude_selector(values, 0.2, by_neuron).threshold, expected)


@pytest.mark.parametrize("by_neuron", [False, True])
def test_zeros_are_never_selected(by_neuron: bool) -> None:
    values = np.maximum(draw(), 0)
    selector = fit_magnitude_selector(values, 0.9, by_neuron)
    np.testing.assert_array_equal(selector.select(values, values), values > 0)


@pytest.mark.parametrize("by_neuron", [False, True])
def test_values_that_are_not_finite_stay_active(by_neuron: bool) -> None:
    values = draw()
    values[3], values[7], values[8] = np.nan, np.inf, -np.nan
    selector = fit_magnitude_selector(values, 0.01, by_neuron)
    assert np.isfinite(selector.threshold).all()
    assert selector.select(values, values)[[3, 7, 8]].all()


@pytest.mark.parametrize("most", [0, 1, 5, 11, 12, 99])
def test_thresholds_of_signed_values(most: int) -> None:
    values = np.array([-np.inf, -3, -1e-45, -0.0, 0.0, 1e-45, 2, 2, 2, np.inf, np.nan, -np.nan], np.float32)
    cut = threshold_above(lambda: [values[:5], values[5:]], most)
    assert np.isfinite(cut)
    above = np.count_nonzero(~(values <= np.float32(cut)))
    assert above == {0: 3, 1: 3, 5: 3, 11: 11, 12: 11, 99: 11}[most]  # no finite value lies between infinite ones


def test_memory_is_bounded() -> None:
    values = np.random.default_rng(0).standard_normal((2048, 4096), np.float32)  # 32 MiB
    tracemalloc.start()
    fit_magnitude_selector(values, 0.1)
    fit_magnitude_selector(values, 0.1, by_neuron=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20  # chunks of 8 MiB, their integers of 8 bytes, whatever the number of tokens is


@pytest.mark.parametrize("share", [-0.1, 1.1, np.nan])
def test_wrong_shares_are_refused(share: float) -> None:
    with pytest.raises(ArgumentError, match=r"active_share is .*, expected a share, 0 to 1"):
        fit_magnitude_selector(draw(), share)


@pytest.mark.parametrize("values", [np.ones((0, 4), np.float32), np.ones(4, np.float32), np.ones((4, 4))])
def test_activations_without_tokens_are_refused(values: np.ndarray) -> None:
    with pytest.raises(ArgumentError, match=r"expected fp32 \[tokens, neurons\] with a token"):
        fit_magnitude_selector(values, 0.5)
