# SPDX-License-Identifier: Apache-2.0
"""Quantized attention between nodes that run on real tokens: it reads padded copies, and gives the same numbers."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from encoders import rows_of
from quantized_models import Form, quantized, quantized_by_range, run

import stof
from stof.options import Options

FORMS = [
    Form("qdq", "uint8", ("MatMul",)),
    Form("qdq", "int8"),
    Form("operator", "uint8", ("MatMul",)),
    Form("operator", "int8"),
]
SIZES = {"qdq uint8 MatMul": 60, "qdq int8 all": 60, "operator uint8 MatMul": 60, "operator int8 all": 50}


def feeds_of(model: onnx.ModelProto, lengths: tuple[int, ...], longest: int) -> dict[str, np.ndarray]:
    """Texts of these lengths, padded on the right."""
    rng = np.random.default_rng(sum(lengths))
    mask = (np.arange(longest) < np.array(lengths)[:, None]).astype(np.int64)
    feed = {}
    for value in model.graph.input:
        is_mask = "mask" in value.name
        feed[value.name] = mask if is_mask else rng.integers(3, 90, mask.shape) * (value.name != "token_type_ids")
    return feed


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_real_tokens_have_the_numbers_of_the_padded_model(form: Form, tmp_path: Path) -> None:
    _, source = quantized("narrow/bert.torchscript.eager", form, tmp_path)
    padded, written = tmp_path / "padded.onnx", tmp_path / "written.onnx"
    stof.optimize(source, padded, Options(verify_budget=5, chains="off", unpad="off"))
    report = stof.optimize(source, written, Options(verify_budget=10, chains="off", unpad="on"))
    (row,) = rows_of(report)
    assert row.replaced
    assert row.nodes >= SIZES[str(form)]
    assert (row.attentions, row.of_attentions) == (0, 2)
    assert row.rest == "2 StofQuantizedAttention read padded copies"
    result = onnx.load(written)
    assert Counter(n.op_type for n in result.graph.node)["StofQuantizedAttention"] == 2
    for lengths, longest in (((7, 24, 1, 13), 24), ((5, 5), 5), ((0, 9), 30)):
        feed = feeds_of(result, lengths, longest)
        wanted, found = run(padded, feed, library=True)[0], run(written, feed, library=True)[0]
        real = feed["attention_mask"] != 0
        real[~real.any(1)] = True  # a text without a token keeps all rows
        assert np.isfinite(wanted).all()
        np.testing.assert_allclose(found[real], wanted[real], rtol=0, atol=1e-5 * np.abs(wanted).max())
        assert not found[~real].any()
        (body,) = run(written, feed)[:1]  # without the library
        assert np.abs(body[real] - wanted[real]).max() <= 0.1 * np.ptp(wanted)


@pytest.mark.parametrize("capacity", [0, 40])
def test_beside_float_attention(capacity: int, tmp_path: Path) -> None:
    """Float attention of the same mask reads packed sequences."""
    _, source = quantized("narrow/bert.torchscript.eager", FORMS[0], tmp_path, float_matmuls=2)
    padded, written = tmp_path / "padded.onnx", tmp_path / "written.onnx"
    stof.optimize(source, padded, Options(verify_budget=5, chains="off", unpad="off"))
    options = Options(verify_budget=10, chains="off", unpad="on", unpad_capacity=capacity)
    (row,) = rows_of(stof.optimize(source, written, options))
    assert (row.replaced, row.attentions, row.of_attentions) == (True, 1, 2)
    assert row.rest == "1 StofQuantizedAttention read padded copies"
    result = onnx.load(written)
    counts = Counter(n.op_type for n in result.graph.node)
    assert (counts["StofAttention"], counts["StofQuantizedAttention"]) == (1, 1)
    for lengths, longest in (((7, 20, 1, 9), 20), ((3, 9), 30)):
        feed = feeds_of(result, lengths, longest)
        wanted, found = run(padded, feed, library=True)[0], run(written, feed, library=True)[0]
        real = feed["attention_mask"] != 0
        # Sums of fp32 attention in another order may take a number to the next code.
        away = np.abs(found[real] - wanted[real]).max(-1) > 1e-5 * np.abs(wanted).max()
        assert away.mean() <= 0.1
        assert np.abs(found[real] - wanted[real]).max() <= 0.05 * np.ptp(wanted)


def test_weights_rounded_by_their_range_stay_padded(tmp_path: Path) -> None:
    """Rows of padding count in the scale of the weights."""
    _, source = quantized_by_range("narrow/bert.torchscript.eager", tmp_path)
    report = stof.optimize(source, tmp_path / "written.onnx", Options(verify_budget=5, chains="off", unpad="on"))
    assert [s.replaced for s in report.sites] == [True, True]
    assert not [r for r in rows_of(report) if r.replaced]
