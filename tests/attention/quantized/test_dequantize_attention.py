# SPDX-License-Identifier: Apache-2.0
"""``--dequantize-attention``: quantized attention computes in float, and outputs are held to the float model's."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from quantized_models import Form, draw, quantized, quantized_by_range, run

import stof
from stof.attention.quantized.core_form import with_cores
from stof.attention.quantized.core_search import find_float_cores
from stof.dequantize.measure import _ErrorMeter
from stof.errors import ArgumentError, VerifyError
from stof.options import Options
from stof.thresholds.cosines import CosineMeter

BERT = "narrow/bert.torchscript.eager"
EVERYTHING, MATMUL = Form("qdq", "uint8"), Form("operator", "int8", ("MatMul",))


def error(exact: np.ndarray, other: np.ndarray) -> float:
    return float(np.sqrt(np.mean((other - exact) ** 2) / np.mean(exact**2)))


@pytest.mark.parametrize("name", [BERT, "narrow/bert.dynamo.sdpa", "zoo/vit.dynamo.sdpa"])
@pytest.mark.parametrize("form", [EVERYTHING, MATMUL], ids=str)
def test_float_attention_is_nearer_to_the_float_model(name: str, form: Form, tmp_path: Path) -> None:
    source, target = quantized(name, form, tmp_path)
    written, facts, page = (tmp_path / n for n in ("written.onnx", "report.json", "report.html"))
    feeds = draw(onnx.load(source), 3, seed=7)
    report = stof.optimize(
        target,
        written,
        Options(
            dequantize_attention=True,
            float_model=source,
            inputs=feeds,
            verify_budget=5,
            json=facts,
            report=page,
            min_cosine=0.99,
        ),
    )
    assert [s.replaced for s in report.sites] == [True, True]
    assert report.dequantized is not None
    assert len(report.dequantized.sites) == 2
    counts = Counter(n.op_type for n in onnx.load(written).graph.node)
    assert counts["StofAttention"] == 2
    (distance,) = (d for d in report.dequantized.distances if d.output == onnx.load(source).graph.output[0].name)
    pairs = [(run(source, f)[0], run(target, f, optimized=True)[0], run(written, f, library=True)[0]) for f in feeds]
    exact, before, after = (np.concatenate([p[i].ravel() for p in pairs]) for i in range(3))
    assert distance.quantized_error == pytest.approx(error(exact, before), rel=0.05)
    assert distance.error == pytest.approx(error(exact, after), rel=0.05)
    data = json.loads(facts.read_text())["dequantize_attention"]
    assert data["distances"][0]["error"] == pytest.approx(distance.error)
    for text in (report.to_text(), page.read_text()):
        assert "OUTPUTS CHANGE: --dequantize-attention has 2 of 2 quantized attentions compute in float" in text


def test_masks_that_rounding_destroys_come_back(tmp_path: Path) -> None:
    """A mask of -3.4e38 that is added before a rounding leaves one code for all scores; in float they are themselves."""
    source, target = quantized(BERT, EVERYTHING, tmp_path)
    model = onnx.load(target)
    result = with_cores(model, find_float_cores(model))
    feed = draw(onnx.load(source), 1, seed=8)[0]
    exact = run(source, feed)[0]
    assert error(exact, run(result, feed)[0]) < 0.7 * error(exact, run(target, feed)[0])


def test_scores_that_are_rounded_by_their_range_compute_in_float(tmp_path: Path) -> None:
    source, target = quantized_by_range(BERT, tmp_path)
    feeds = draw(onnx.load(source), 2, seed=9)
    written = tmp_path / "written.onnx"
    report = stof.optimize(
        target, written, Options(dequantize_attention=True, float_model=source, inputs=feeds, verify_budget=5)
    )
    assert [s.replaced for s in report.sites] == [True, True]
    counts = Counter(n.op_type for n in onnx.load(written).graph.node)
    assert counts["MatMulInteger"] == 12  # of 16: the products of tokens with weights


def test_outputs_too_far_from_the_quantized_models_are_refused(tmp_path: Path) -> None:
    source, target = quantized(BERT, EVERYTHING, tmp_path)
    written = tmp_path / "written.onnx"
    options = {"dequantize_attention": True, "inputs": draw(onnx.load(source), 2), "verify_budget": 5}
    with pytest.raises(
        VerifyError, match=r"the cosine of output 'last_hidden_state' with the quantized model's is 1 - "
    ):
        stof.optimize(target, written, Options(**options))
    assert not written.exists()
    report = stof.optimize(target, written, Options(**options, force=True))
    assert written.exists()
    assert report.dequantized is not None
    assert report.dequantized.distances[0].quantized_error is None


def test_outputs_farther_from_the_float_model_are_refused(tmp_path: Path) -> None:
    """Held to another model, whose weights are the quantized ones, the quantized model is the nearer one."""
    _, target = quantized(BERT, EVERYTHING, tmp_path)
    other = tmp_path / "other.onnx"
    other.write_bytes(target.read_bytes())
    feeds = draw(onnx.load(target), 2)
    options = Options(dequantize_attention=True, float_model=other, inputs=feeds, verify_budget=5)
    with pytest.raises(VerifyError, match=r"is farther from that of .*other.onnx than the quantized model's"):
        stof.optimize(target, tmp_path / "written.onnx", options)


def test_sites_that_are_skipped_stay_quantized(tmp_path: Path) -> None:
    source, target = quantized(BERT, EVERYTHING, tmp_path)
    written = tmp_path / "written.onnx"
    report = stof.optimize(
        target,
        written,
        Options(
            dequantize_attention=True,
            float_model=source,
            inputs=draw(onnx.load(source), 1),
            skip=("0",),
            verify_budget=5,
        ),
    )
    assert report.dequantized is not None
    assert list(report.dequantized.kept.values()) == ["left out by --skip"]
    counts = Counter(n.op_type for n in onnx.load(written).graph.node)
    assert (counts["StofAttention"], counts["StofQuantizedAttention"], counts["Softmax"]) == (1, 0, 1)


def test_a_plan_is_for_the_option(tmp_path: Path) -> None:
    source, target = quantized(BERT, MATMUL, tmp_path)
    plan, written = tmp_path / "plan.json", tmp_path / "written.onnx"
    options = {"verify_budget": 5, "inputs": draw(onnx.load(source), 1)}
    float_options = {**options, "dequantize_attention": True, "float_model": source, "min_cosine": 0.9}
    stof.optimize(target, written, Options(**float_options, save_plan=plan))
    assert json.loads(plan.read_text())["dequantize_attention"] is True
    again = tmp_path / "again.onnx"
    stof.optimize(target, again, Options(**float_options, plan=plan))
    assert again.read_bytes() == written.read_bytes()
    with pytest.raises(ArgumentError, match="the plan was saved with --dequantize-attention"):
        stof.optimize(target, again, Options(**options, plan=plan))


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    source, target = quantized(BERT, MATMUL, tmp_path)
    written = tmp_path / "written.onnx"
    with pytest.raises(ArgumentError, match=r"--dequantize-attention changes outputs, .*: give --inputs FILE"):
        stof.optimize(target, written, Options(dequantize_attention=True))
    with pytest.raises(ArgumentError, match="float_model is for dequantize_attention"):
        Options(float_model=source)
    renamed = onnx.load(source)
    renamed.graph.output[0].name = "other"
    renamed.graph.node.append(onnx.helper.make_node("Identity", ["last_hidden_state"], ["other"]))
    onnx.save(renamed, tmp_path / "renamed.onnx")
    with pytest.raises(ArgumentError, match=r"renamed.onnx has no output 'last_hidden_state'"):
        stof.optimize(
            target,
            written,
            Options(
                dequantize_attention=True,
                float_model=tmp_path / "renamed.onnx",
                inputs=draw(onnx.load(source), 1),
                verify_budget=5,
            ),
        )


def test_a_float_model_has_nothing_to_dequantize(tmp_path: Path) -> None:
    source, _ = quantized(BERT, MATMUL, tmp_path)
    report = stof.optimize(source, tmp_path / "written.onnx", Options(dequantize_attention=True, dry_run=True))
    assert report.dequantized is not None
    assert not report.dequantized.sites
    assert "--dequantize-attention changes nothing" in report.to_text()


def test_padding_counts_in_no_number() -> None:
    """A difference in a row of padding alone is none, in errors as in cosines; another one counts."""
    rng = np.random.default_rng(0)
    exact = rng.standard_normal((2, 3, 4)).astype(np.float32)
    other = exact.copy()
    other[1, 2] *= -5
    feed = {"attention_mask": np.array([[1, 1, 1], [1, 1, 0]])}
    masked, whole, cosines = _ErrorMeter("model"), _ErrorMeter("model"), CosineMeter(["y"])
    masked.add(["y"], [exact], [other], feed)
    whole.add(["y"], [exact], [other], {})
    cosines.add([exact], [other], feed)
    assert masked.error("y") == 0
    assert whole.error("y") == pytest.approx(error(exact, other))
    assert cosines.means()["y"] == pytest.approx(1.0)
    with pytest.raises(
        ArgumentError, match=r"shape \[2, 3, 4\] in the reference and \[1, 3, 4\] in the optimized model"
    ):
        _ErrorMeter("optimized model").add(["y"], [exact], [other[:1]], feed)


def test_outputs_of_padding_alone_are_not_passed(tmp_path: Path) -> None:
    """No row of them was compared."""
    source, target = quantized(BERT, MATMUL, tmp_path)
    feeds = draw(onnx.load(source), 1, seed=7)
    for feed in feeds:
        feed["attention_mask"] = np.zeros_like(feed["attention_mask"])
    with pytest.raises(ArgumentError, match="has no row that is not padding, so nothing of it can be compared"):
        stof.optimize(target, tmp_path / "written.onnx", dequantize_attention=True, inputs=feeds, verify=False)
