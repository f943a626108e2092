# SPDX-License-Identifier: Apache-2.0
"""The benchmark of StofSparseMLP: its grid, its bytes, and a small point of each mode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import cli
from bench.core.point import measure_point
from bench.cpu import sparse_mlp
from bench.cpu.device import CpuDevice
from bench.cpu.sparse_mlp import Layers, MlpCase, MlpPointProblem, candidates_of, describe_record
from bench.cpu.sparse_mlp_reference import quantize
from stof.bench import measure


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_mlp, "SHAPES", {"llama-3b": (96, 256)})
    monkeypatch.setattr(measure, "rates", lambda threads: {"fma_gflops": 1.0, "read_gbps": float(threads)})


def test_the_grid_has_every_mode_and_precision() -> None:
    points = list(sparse_mlp.grid())
    precisions = ("fp32", "bf16", "int4")
    assert {(p.mode, p.precision) for p in points} == {(m, p) for m in sparse_mlp.MODES for p in precisions}
    assert {p.T for p in points} == {1, 4, 16}
    assert len(set(points)) == len(points)


def test_the_grid_has_small_mlps_where_they_are_asked_for() -> None:
    assert {p.shape for p in sparse_mlp.grid()} == {"llama-3b"}
    small = list(sparse_mlp.grid((1,), (0.5,), ["k256"]))
    assert {(p.mode, p.K, p.F) for p in small} == {
        ("plain", 256, 1024), ("gated", 256, 672), ("predicted", 256, 672)
    }  # fmt: skip


def test_touched_bytes_count_rows_scales_and_the_predictor() -> None:
    active = np.zeros((2, 256), bool)
    active[0, 5] = active[1, 5] = active[1, 40] = True
    K, F = 96, 256
    gate = 4 * K * F
    assert MlpCase("llama-3b", "plain", "fp32", 0.1, 2).touched_bytes(active) == gate + 2 * 4 * K
    assert MlpCase("llama-3b", "gated", "fp32", 0.1, 2).touched_bytes(active) == gate + 2 * 2 * 4 * K
    predictor = 4 * 10 * (K + F)
    assert MlpCase("llama-3b", "predicted", "fp32", 0.1, 2).touched_bytes(active) == predictor + 3 * 2 * 4 * K
    assert MlpCase("llama-3b", "gated", "bf16", 0.1, 2).touched_bytes(active) == gate + 2 * 2 * 2 * K
    assert MlpCase("llama-3b", "predicted", "bf16", 0.1, 2).touched_bytes(active) == predictor + 3 * 2 * 2 * K
    row = K / 2 + 4 * K / 32
    int4 = MlpCase("llama-3b", "gated", "int4", 0.1, 2).touched_bytes(active)
    assert int4 == F * row + 2 * row + 2 * K / 2 + 2 * 4 * K  # two groups of 32 neurons have scales


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int4"])
@pytest.mark.parametrize("mode", ["plain", "gated", "predicted"])
def test_a_point_is_checked_and_timed(mode: str, precision: str) -> None:
    layers = Layers("llama-3b", mode, precision, 1, 2)
    for density, tokens in ((0.25, 1), (1.0, 3)):
        case = MlpCase("llama-3b", mode, precision, density, tokens)
        record = measure_point(MlpPointProblem(case, layers), candidates_of(precision), CpuDevice(1, warm=2), 1)
        assert abs(record["density"] - density) < 0.15
        assert record["peers"]["stof"]["us"] > 0
        assert record["peers"]["stof"]["error"] <= sparse_mlp.TOLERANCE[precision]
        if mode != "predicted":
            assert record["peers"]["ort"]["error"] <= sparse_mlp.TOLERANCE[precision]
        assert "error" in record["peers"]["ort"] or mode == "predicted"
        assert "ONNX Runtime" in "".join(describe_record(record))
        assert ("over_fp32" in record) == (precision == "bf16")
        if precision == "bf16":
            assert record["peers"]["stof-fp32"]["error"] <= sparse_mlp.TOLERANCE["fp32"]
            assert record["peers"]["stof"]["error"] > 1e-4


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_a_neuron_within_rounding_of_the_threshold_may_be_active_or_not(precision: str) -> None:
    layers = Layers("llama-3b", "predicted", precision, 1, 1)
    reference = layers.reference()
    x = np.random.default_rng(3).standard_normal((1, 96), np.float32)
    scores, doubt = reference.scores(x)
    order = np.argsort(scores[0])[::-1]
    gate, up = (x.astype(np.float64) @ reference.dequantized(name, slice(None)).T for name in ("gate", "up"))
    weighty = np.abs(np.maximum(gate, 0) * up)[0]
    near = int(max(order[30:60], key=lambda j: weighty[j]))  # relu gives half of the neurons no weight
    certain = int(max(order[:15], key=lambda j: weighty[j]))
    found = reference.expected(x, scores[0, near : near + 1])
    assert near in found.uncertain[0]
    assert certain not in found.uncertain[0]
    assert doubt.max() < np.abs(scores).max() / 50
    own = found.contributions[0][list(found.uncertain[0]).index(near)]
    assert found.error(found.output + own) < 1e-9
    assert found.error(found.output) < 1e-9
    assert found.error(found.output + 0.3 * own) > 1e-3  # no weight between 0 and 1
    lost = reference.expected(x, scores[0, certain : certain + 1] + 2 * doubt.max())
    assert found.error(lost.output) > 1e-2  # neurons that are surely active may not be missing


def test_int8_values_are_those_of_quantized_predictors() -> None:
    x = np.zeros((1, 40))
    x[0, :4] = 1.0, -0.5, 0.3, 2.54
    x[0, 35] = -7.0
    rounded, doubt = quantize(x)
    assert np.allclose(rounded[0, :4], [1.0, -0.5, 0.3, 2.54])  # a step is 0.02
    assert np.allclose(rounded[0, 35], -7.0)
    assert np.all(doubt < 1e-4)
    halfway = np.array([[1.27, 0.105]])  # between 10 and 11 steps: the kernel's rounding of it is not known
    assert quantize(halfway)[1][0, 1] > 0.01


def test_the_command_stores_what_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--modes", "gated", "--precisions", "fp32", "--densities", "0.1", "--tokens", "1"]
    arguments = ["sparse-mlp", *chosen, "--shapes", "llama-3b", "--threads", "1", "--rounds", "1"]
    assert cli.main([*arguments, "--results", str(tmp_path)]) == 0
    (record,) = json.loads((tmp_path / "sparse-mlp-cpu.json").read_text())
    assert record["key"] == ["llama-3b", "gated", "fp32", 1, 100, 1]
    assert "llama-3b gated fp32 T1 10% active" in capsys.readouterr().out
