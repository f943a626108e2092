# SPDX-License-Identifier: Apache-2.0
"""``python -m bench quantized``: its table, and lengths that a model has no positions for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper

from bench import cli
from bench.cpu import quantized

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
    options = ["--models", "small", "--formats", "qdq", "--rounds", "1", "--threads", "1", "--folder", str(tmp_path)]
    assert cli.main(["quantized", *options, "--lengths", "17", "16"]) == 1
    found = capsys.readouterr().out
    assert "plain.onnx does not run at S = 17: indices element out of data bounds, idx=16" in found
    assert ". Leave a length beyond its positions out of --lengths" in found
    assert "| small | qdq | matmul | 16 | " in found
    assert cli.main(["quantized", *options, "--lengths", "8"]) == 0
