# SPDX-License-Identifier: Apache-2.0
"""NeuronSelector by the contract of StofSparseMLP, and the quality of selections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.sparse_mlp.dense_mlp import Case, draw

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors.quality import measure_selection, relative_output_error
from stof.sparse_mlp.predictors.selector import NeuronSelector


def selector_of(case: Case) -> tuple[NeuronSelector, Any]:
    problem = draw(case)
    f = problem.feeds
    return NeuronSelector(f["threshold"], f.get("predictor_down"), f.get("predictor_up")), problem


@pytest.mark.parametrize("selection", ["magnitude", "predictor"])
@pytest.mark.parametrize("thresholds", ["one", "each"])
def test_selects_as_the_operator(selection: str, thresholds: str) -> None:
    case = Case(lead=(7,), selection=selection, thresholds=thresholds, density=0.3, activation="silu")
    selector, problem = selector_of(case)
    _, expected = problem.active()
    gate = problem.feeds.get("gate")
    activations = None
    if gate is not None:
        wide = gate.astype(float)
        activations = (wide / (1 + np.exp(-wide))).astype(np.float32)
    found = selector.select(problem.feeds["input"], activations)
    # "each" puts a threshold between two tokens' values, which may be as near as rounding.
    assert np.count_nonzero(found != expected) <= (2 if thresholds == "each" else 0)
    assert 0 < found.mean() < 1
    assert selector.has_predictor == (selection == "predictor")
    assert selector.rank == (case.R if selection == "predictor" else 0)


def test_nan_is_active() -> None:
    activations = np.array([[np.nan, 1, 3, -np.nan]], np.float32)
    found = NeuronSelector(np.array([2], np.float32)).select(activations, activations)
    np.testing.assert_array_equal(found, [[True, False, True, True]])


def test_nan_scores_are_active() -> None:
    selector, problem = selector_of(Case(selection="predictor", density=0.0))
    tokens = problem.feeds["input"].copy()
    assert not selector.select(tokens).any()
    tokens[0, 3] = np.nan
    assert selector.select(tokens).all()
    assert replace(selector, predictor_activation="relu").select(tokens).all()


def test_relu_predictors_apply_it_between_their_matmuls() -> None:
    selector, problem = selector_of(Case(lead=(9,), selection="predictor", density=0.4))
    assert selector.predictor_down is not None
    assert selector.predictor_up is not None
    low = problem.feeds["input"].astype(float) @ selector.predictor_down.T.astype(float)
    expected = np.maximum(low, 0) @ selector.predictor_up.T.astype(float)
    found = replace(selector, predictor_activation="relu").scores(problem.feeds["input"])
    np.testing.assert_allclose(found, expected, atol=1e-4)


ONE = np.ones(1, np.float32)
DOWN, UP = np.ones((2, 8), np.float32), np.ones((5, 2), np.float32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ONE.astype(np.float64),), r"threshold is float64 \[1\], expected fp32 of rank 1"),
        ((np.ones((1, 1), np.float32),), r"threshold is float32 \[1, 1\]"),
        ((np.ones(0, np.float32),), r"threshold is float32 \[0\], expected fp32 of rank 1, not empty"),
        ((np.array([np.nan], np.float32),), "threshold has values that are not finite"),
        ((ONE, DOWN), "without predictor_up"),
        ((ONE, None, UP), "without predictor_down"),
        ((ONE, DOWN * np.inf, UP), "predictor_down has values that are not finite"),
        ((ONE, DOWN, UP * np.nan), "predictor_up has values that are not finite"),
        ((ONE, DOWN[:1], UP), r"predictor_down \[1, 8\] and predictor_up \[5, 2\]"),
        ((ONE.repeat(4), DOWN, UP), "threshold has 4 values, expected 1 or one for each of 5 neurons"),
        ((ONE, DOWN, UP, "gelu"), "predictor_activation is 'gelu', expected none or relu"),
    ],
)
def test_malformed_selectors_are_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        NeuronSelector(*arguments)


def test_tokens_of_another_size_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"inputs are \[3, 7\], expected \[tokens, 8\]"):
        NeuronSelector(ONE, DOWN, UP).select(np.ones((3, 7), np.float32))


def test_missing_activations_are_refused() -> None:
    with pytest.raises(ArgumentError, match="compares activations; give them"):
        NeuronSelector(ONE).select(np.ones((3, 7), np.float32))


def test_activations_of_another_number_of_neurons_are_refused() -> None:
    with pytest.raises(
        ArgumentError, match=r"activations are \[3, 5\], expected \[tokens, neurons\] with 4 thresholds"
    ):
        NeuronSelector(ONE.repeat(4)).select(np.ones((3, 7), np.float32), np.ones((3, 5), np.float32))


def test_quality_counts_pairs() -> None:
    active = np.array([[1, 1, 0, 0], [1, 0, 0, 0]], bool)
    selected = np.array([[1, 0, 1, 0], [1, 1, 0, 0]], bool)
    found = measure_selection(selected, active)
    assert (found.precision, found.recall, found.active_share, found.selected_share) == (2 / 4, 2 / 3, 3 / 8, 4 / 8)
    assert found.f1 == pytest.approx(4 / 7)


def test_quality_without_active_or_selected_neurons() -> None:
    none, all_of_them = np.zeros((2, 3), bool), np.ones((2, 3), bool)
    assert measure_selection(none, none).recall == measure_selection(none, all_of_them).precision == 1
    assert measure_selection(none, all_of_them).recall == measure_selection(all_of_them, none).precision == 0
    assert measure_selection(none, all_of_them).f1 == 0


@pytest.mark.parametrize("shape", [(2, 4), (0, 3)])
def test_quality_of_other_shapes_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ArgumentError, match="expected one shape, not empty"):
        measure_selection(np.zeros(shape, bool), np.zeros((0 if shape[0] == 0 else 2, 3), bool))


def test_relative_output_error() -> None:
    rng = np.random.default_rng(1)
    expected, found = rng.standard_normal((2, 5, 7)).astype(np.float16)
    difference = found.astype(float) - expected.astype(float)
    wanted = np.sqrt((difference**2).sum() / (expected.astype(float) ** 2).sum())
    assert relative_output_error(expected, found) == pytest.approx(wanted, rel=1e-12)
    zeros = np.zeros((5, 7))
    assert relative_output_error(zeros, zeros) == 0
    assert relative_output_error(zeros, found) == np.inf
    assert relative_output_error(expected, found * np.float16(np.nan)) == np.inf
    with pytest.raises(ArgumentError, match=r"outputs are \[5, 7\], expected \[7, 5\]"):
        relative_output_error(expected.T, found)
