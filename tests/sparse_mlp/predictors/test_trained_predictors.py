# SPDX-License-Identifier: Apache-2.0
"""Predictors by logistic regression: gradients against fp64 differences, targets, limits, repeatability."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.sparse_mlp.predictors.random_gates import draw_gate

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors import trained
from stof.sparse_mlp.predictors.quality import measure_selection
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.predictors.svd import fit_svd_selector
from stof.sparse_mlp.predictors.trained import train_selector

GATE = draw_gate(tokens=1500, size=32, neurons=96)
KNOWN, NEW = slice(0, 1100), slice(1100, None)
TOKENS, ACTIVE = GATE.tokens[KNOWN], GATE.active[KNOWN]


def quality_of(selector: NeuronSelector) -> Any:
    return measure_selection(selector.select(GATE.tokens[NEW]), GATE.active[NEW])


def test_steps_follow_the_gradient_of_the_weighted_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    tokens, active = rng.standard_normal((6, 5)).astype(np.float32), rng.random((6, 7)) < 0.4
    arrays = [rng.standard_normal(s).astype(np.float32) for s in ((3, 5), (7, 3), (7,))]

    def loss(values: list[np.ndarray]) -> float:
        down, up, bias = (v.astype(np.float64) for v in values)
        logits = tokens.astype(np.float64) @ down.T @ up.T + bias
        p = 1 / (1 + np.exp(-logits))
        return float(-np.where(active, 2.5 * np.log(p), np.log(1 - p)).sum() / len(tokens))

    monkeypatch.setattr(trained, "_DECAY", 0.0)
    first, second = ([np.zeros_like(a) for a in arrays] for _ in range(2))
    parameters = trained._Parameters(*(a.copy() for a in arrays))
    trained._step(parameters, first, second, tokens, active, 2.5, 1, 1e-3)
    for i, moment in enumerate(first):
        expected = np.empty(moment.shape)
        for index in np.ndindex(moment.shape):
            values = [[a.astype(np.float64) for a in arrays] for _ in range(2)]
            values[0][i][index] += 1e-5
            values[1][i][index] -= 1e-5
            expected[index] = (loss(values[0]) - loss(values[1])) / 2e-5
        np.testing.assert_allclose(moment / 0.1, expected, rtol=1e-3, atol=1e-4)
        # The first step of Adam has the size of the rate in each direction.
        np.testing.assert_allclose(parameters.arrays()[i] - arrays[i], -1e-3 * np.sign(expected), rtol=0.02, atol=1e-6)


def test_training_beats_its_start() -> None:
    untrained, found = (quality_of(train_selector(TOKENS, ACTIVE, 8, epochs=e)).f1 for e in (0, 12))
    assert found > untrained + 0.01
    assert found > 0.6


def test_an_svd_predictor_is_a_start() -> None:
    start = fit_svd_selector(GATE.weight, GATE.bias, TOKENS, ACTIVE, 8, recall=0.95)
    kept = train_selector(TOKENS, ACTIVE, 8, start=start, epochs=0)
    np.testing.assert_array_equal(kept.select(GATE.tokens[NEW]), start.select(GATE.tokens[NEW]))
    assert quality_of(train_selector(TOKENS, ACTIVE, 8, start=start, epochs=12)).f1 > quality_of(start).f1 + 0.02


def test_the_best_epoch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that destroys what was known leaves the start."""
    start = train_selector(TOKENS, ACTIVE, 8, epochs=0, recall=0.95)
    monkeypatch.setattr(trained, "_RATE", 30.0)
    found = train_selector(TOKENS, ACTIVE, 8, epochs=3, recall=0.95)
    np.testing.assert_array_equal(found.select(GATE.tokens[NEW]), start.select(GATE.tokens[NEW]))


def test_active_neurons_that_weigh_more_are_found_more_often() -> None:
    found = [quality_of(train_selector(TOKENS, ACTIVE, 8, epochs=8, positive_weight=w)) for w in (0.5, 2.0, 8.0)]
    assert found[0].recall + 0.05 < found[1].recall < found[2].recall - 0.05
    assert found[0].precision > found[1].precision > found[2].precision


def test_rare_active_neurons_weigh_more_by_default() -> None:
    assert trained._balance_weight(np.eye(20, dtype=bool)) == pytest.approx(9.5)  # 1 : 19 becomes 1 : 2
    assert trained._balance_weight(np.ones((2, 2), bool)) == 1
    assert trained._balance_weight(np.zeros((2, 2), bool)) == 1
    plain, balanced = (train_selector(TOKENS, ACTIVE, 8, epochs=8, positive_weight=w) for w in (1.0, None))
    assert quality_of(balanced).recall > quality_of(plain).recall + 0.03


