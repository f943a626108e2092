# SPDX-License-Identifier: Apache-2.0
"""The benchmark of StofSparseMLP: its grid, its bytes, and a small point of each mode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stof.bench import cli
from stof.bench.core import measure
from stof.bench.cpu import sparse_mlp
from stof.bench.cpu.sparse_mlp import Layers, MlpPoint, describe_record, measure_point


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_mlp, "SHAPES", {"llama-3b": (96, 256)})
    monkeypatch.setattr(measure, "rates", lambda threads: {"fma_gflops": 1.0, "read_gbps": float(threads)})


def test_the_grid_has_every_mode_and_both_precisions() -> None:
    points = list(sparse_mlp.points())
    assert {(p.mode, p.precision) for p in points} == {(m, p) for m in sparse_mlp.MODES for p in ("fp32", "int4")}
    assert {p.T for p in points} == {1, 4, 16}
    assert len(set(points)) == len(points)


def test_touched_bytes_count_rows_scales_and_the_predictor() -> None:
    active = np.zeros((2, 256), bool)
    active[0, 5] = active[1, 5] = active[1, 40] = True
    K, F = 96, 256
    gate = 4 * K * F
    assert MlpPoint("llama-3b", "plain", "fp32", 0.1, 2).touched_bytes(active) == gate + 2 * 4 * K
    assert MlpPoint("llama-3b", "gated", "fp32", 0.1, 2).touched_bytes(active) == gate + 2 * 2 * 4 * K
    predictor = 4 * 10 * (K + F)
    assert MlpPoint("llama-3b", "predicted", "fp32", 0.1, 2).touched_bytes(active) == predictor + 3 * 2 * 4 * K
    row = K / 2 + 4 * K / 32
    int4 = MlpPoint("llama-3b", "gated", "int4", 0.1, 2).touched_bytes(active)
    assert int4 == F * row + 2 * row + 2 * K / 2 + 2 * 4 * K  # two groups of 32 neurons have scales


@pytest.mark.parametrize("precision", ["fp32", "int4"])
@pytest.mark.parametrize("mode", ["plain", "gated", "predicted"])
def test_a_point_is_checked_and_timed(mode: str, precision: str) -> None:
    layers = Layers("llama-3b", mode, precision, 1, 2)
    for density, tokens in ((0.25, 1), (1.0, 3)):
        point = MlpPoint("llama-3b", mode, precision, density, tokens)
        record = measure_point(point, layers, 1)
        assert abs(record["density"] - density) < 0.15
        assert record["peers"]["stof"]["us"] > 0
        assert record["peers"]["stof"]["error"] <= sparse_mlp.TOLERANCE[precision]
        if mode != "predicted":
            assert record["peers"]["ort"]["error"] <= sparse_mlp.TOLERANCE[precision]
        assert "ONNX Runtime" in describe_record(point, record)


def test_the_command_stores_what_it_measures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--modes", "gated", "--precisions", "fp32", "--densities", "0.1", "--tokens", "1"]
    arguments = ["sparse-mlp", *chosen, "--shapes", "llama-3b", "--threads", "1", "--rounds", "1"]
    assert cli.main([*arguments, "--results", str(tmp_path)]) == 0
    (record,) = json.loads((tmp_path / "sparse-mlp-cpu.json").read_text())
    assert record["key"] == ["llama-3b", "gated", "fp32", 1, 100, 1]
    assert "llama-3b gated fp32 T1 10% active" in capsys.readouterr().out
