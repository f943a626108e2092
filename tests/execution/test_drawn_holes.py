# SPDX-License-Identifier: Apache-2.0
"""Padding between tokens: what verification draws for masks, beside padding on either side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

import stof
from stof.execution.case import Case, Padding
from stof.execution.drawn_values import draw_padding
from stof.options import Options

_TEXT = """<ir_version: 9, opset_import: ["" : 18]>
g (float[B, 2, S, 8] q, float[B, 2, S, 8] k, float[B, 2, S, 8] v, int64[B, S] mask) => (float[B, 2, S, 8] y) {
    nothing = Constant <value = float {0.0}> ()
    least = Constant <value = float {-3.4028234663852886e38}> ()
    axes = Constant <value = int64[2] {1, 2}> ()
    turned = Transpose <perm = [0, 1, 3, 2]> (k)
    scores = MatMul (q, turned)
    wide = Unsqueeze (mask, axes)
    real = Cast <to = 9> (wide)
    added = Where (real, nothing, least)
    masked = Add (scores, added)
    weights = Softmax (masked)
    y = MatMul (weights, v)
}"""


@pytest.mark.parametrize("length", [2, 3, 4, 11, 64])
@pytest.mark.parametrize("seed", range(5))
def test_holes_stand_between_tokens(length: int, seed: int) -> None:
    case = Case(4, length, Padding.HOLES)
    mask = draw_padding([4, length], case, np.random.default_rng(seed), True)
    assert mask[0].all()
    for number, row in enumerate(mask[1:]):
        real = np.flatnonzero(row)
        last = length - 1 - number % 2
        assert (real[0], real[-1]) == (0, last)
        assert not row[last + 1 :].any()
        assert last < 2 or len(real) <= last  # a hole at least


def test_verification_runs_a_batch_with_holes(tmp_path: Path) -> None:
    onnx.save(onnx.parser.parse_model(_TEXT), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options())
    assert report.verification is not None
    assert any("padded between tokens" in c.what for c in report.verification.comparisons)


def test_a_model_without_a_mask_has_no_such_batch(tmp_path: Path) -> None:
    before, _, rest = _TEXT.replace(", int64[B, S] mask", "").partition("    wide =")
    text = before + "    weights = Softmax (scores)" + rest.partition("Softmax (masked)")[2]
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "out.onnx", Options())
    assert report.verification is not None
    assert not any("between tokens" in c.what for c in report.verification.comparisons)
