# SPDX-License-Identifier: Apache-2.0
"""``python -m bench quantized``: its table and records, and lengths that a model has no positions for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from bench import cli
from bench.cpu import quantized
from stof.bench import measure
from stof.bench.results import read

MODEL = """
<ir_version: 8, opset_import: ["": 18]>
g (int64[B,S] input_ids) => (float[B,S,4] out) {
one = Constant <value = int64 {1}> ()
ones = Sign (input_ids)
counts = CumSum (ones, one)
positions = Sub (counts, one)
out = Gather (table, positions)
}"""


@pytest.fixture
def files(tmp_path: Path) -> quantized.QuantizedFiles:
    model = onnx.parser.parse_model(MODEL)
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((16, 4), np.float32), "table"))
    paths = [tmp_path / f"{word}.onnx" for word in ("plain", "rounded", "dequantized")]
    for path in paths:
        onnx.save(model, path)
    return quantized.QuantizedFiles(*paths)


def test_a_length_beyond_the_positions_is_named(
    files: quantized.QuantizedFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(quantized, "prepare", lambda *_: files)
    monkeypatch.setattr(measure, "rates", lambda threads: {"fma_gflops": 1.0, "read_gbps": 1.0})
    options = ["--models", "small", "--formats", "qdq", "--rounds", "1", "--threads", "1", "--folder", str(tmp_path)]
    options += ["--results", str(tmp_path / "found")]
    assert cli.main(["quantized", *options, "--lengths", "17", "16"]) == 1
    found = capsys.readouterr().out
    assert "plain.onnx does not run at S = 17: indices element out of data bounds, idx=16" in found
    assert ". Leave a length beyond its positions out of --lengths" in found
    assert "| small | qdq | matmul | 16 | " in found
    assert cli.main(["quantized", *options, "--lengths", "8"]) == 0
    records = read(tmp_path / "found/quantized-cpu.json")
    assert [r["key"] for r in records] == [["small", "qdq", "matmul", length, 1] for length in (8, 16)]
    for record in records:
        assert list(record["median_seconds"]) == ["float attention", "own rounding", "quantized"]
        assert record["machine"]["threads"] == 1
        assert record["machine"]["read_gbps"] == 1.0
