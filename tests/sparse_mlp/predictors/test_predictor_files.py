# SPDX-License-Identifier: Apache-2.0
"""Predictor files of PowerInfer, histograms of TEAL, and our own .npz."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.sparse_mlp.predictors.torch_files import save

from stof.errors import ArgumentError
from stof.files import archives
from stof.sparse_mlp.predictors.powerinfer import (
    read_powerinfer,
    read_powerinfer_statistics,
    with_normalized_inputs,
)
from stof.sparse_mlp.predictors.predictor_files import read_npz, write_npz
from stof.sparse_mlp.predictors.selector import NeuronSelector
from stof.sparse_mlp.predictors.teal import read_teal

RNG = np.random.default_rng(11)
DOWN, UP = RNG.standard_normal((6, 16)).astype(np.float16), RNG.standard_normal((40, 6)).astype(np.float16)
TOKENS = RNG.standard_normal((9, 16)).astype(np.float32)


def powerinfer_folder(folder: Path, layers: int = 3, config: object = None) -> Path:
    for i in range(layers):
        save(folder / f"model_{i}.pt", {"fc1.weight": DOWN * np.float16(1 + i), "fc2.weight": UP})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("threshold", [None, 0.0, 0.75, -2])
def test_powerinfer_predictors(tmp_path: Path, threshold: float | None) -> None:
    folder = powerinfer_folder(tmp_path, config=None if threshold is None else {"sparse_threshold": threshold})
    found = read_powerinfer(folder)
    assert len(found) == 3
    for i, selector in enumerate(found):
        low = TOKENS.astype(float) @ (DOWN * np.float16(1 + i)).T.astype(float)
        scores = np.maximum(low, 0) @ UP.T.astype(float)
        expected = scores >= (threshold or 0.0)
        np.testing.assert_array_equal(selector.select(TOKENS), expected)
        assert 0 < expected.mean() < 1


def test_scores_at_the_threshold_of_powerinfer_are_active(tmp_path: Path) -> None:
    """Its rule is score >= threshold: a token whose hidden values are all cut to 0 activates all neurons."""
    for threshold in (0.0, 3.0):
        selector = read_powerinfer(powerinfer_folder(tmp_path, 1, {"sparse_threshold": threshold}))[0]
        scores = selector.scores(np.zeros((1, 16), np.float32)) + np.float32(threshold)
        assert (scores > selector.threshold).all()
        assert not (scores * np.float32(1 - 1e-6) - np.float32(1e-6) > selector.threshold).any()
        assert abs(selector.threshold[0]) >= np.finfo(np.float32).tiny


def test_powerinfer_predictors_of_normalized_inputs(tmp_path: Path) -> None:
    selector = read_powerinfer(powerinfer_folder(tmp_path, 1))[0]
    weight = RNG.uniform(0.5, 2, 16).astype(np.float32)
    normalized = TOKENS / np.sqrt(np.square(TOKENS).mean(1, keepdims=True)) * weight
    found = with_normalized_inputs(selector, weight).select(normalized.astype(np.float32))
    np.testing.assert_array_equal(found, selector.select(TOKENS))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (np.ones(15, np.float32), r"is \[15\], expected one value other than 0 for each column"),
        (np.zeros(16, np.float32), "expected one value other than 0"),
        (np.full(16, np.nan, np.float32), "expected one value other than 0"),
    ],
)
def test_wrong_normalizations_are_refused(tmp_path: Path, weight: np.ndarray, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        with_normalized_inputs(read_powerinfer(powerinfer_folder(tmp_path, 1))[0], weight)


def test_normalization_needs_a_threshold_of_zero(tmp_path: Path) -> None:
    selector = read_powerinfer(powerinfer_folder(tmp_path, 1, {"sparse_threshold": 0.5}))[0]
    with pytest.raises(ArgumentError, match="the threshold is not 0"):
        with_normalized_inputs(selector, np.ones(16, np.float32))


def test_powerinfer_statistics(tmp_path: Path) -> None:
    counts = [RNG.integers(0, 900, 40).astype(d) for d in ("i8", "f4")]
    for i, values in enumerate(counts):
        save(tmp_path / f"activation_{i}.pt", values)
    found = read_powerinfer_statistics(tmp_path)
    for values, expected in zip(found, counts, strict=True):
        assert values.dtype == np.float32
        np.testing.assert_array_equal(values, expected)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"fc1.weight": DOWN}, r"model_0\.pt has the tensors fc1\.weight, expected fc1\.weight and fc2\.weight"),
        ({}, r"model_0\.pt has the tensors none, expected"),
        (
            {"fc1.weight": DOWN, "fc2.weight": UP, "fc3.weight": UP},
            r"has the tensors fc1\.weight, fc2\.weight, fc3\.weight",
        ),
        (
            {"fc1.weight": DOWN[0], "fc2.weight": UP},
            r"fc1\.weight of .*model_0\.pt is float16 \[16\], expected floats of rank 2",
        ),
        ({"fc1.weight": DOWN.astype("i8"), "fc2.weight": UP}, r"fc1\.weight of .* is int64 \[6, 16\], expected floats"),
        (
            {"fc1.weight": DOWN, "fc2.weight": UP[:, :5].copy()},
            r"predictor_down \[6, 16\] and predictor_up \[40, 5\]",
        ),
        ({"fc1.weight": DOWN, "fc2.weight": UP * np.float16(np.inf)}, "predictor_up has values that are not finite"),
        ({"fc1.weight": DOWN.astype("f8") * 1e300, "fc2.weight": UP}, "predictor_down has values that are not finite"),
    ],
)
def test_other_powerinfer_tensors_are_refused(tmp_path: Path, tensors: dict[str, np.ndarray], message: str) -> None:
    save(tmp_path / "model_0.pt", tensors)
    with pytest.raises(ArgumentError, match=message):
        read_powerinfer(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"sparse_threshold": "0"}', "has no number as its sparse_threshold"),
        ('{"sparse_threshold": true}', "has no number"),
        ('{"sparse_threshold": NaN}', "has no number"),
        ('{"sparse_threshold": 1e39}', "has no number"),
        ("[1]", "has no number"),
        ("{", "is no JSON"),
        ("[" * 100000, "is no JSON"),
    ],
)
def test_other_powerinfer_configurations_are_refused(tmp_path: Path, config: str, message: str) -> None:
    powerinfer_folder(tmp_path, 1)
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ArgumentError, match=rf"the configuration .*config\.json {message}"):
        read_powerinfer(tmp_path)


def test_a_missing_layer_is_refused(tmp_path: Path) -> None:
    powerinfer_folder(tmp_path)
    (tmp_path / "model_1.pt").unlink()
    with pytest.raises(ArgumentError, match=r"has 2 files model_N\.pt, but model_1\.pt is missing"):
        read_powerinfer(tmp_path)


def test_a_folder_without_predictors_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"has 0 files model_0\.pt, model_1\.pt \.\.\., expected 1 to 1000"):
        read_powerinfer(tmp_path)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"is no folder; name the one with model_0\.pt"):
        read_powerinfer(tmp_path / "none")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"a": np.ones(4, "f4")}, "are a dictionary, expected one tensor"),
        (np.ones((2, 2), "f4"), r"is float32 \[2, 2\], expected numbers of rank 1"),
        (np.array([1, -1], "f4"), "have values that are no counts"),
        (np.array([1, np.nan], "f4"), "have values that are no counts"),
    ],
)
def test_other_statistics_are_refused(tmp_path: Path, tensors: Any, message: str) -> None:
    save(tmp_path / "activation_0.pt", tensors)
    with pytest.raises(ArgumentError, match=message):
        read_powerinfer_statistics(tmp_path)


def histogram_of(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As TEAL makes them: the outer bins hold a hundredth of the values each, the others have one width."""
    ordered = np.sort(values)
    inner = np.linspace(ordered[len(ordered) // 100], ordered[-(len(ordered) // 100)], 999)
    edges = np.concatenate([ordered[:1], inner, ordered[-1:]])
    counts, _ = np.histogram(values, edges)
    return counts.astype(np.float32), ((edges[:-1] + edges[1:]) / 2).astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / (1 + np.exp(-x)))


ACTIVATED = silu(RNG.normal(-0.5, 1, 100_000))
INPUTS = RNG.standard_normal(5000)
HIDDEN = ACTIVATED * RNG.standard_normal(100_000)


def teal_tensors(gate: bool = True) -> dict[str, np.ndarray]:
    named = {"h1": INPUTS, "h2": HIDDEN, **({"h1.5": ACTIVATED} if gate else {})}
    found = {}
    for name, values in named.items():
        found[name], found[f"{name}_centers"] = histogram_of(values)
    return found


@pytest.mark.parametrize("inner", ["", "histograms"])
def test_teal_thresholds(tmp_path: Path, inner: str) -> None:
    for i, gate in enumerate((True, False)):
        save(tmp_path / inner / f"layer-{i}" / "mlp" / "histograms.pt", teal_tensors(gate))
    layers = read_teal(tmp_path)
    assert len(layers) == 2
    assert layers[0].gate is not None
    assert layers[1].gate is None
    for histogram, values in ((layers[0].gate, ACTIVATED), (layers[1].hidden, HIDDEN)):
        for share in (0.05, 0.25, 0.5, 0.9):
            threshold = histogram.threshold(share)
            assert np.mean(np.abs(values) > threshold) == pytest.approx(share, abs=0.01)
            assert histogram.share_above(threshold) <= share
            selector = histogram.selector(share)
            assert not selector.has_predictor
            assert selector.threshold[0] == pytest.approx(threshold)


def test_teal_thresholds_at_the_ends(tmp_path: Path) -> None:
    save(tmp_path / "layer-0" / "mlp" / "histograms.pt", teal_tensors())
    histogram = read_teal(tmp_path)[0].inputs
    zeros = np.zeros((1, 4), np.float32)
    assert histogram.selector(1.0).select(zeros, zeros).all()
    assert histogram.threshold(0.0) == pytest.approx(np.abs(INPUTS).max(), rel=1e-3)
    with pytest.raises(ArgumentError, match=r"active_share is 1\.5, expected a share"):
        histogram.threshold(1.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"h1": None}, r"layer-0/mlp/histograms\.pt has the tensors .*, expected h1"),
        ({"h2_centers": None}, "expected h2_centers"),
        (
            {"h2": np.ones((5, 5), "f4")},
            r"h2 of the TEAL histogram .* is float32 \[5, 5\], expected 2 to 1048576 numbers",
        ),
        ({"h2": np.ones(1, "f4")}, r"h2 of .* is float32 \[1\], expected"),
        ({"h2": np.ones(5, "f4")}, "h2 of .* has 5 counts for 1000 bins"),
        ({"h2": np.full(1000, -1, "f4")}, "h2 of .* has counts below 0, or none above it"),
        ({"h2": np.zeros(1000, "f4")}, "h2 of .* has counts below 0, or none above it"),
        ({"h2": np.full(1000, np.nan, "f4")}, "h2 of .* has values that are not finite"),
        ({"h1_centers": np.linspace(0, 1e300, 1000)}, "h1_centers of .* has values that are not finite in fp32"),
        ({"h1.5_centers": -np.arange(1000, dtype="f4")}, r"h1\.5_centers of .* are not ascending"),
    ],
)
def test_other_histograms_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tensors = {n: t for n, t in {**teal_tensors(), **changes}.items() if t is not None}
    save(tmp_path / "layer-0" / "mlp" / "histograms.pt", tensors)
    with pytest.raises(ArgumentError, match=message):
        read_teal(tmp_path)


