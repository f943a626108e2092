# SPDX-License-Identifier: Apache-2.0
"""Whole models that ONNX Runtime's static quantization wrote, attention matmuls included: every site is recovered."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from quantized_models import Form, draw, quantized, quantized_by_range, run

import stof
from stof.options import Options

MATMUL = ("MatMul",)
FORMS = [
    Form("qdq", "uint8"),
    Form("qdq", "int8", MATMUL, per_channel=True),
    Form("operator", "uint8", MATMUL),
    Form("operator", "int8"),
]
# ONNX Runtime's tools write a QLinearAdd of int32 for a ViT whose Conv they quantize, which ONNX Runtime refuses to load.
WITHOUT_CONV = Form("operator", "int8", ("MatMul", "Mul", "Softmax"))
MODELS = {"narrow/bert.torchscript.eager": 2, "narrow/modernbert.torchscript.eager": 4, "zoo/vit.torchscript.eager": 2}


def count_steps(model: onnx.ModelProto, one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference in steps of the finest scale by which the model rounds an activation behind attention."""
    outputs = {o for n in model.graph.node if n.op_type == "StofQuantizedAttention" for o in n.output}
    readers = [n for n in model.graph.node if n.op_type == "QuantizeLinear" and n.input[0] in outputs]
    assert readers
    scales = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    return float(np.abs(one - other).max() / min(float(scales[n.input[1]].min()) for n in readers))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_every_site_is_recovered_with_the_graphs_own_rounding(name: str, form: Form, tmp_path: Path) -> None:
    if "vit" in name and form == FORMS[3]:
        form = WITHOUT_CONV
    _, source = quantized(name, form, tmp_path)
    written = tmp_path / "written.onnx"
    report = stof.optimize(source, written, Options(verify_budget=10, chains="off"))
    assert [s.replaced for s in report.sites] == [True] * MODELS[name], [s.reason for s in report.sites]
    assert report.verification is not None
    assert not report.verification.failures
    result = onnx.load(written)
    counts = Counter(n.op_type for n in result.graph.node)
    assert counts["StofQuantizedAttention"] == MODELS[name]
    assert not counts["Softmax"] + counts["QLinearSoftmax"]
    for feed in draw(onnx.load(source), 2, seed=5):
        (wanted,), (mine,) = run(source, feed)[:1], run(written, feed, library=True)[:1]
        assert count_steps(result, wanted, mine) <= 1.0
        (body,) = run(written, feed)[:1]  # without the library, by the function's body
        assert np.array_equal(wanted, body)


def test_a_plan_gives_the_same_file(tmp_path: Path) -> None:
    _, source = quantized("narrow/bert.torchscript.eager", FORMS[0], tmp_path)
    first, second, plan = (tmp_path / n for n in ("first.onnx", "second.onnx", "plan.json"))
    stof.optimize(source, first, Options(verify_budget=5, save_plan=plan))
    stof.optimize(source, second, Options(verify_budget=5, plan=plan))
    assert first.read_bytes() == second.read_bytes()


def test_a_site_that_is_left_out_stays_as_it_was(tmp_path: Path) -> None:
    _, source = quantized("narrow/bert.torchscript.eager", FORMS[3], tmp_path)
    written = tmp_path / "written.onnx"
    report = stof.optimize(source, written, Options(verify_budget=5, only=("0",)))
    assert [s.replaced for s in report.sites] == [True, False]
    before, after = (Counter(n.op_type for n in onnx.load(p).graph.node) for p in (source, written))
    assert (before["QLinearSoftmax"], after["QLinearSoftmax"], after["Softmax"]) == (2, 1, 0)
    for feed in draw(onnx.load(source), 1, seed=6):
        assert np.array_equal(run(source, feed)[0], run(written, feed, library=True)[0])


@pytest.mark.parametrize("name", ["narrow/bert.torchscript.eager", "narrow/modernbert.torchscript.eager"])
def test_operands_and_weights_that_are_rounded_by_their_range(name: str, tmp_path: Path) -> None:
    """MatMulInteger: scales of query, key and value are computed before the operator, that of the weights in it."""
    _, source = quantized_by_range(name, tmp_path)
    written = tmp_path / "written.onnx"
    report = stof.optimize(source, written, Options(verify_budget=10, chains="off"))
    assert [s.replaced for s in report.sites] == [True] * MODELS[name], [s.reason for s in report.sites]
    assert all("weights rounded by their range" in s.form for s in report.sites)
    for feed in draw(onnx.load(source), 2, seed=4):
        wanted, mine = run(source, feed)[0], run(written, feed, library=True)[0]
        assert np.abs(wanted - mine).max() <= 1e-5 * np.ptp(wanted)


def test_weights_that_are_rounded_twice_stay(tmp_path: Path) -> None:
    """The NaN guard of torch's dynamo exports lies between two quantizers of other scales."""
    _, source = quantized("narrow/bert.dynamo.sdpa", FORMS[0], tmp_path)
    report = stof.optimize(source, tmp_path / "written.onnx", Options(dry_run=True))
    assert [s.replaced for s in report.sites] == [False, False]
    assert all("rounds attention weights that are rounded before, by another scale" in s.reason for s in report.sites)
    assert not any("stof_" in s.reason for s in report.sites)  # names that the user does not have
