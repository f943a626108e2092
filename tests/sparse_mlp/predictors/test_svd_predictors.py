# SPDX-License-Identifier: Apache-2.0
"""Predictors from the truncated SVD of the gate, against fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.sparse_mlp.predictors.random_gates import RandomGate, draw_gate

from stof.errors import ArgumentError
from stof.sparse_mlp.predictors import low_rank
from stof.sparse_mlp.predictors.fit_tokens import choose_held_out_tokens
from stof.sparse_mlp.predictors.low_rank import approximate_weight, measure_matmul_errors
from stof.sparse_mlp.predictors.quality import measure_selection
from stof.sparse_mlp.predictors.selection_target import fit_margin_threshold
from stof.sparse_mlp.predictors.svd import fit_svd_selector


def squared_error(gate: RandomGate, up: np.ndarray, down: np.ndarray, tokens: np.ndarray) -> float:
    """Of the approximated matmuls, relative, in fp64."""
    exact = tokens.astype(float) @ gate.weight.T.astype(float)
    found = tokens.astype(float) @ down.T.astype(float) @ up.T.astype(float)
    return float(np.square(exact - found).sum() / np.square(exact).sum())


def smallest_error(weight: np.ndarray, tokens: np.ndarray, rank: int) -> float:
    """That of the best factors there are, on the tokens themselves: by the SVD of the matmul."""
    values = np.linalg.svd(tokens.astype(float) @ weight.T.astype(float), compute_uv=False)
    return float(np.square(values[rank:]).sum() / np.square(values).sum())


@pytest.mark.parametrize("neurons", [30, 160])  # fewer and more than the size of a token
def test_factors_minimize_the_error_of_matmuls(neurons: int) -> None:
    gate = draw_gate(neurons=neurons)
    up, down = approximate_weight(gate.weight, gate.tokens, gate.tokens[:0], 8, (0.0,))
    assert up.shape == (neurons, 8)
    assert down.shape == (8, 48)
    best = smallest_error(gate.weight, gate.tokens, 8)
    assert squared_error(gate, up, down, gate.tokens) == pytest.approx(best, rel=1e-3)


def test_the_plain_svd_minimizes_the_error_of_the_weight() -> None:
    gate = draw_gate()
    up, down = approximate_weight(gate.weight, gate.tokens, gate.tokens[:0], 8, (1.0,))
    values = np.linalg.svd(gate.weight.astype(float), compute_uv=False)
    error = np.square(gate.weight.astype(float) - up.astype(float) @ down.astype(float)).sum()
    assert error == pytest.approx(np.square(values[8:]).sum(), rel=1e-4)


@pytest.mark.parametrize("shrinkage", [0.0, 1.0])
def test_the_randomized_decomposition_is_as_good(shrinkage: float, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = draw_gate(tokens=300, neurons=100, size=80)
    factors = []
    for exact in (1000, 0):
        monkeypatch.setattr(low_rank, "_EXACT", exact)
        factors.append(approximate_weight(gate.weight, gate.tokens, gate.tokens[:0], 12, (shrinkage,)))
    if shrinkage:
        errors = [np.square(gate.weight - up @ down).sum() for up, down in factors]
    else:
        errors = [squared_error(gate, up, down, gate.tokens) for up, down in factors]
    assert errors[1] == pytest.approx(errors[0], rel=0.02)


def test_tokens_that_are_correlated_need_fewer_ranks() -> None:
    """The reason for the activation-aware SVD: the plain one loses five times as much of the matmuls with new tokens."""
    gate = draw_gate(tokens=1600)
    tokens, new = gate.tokens[:1200], gate.tokens[1200:]
    mean = tokens.mean(0)
    errors = {}
    for shrinkage in (0.02, 1.0):
        up, down = approximate_weight(gate.weight, tokens - mean, new[:0], 8, (shrinkage,))
        errors[shrinkage] = squared_error(gate, up, down, new - mean)
    assert errors[0.02] < 0.3
    assert errors[1.0] > 2 * errors[0.02]


def test_the_shrinkage_follows_held_out_tokens() -> None:
    """Forty tokens of 48 values that are not correlated say nothing of the next ones: then the plain SVD is better."""
    gate = draw_gate(tokens=840, decay=0.0)
    tokens = gate.tokens - gate.tokens.mean(0)
    few, new = tokens[:40], tokens[40:]
    plain = approximate_weight(gate.weight, few, new[:0], 8, (1.0,))
    chosen = approximate_weight(gate.weight, few, new, 8)
    np.testing.assert_array_equal(chosen[1], plain[1])
    correlated = draw_gate()
    aware = approximate_weight(correlated.weight, correlated.tokens, correlated.tokens, 8)
    plain = approximate_weight(correlated.weight, correlated.tokens, correlated.tokens[:0], 8, (1.0,))
    assert not np.array_equal(aware[1], plain[1])


def test_errors_of_neurons() -> None:
    gate = draw_gate()
    up, down = approximate_weight(gate.weight, gate.tokens, gate.tokens[:0], 8)
    wide = gate.tokens.astype(float)
    errors = wide @ gate.weight.T.astype(float) - wide @ down.T.astype(float) @ up.T.astype(float)
    expected = np.sqrt(np.square(errors).mean(0))
    np.testing.assert_allclose(measure_matmul_errors(gate.weight, up, down, gate.tokens), expected, rtol=1e-4)


@pytest.mark.parametrize("by_neuron", [False, True])
def test_thresholds_reach_the_recall(by_neuron: bool) -> None:
    gate = draw_gate(tokens=2400)
    selector = fit_svd_selector(
        gate.weight, gate.bias, gate.tokens[:2000], gate.active[:2000], 10, recall=0.95, by_neuron=by_neuron
    )
    assert selector.rank == 10
    quality = measure_selection(selector.select(gate.tokens[2000:]), gate.active[2000:])
    assert quality.recall == pytest.approx(0.95, abs=0.02)
    assert quality.selected_share < 3 * quality.active_share


@pytest.mark.parametrize("by_neuron", [False, True])
def test_thresholds_reach_the_share(by_neuron: bool) -> None:
    gate = draw_gate(tokens=2400)
    known, new = slice(0, 2000), slice(2000, None)
    selector = fit_svd_selector(
        gate.weight, gate.bias, gate.tokens[known], gate.active[known], 10, active_share=0.2, by_neuron=by_neuron
    )
    quality = measure_selection(selector.select(gate.tokens[new]), gate.active[new])
    assert quality.selected_share == pytest.approx(0.2, abs=0.015)
    assert quality.recall > 0.85


def test_thresholds_that_follow_errors_select_fewer() -> None:
    gate = draw_gate(tokens=3000, neurons=300)
    shares = [
        fit_svd_selector(gate.weight, gate.bias, gate.tokens, gate.active, 6, recall=0.97, by_neuron=b)
        .select(gate.tokens)
        .mean()
        for b in (False, True)
    ]
    assert shares[1] < 0.97 * shares[0]


def test_the_full_rank_predicts_exactly() -> None:
    gate = draw_gate(tokens=400)
    for bias in (gate.bias, None):
        active = gate.tokens.astype(float) @ gate.weight.T.astype(float) + (0 if bias is None else bias) > 0
        selector = fit_svd_selector(gate.weight, bias, gate.tokens, active, 48, recall=1.0)
        quality = measure_selection(selector.select(gate.tokens), active)
        assert quality.recall > 0.999
        assert quality.precision > 0.99


def test_active_neurons_need_not_be_those_above_zero() -> None:
    """Neurons of a SiLU model whose gate value is above 1 matter."""
    gate = draw_gate(tokens=1600)
    active = gate.tokens.astype(float) @ gate.weight.T.astype(float) + gate.bias > 1
    selector = fit_svd_selector(gate.weight, gate.bias, gate.tokens, active, 24, recall=0.95)
    quality = measure_selection(selector.select(gate.tokens), active)
    assert quality.recall > 0.93
    assert quality.precision > 0.5


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_few_tokens_suffice_for_a_selector(tokens: int) -> None:
    gate = draw_gate(tokens=tokens)
    selector = fit_svd_selector(gate.weight, gate.bias, gate.tokens, gate.active, 4, recall=1.0)
    assert np.isfinite(selector.threshold).all()
    seen = choose_held_out_tokens(tokens, 4) if tokens >= 4 else np.ones(tokens, bool)
    lost = gate.active[seen] & ~selector.select(gate.tokens[seen])
    assert lost.sum() <= 1  # the one at the threshold, by rounding


def test_tokens_of_zeros_give_a_selector() -> None:
    gate = draw_gate(tokens=8)
    tokens = np.zeros_like(gate.tokens)
    active = np.broadcast_to(gate.bias > 0, (8, 160)).copy()
    selector = fit_svd_selector(gate.weight, gate.bias, tokens, active, 4)
    assert np.isfinite(selector.threshold).all()


def test_neurons_that_are_never_active_are_not_selected() -> None:
    gate = draw_gate()
    selector = fit_svd_selector(gate.weight, gate.bias, gate.tokens, np.zeros_like(gate.active), 4)
    assert selector.select(gate.tokens).mean() < 0.01


def test_a_selector_is_repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "_EXACT", 0)
    gate = draw_gate()
    one, other = (fit_svd_selector(gate.weight, gate.bias, gate.tokens, gate.active, 6) for _ in range(2))
    np.testing.assert_array_equal(one.threshold, other.threshold)
    np.testing.assert_array_equal(one.predictor_up, other.predictor_up)


def test_the_cut_is_exact() -> None:
    rng = np.random.default_rng(5)
    margins = rng.standard_normal((40, 30)).astype(np.float32)
    active = rng.random((40, 30)) < 0.2
    pieces = [(margins[:7], active[:7]), (margins[7:], active[7:])]
    for recall in (0.0, 0.5, 0.9, 1.0):
        cut = fit_margin_threshold(lambda: pieces, None, recall)
        kept = int(np.ceil(recall * active.sum()))
        assert np.count_nonzero((margins > cut) & active) == kept
    for share in (0.0, 0.25, 1.0):
        assert np.count_nonzero(margins > fit_margin_threshold(lambda: pieces, share, None)) == int(share * 1200)


GATE = draw_gate(tokens=6)
GOOD: dict[str, Any] = {
    "gate_weight": GATE.weight, "gate_bias": GATE.bias, "inputs": GATE.tokens, "active": GATE.active, "rank": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_weight": GATE.weight.astype(float)}, r"gate_weight is float64 \[160, 48\], expected fp32 \[F, K\]"),
        ({"gate_weight": GATE.weight[0]}, r"gate_weight is float32 \[48\]"),
        ({"gate_weight": GATE.weight * np.nan}, "gate_weight has values that are not finite"),
        ({"gate_bias": GATE.bias[:9]}, r"gate_bias is float32 \[9\], expected fp32 \[160\]"),
        ({"gate_bias": GATE.bias * np.inf}, "gate_bias has values that are not finite"),
        ({"inputs": GATE.tokens[:0], "active": GATE.active[:0]}, r"inputs are float32 \[0, 48\].* with a token"),
        ({"inputs": GATE.tokens.astype(np.float16)}, r"inputs are float16"),
        ({"inputs": GATE.tokens * np.nan}, "inputs have values that are not finite"),
        ({"inputs": GATE.tokens[:, :9]}, r"inputs are \[6, 9\], expected \[tokens, 48\]"),
        ({"active": GATE.active[:5]}, r"active is bool \[5, 160\], expected bool \[6, neurons\]"),
        ({"active": GATE.active.astype(np.int8)}, "active is int8"),
        ({"active": GATE.active[:, :9]}, r"active is \[6, 9\], expected \[tokens, 160\]"),
        ({"rank": 0}, "rank is 0, expected 1 to 48"),
        ({"rank": 49}, "rank is 49, expected 1 to 48"),
        ({"recall": 1.5}, "recall is 1.5, expected a share"),
        ({"active_share": -0.5}, "active_share is -0.5, expected a share"),
        ({"active_share": 0.5, "recall": 0.5}, "the threshold can reach one of them"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        fit_svd_selector(**{**GOOD, **changes})