def test_a_missing_layer_of_histograms_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "layer-1" / "mlp" / "histograms.pt", teal_tensors())
    with pytest.raises(ArgumentError, match="has 1 folders layer-N, but layer-0 is missing"):
        read_teal(tmp_path)


def test_a_folder_without_histograms_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="has 0 folders layer-0, layer-1"):
        read_teal(tmp_path)
    with pytest.raises(ArgumentError, match="is no folder"):
        read_teal(tmp_path / "none")


def own_selectors() -> list[NeuronSelector]:
    one = np.array([0.25], np.float32)
    down, up = DOWN.astype(np.float32), UP.astype(np.float32)
    return [
        NeuronSelector(one),
        NeuronSelector(RNG.standard_normal(40).astype(np.float32), down, up),
        NeuronSelector(one, down, up, "relu"),
    ]


def test_selectors_are_written_and_read(tmp_path: Path) -> None:
    selectors = own_selectors()
    write_npz(tmp_path / "p.npz", selectors)
    for found, expected in zip(read_npz(tmp_path / "p.npz"), selectors, strict=True):
        assert found.predictor_activation == expected.predictor_activation
        for name in ("threshold", "predictor_down", "predictor_up"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


GOOD: dict[str, Any] = {
    "version": np.array(1),
    "0.threshold": np.ones(1, np.float32),
    "0.predictor_down": DOWN.astype(np.float32),
    "0.predictor_up": UP.astype(np.float32),
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": None}, "has no version, expected 1"),
        ({"version": np.array(2)}, "has version 2, expected 1"),
        ({"version": np.array([1])}, r"has version int64 \[1\], expected 1"),
        ({"0.threshold": None}, r"has no array 0\.threshold"),
        ({"0.threshold": np.ones(1)}, r"selector 0 of the predictor file .*: threshold is float64"),
        ({"0.predictor_up": None}, "selector 0 of .*: a predictor without predictor_up"),
        ({"0.bias": np.ones(1)}, r"has an array '0\.bias', expected names such as 0\.threshold"),
        ({"00.threshold": np.ones(1)}, r"has an array '00\.threshold'"),
        ({"2.threshold": np.ones(1, np.float32)}, "has 2 selectors, expected numbers from 0 on, without a gap"),
        ({"0.predictor_relu": np.array(7)}, r"0\.predictor_relu of .* is int64 \[\], expected 1"),
        ({"0.predictor_relu": np.ones(1)}, r"0\.predictor_relu of .* is float64 \[1\], expected 1"),
        ({n: None for n in GOOD if n != "version"}, "has 0 selectors"),
    ],
)
def test_other_predictor_files_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    np.savez(tmp_path / "p.npz", **{n: a for n, a in {**GOOD, **changes}.items() if a is not None})
    with pytest.raises(ArgumentError, match=message):
        read_npz(tmp_path / "p.npz")


def test_a_predictor_file_of_objects_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", **{**GOOD, "0.threshold": np.array([{}], object)})
    with pytest.raises(ArgumentError, match="holds no arrays that can be read"):
        read_npz(tmp_path / "p.npz")


def test_a_compressed_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MOST_BYTES", 1 << 16)
    np.savez_compressed(tmp_path / "p.npz", **{**GOOD, "0.threshold": np.zeros(1 << 15, np.float32)})
    with pytest.raises(ArgumentError, match="bytes of arrays, expected up to 65536"):
        read_npz(tmp_path / "p.npz")
    np.savez(tmp_path / "p.npz", **{**GOOD, "0.threshold": np.zeros(1 << 15, np.float32)})  # no larger than the file
    with pytest.raises(ArgumentError, match="threshold has 32768 values, expected 1 or one for each of 40 neurons"):
        read_npz(tmp_path / "p.npz")


def test_no_selectors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="0 selectors, expected 1 to 1000"):
        write_npz(tmp_path / "p.npz", [])


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"the predictor file .*p\.npz cannot be written"):
        write_npz(tmp_path / "none" / "p.npz", own_selectors())
