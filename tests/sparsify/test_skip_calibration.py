# SPDX-License-Identifier: Apache-2.0
"""Calibration of thresholds, and cosines of outputs, against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from stof.arguments.threshold_kinds import SKIP_SCORES
from stof.thresholds.calibrate import Calibration, Ladder, Trial
from stof.thresholds.calibrate import calibrate as calibrate_ladders
from stof.thresholds.cosines import CosineMeter, row_cosines

LADDER = [2.0**i for i in range(-6, 15)]
RUNS_OF_LAYER = Ladder(SKIP_SCORES.ladder, SKIP_SCORES.spare).most_runs
RUNS_TOGETHER = len(LADDER) + 1


def calibrate(
    layers: Sequence[str],
    run: Callable[[str, float], Trial],
    loss: Callable[[Mapping[str, float]], float],
    allowed: float,
) -> Calibration[str]:
    """With the thresholds of skip by score."""
    assert list(SKIP_SCORES.ladder) == LADDER
    return calibrate_ladders(dict.fromkeys(layers, Ladder(LADDER)), run, loss, allowed)


class Model:
    """Layers whose loss alone is ``factors`` times the threshold; together they lose ``more`` times the sum.

    From the threshold ``full`` on no more is skipped.
    """

    def __init__(
        self, factors: Mapping[str, float], more: float = 1.0, share: float = 0.5, full: float = 1 << 14
    ) -> None:
        self.factors, self.more, self.share, self.full = factors, more, share, full
        self.alone: list[tuple[str, float]] = []
        self.together: list[float] = []

    def run(self, layer: str, c: float) -> Trial:
        self.alone.append((layer, c))
        return Trial(self.factors[layer] * c, self.share * min(1.0, (math.log2(c) + 7) / (math.log2(self.full) + 7)))

    def loss(self, thresholds: Mapping[str, float]) -> float:
        self.together.append(self.more * sum(self.factors[n] * c for n, c in thresholds.items()))
        return self.together[-1]


@pytest.mark.parametrize("allowed", [1e-3, 0.1, 7.0])
def test_each_layer_gets_the_largest_threshold_in_its_part(allowed: float) -> None:
    rng = np.random.default_rng(3)
    factors = {f"layer {i}": float(x) for i, x in enumerate(10.0 ** rng.uniform(-5, 1, 12))}
    model = Model(factors)
    found = calibrate(list(factors), model.run, model.loss, allowed)
    bound = 0.5 * allowed / 12
    for name, factor in factors.items():
        fitting = [c for c in LADDER if factor * c <= bound]
        assert found.thresholds[name] == max(fitting, default=0.0)
        assert (name in found.reasons) == (not fitting)
        assert len([1 for layer, _ in model.alone if layer == name]) <= RUNS_OF_LAYER
    assert math.ceil(math.log2(len(LADDER) + 1)) == RUNS_OF_LAYER
    assert len(model.together) == 1
    assert model.loss(found.thresholds) <= 0.5 * allowed


@pytest.mark.parametrize("more", [2.1, 50.0, 1e30])
def test_all_go_down_one_step_until_they_fit_together(more: float) -> None:
    model = Model({"a": 1e-3, "b": 0.5}, more)
    found = calibrate(["a", "b"], model.run, model.loss, 0.2)
    before = {name: max(c for c in LADDER if factor * c <= 0.05) for name, factor in model.factors.items()}
    halvings = sum(loss > 0.1 for loss in model.together)
    assert halvings >= 1
    assert len(model.together) <= RUNS_TOGETHER
    for name, c in before.items():
        halved = c / 2**halvings
        assert found.thresholds[name] in ((halved,) if halved >= LADDER[0] else (0.0,))
    if more == 1e30:
        assert set(found.thresholds.values()) == {0.0}
        assert all("all layers together" in reason for reason in found.reasons.values())


def test_a_smaller_threshold_that_skips_as_much_is_taken() -> None:
    model = Model({"a": 1e-9}, full=8.0)
    found = calibrate(["a"], model.run, model.loss, 0.2)
    tried = sorted(c for _, c in model.alone)
    assert tried[-1] == LADDER[-1]
    assert found.thresholds["a"] == min(c for c in tried if c >= 8.0) < tried[-1]


@pytest.mark.parametrize("spare", [1, 2, 5])
def test_a_ladder_with_spare_rungs(spare: int) -> None:
    """So many below the largest that fits; at the end of the ladder, the least one."""
    for allowed, largest in ((0.2, 64.0), (0.2 / 2**11, 2.0**-5)):
        model = Model({"a": 0.1 / 64})
        found = calibrate_ladders({"a": Ladder(LADDER, spare)}, model.run, model.loss, allowed)
        expected = max(LADDER.index(largest) - spare, 0)
        assert found.thresholds == {"a": LADDER[expected]}
        assert len(model.alone) <= Ladder(LADDER, spare).most_runs
    model = Model({"a": 0.1 / 64})
    alone = calibrate_ladders(
        {"a": Ladder(LADDER, spare)}, lambda n, c: Trial(model.factors[n] * c, float(c >= 64.0)), model.loss, 0.2
    )
    assert alone.thresholds == {"a": 0.0}
    assert (
        alone.reasons["a"]
        == f"c = {64 / 2**spare:g} leaves out nothing here, and larger ones are too near 64, the largest that fits"
    )


def test_a_layer_that_skips_nothing_gets_no_threshold() -> None:
    model = Model({"a": 1e-9}, share=0.0)
    found = calibrate(["a"], model.run, model.loss, 0.2)
    assert found.thresholds == {"a": 0.0}
    assert found.reasons["a"] == "c = 16384 leaves out nothing here, and no larger one is tried"
    model = Model({"a": 1.0}, share=0.0)
    found = calibrate(["a"], model.run, model.loss, 1.0)
    assert found.reasons["a"] == "c = 0.5 leaves out nothing here, and a larger one loses more than the layer may"


def test_a_loss_that_is_no_number_is_too_large() -> None:
    found = calibrate(["a"], lambda n, c: Trial(math.nan, 0.5), lambda c: 0.0, 0.2)
    assert found.thresholds == {"a": 0.0}
    found = calibrate(["a"], lambda n, c: Trial(0.0, 0.5), lambda c: math.nan, 0.2)
    assert found.thresholds == {"a": 0.0}


def plain_cosine(one: np.ndarray, other: np.ndarray) -> float:
    x, y = ([float(v) for v in a.ravel()] for a in (one, other))
    products = math.fsum(a * b for a, b in zip(x, y, strict=True))
    return products / math.sqrt(math.fsum(a * a for a in x) * math.fsum(b * b for b in y))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
def test_cosines_of_rows(dtype: type) -> None:
    rng = np.random.default_rng(0)
    for shape, rows in (((2, 5, 7), 10), ((3, 6), 3), ((2, 3, 4, 5), 2), ((9,), 1)):
        one, noise = rng.standard_normal((2, *shape))
        one, other = one.astype(dtype), (one + 0.3 * noise).astype(dtype)
        expected = [plain_cosine(x, y) for x, y in zip(one.reshape(rows, -1), other.reshape(rows, -1), strict=True)]
        np.testing.assert_allclose(row_cosines(one, other), expected, rtol=1e-12)


def test_cosines_of_strange_rows() -> None:
    one = np.random.default_rng(1).standard_normal((1, 9, 4)).astype(np.float32)
    other = one.copy()
    one[0, 0] = other[0, 0] = 0
    other[0, 1] = 0
    one[0, 2, 1] = other[0, 2, 1] = np.nan
    other[0, 3, 1] = np.inf
    other[0, 4] *= -1
    one[0, 5] *= np.float32(1e37)
    other[0, 5] *= np.float32(1e-37)
    np.testing.assert_allclose(row_cosines(one, other)[0:6], [1, 0, 1, -1, -1, 1], atol=1e-6)
    np.testing.assert_allclose(row_cosines(one, other)[6:], 1, atol=1e-12)
    assert row_cosines(one, other[:, :3]).tolist() == [-1.0]
    assert row_cosines(one[:0], other[:0]).size == 0


def test_the_least_output_is_the_loss() -> None:
    rng = np.random.default_rng(2)
    meter = CosineMeter(["near", "far"])
    expected: dict[str, list[np.ndarray]] = {"near": [], "far": []}
    for length in (5, 9):
        one, noise = rng.standard_normal((2, 1, length, 6))
        for name, share in (("near", 0.1), ("far", 0.6)):
            expected[name].append(row_cosines(one, one + share * noise))
        meter.add([one, one], [one + 0.1 * noise, one + 0.6 * noise])
    means = {name: np.concatenate(found).mean() for name, found in expected.items()}
    assert meter.means() == pytest.approx(means)
    assert meter.loss() == pytest.approx(1 - means["far"])