@pytest.mark.parametrize("recall", [0.9, 0.97])
def test_training_reaches_the_recall(recall: float) -> None:
    assert quality_of(train_selector(TOKENS, ACTIVE, 8, epochs=4, recall=recall)).recall == pytest.approx(
        recall, abs=0.025
    )


def test_training_reaches_the_share() -> None:
    found = quality_of(train_selector(TOKENS, ACTIVE, 8, epochs=4, active_share=0.15))
    assert found.selected_share == pytest.approx(0.15, abs=0.025)


def test_the_seed_decides_the_result() -> None:
    one, same, other = (train_selector(TOKENS, ACTIVE, 8, seed=s, epochs=2) for s in (1, 1, 2))
    np.testing.assert_array_equal(one.predictor_up, same.predictor_up)
    np.testing.assert_array_equal(one.threshold, same.threshold)
    assert not np.array_equal(one.predictor_up, other.predictor_up)


def test_time_is_limited() -> None:
    began = time.monotonic()
    selector = train_selector(TOKENS, ACTIVE, 8, epochs=1_000_000, seconds=0.0)
    assert time.monotonic() - began < 20
    assert quality_of(selector).f1 > 0.3


def test_neurons_that_are_always_or_never_active() -> None:
    active = ACTIVE.copy()
    active[:, :5], active[:, 5:10] = True, False
    selected = train_selector(TOKENS, active, 8, epochs=4).select(GATE.tokens[NEW])
    assert selected[:, :5].mean() > 0.99
    assert selected[:, 5:10].mean() < 0.01


@pytest.mark.parametrize("tokens", [1, 3])
def test_few_tokens_give_a_selector(tokens: int) -> None:
    selector = train_selector(TOKENS[:tokens], ACTIVE[:tokens], 4, epochs=2)
    assert selector.predictor_up is not None
    assert selector.predictor_up.shape == (96, 4)


def test_a_relu_predictor_is_learned_by_a_linear_one() -> None:
    """The operator has no ReLU between the matmuls of a predictor: its selections are trained instead."""
    start = fit_svd_selector(GATE.weight, GATE.bias, TOKENS, ACTIVE, 16, recall=0.95)
    assert start.predictor_down is not None
    assert start.predictor_up is not None
    both = NeuronSelector(
        start.threshold,
        np.concatenate([start.predictor_down, -start.predictor_down]),
        np.concatenate([start.predictor_up, -start.predictor_up], 1),
        "relu",
    )  # relu(x) - relu(-x) is x
    np.testing.assert_allclose(both.scores(TOKENS), start.scores(TOKENS), atol=1e-4)
    found = train_selector(TOKENS, both.select(TOKENS), 16, epochs=12)
    assert measure_selection(found.select(GATE.tokens[NEW]), both.select(GATE.tokens[NEW])).f1 > 0.8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": TOKENS[:0], "active": ACTIVE[:0]}, r"inputs are float32 \[0, 32\].* with a token"),
        ({"inputs": TOKENS * np.nan}, "inputs have values that are not finite"),
        ({"active": ACTIVE[:3]}, r"active is bool \[3, 96\], expected bool \[1100, neurons\]"),
        ({"rank": 33}, "rank is 33, expected 1 to 32"),
        ({"epochs": -1}, "epochs are -1 and seconds 120.0, expected 0 or more"),
        ({"seconds": np.nan}, "epochs are 20 and seconds nan, expected 0 or more"),
        ({"positive_weight": 0.0}, r"positive_weight is 0\.0, expected more than 0, up to 100"),
        ({"positive_weight": 101.0}, r"positive_weight is 101\.0"),
        ({"recall": 2.0}, r"recall is 2\.0, expected a share"),
        ({"recall": 0.5, "active_share": 0.5}, "the threshold can reach one of them"),
        ({"start": NeuronSelector(np.ones(1, np.float32))}, "start is no linear predictor"),
        (
            {"start": NeuronSelector(np.ones(1, np.float32), TOKENS[:4], TOKENS[:96, :4].copy())},
            r"start has predictor_down \[4, 32\] and predictor_up \[96, 4\], expected \[8, 32\] and \[96, 8\]",
        ),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        train_selector(**{"inputs": TOKENS, "active": ACTIVE, "rank": 8, **changes})


def test_relu_predictors_are_no_start() -> None:
    start = fit_svd_selector(GATE.weight, GATE.bias, TOKENS, ACTIVE, 8)
    with pytest.raises(ArgumentError, match="start is no linear predictor"):
        train_selector(TOKENS, ACTIVE, 8, start=replace(start, predictor_activation="relu"))
