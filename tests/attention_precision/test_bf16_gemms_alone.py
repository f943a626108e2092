# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 and models without attention: linear layers alone."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
from gemm_layers import HIDDEN, REAL, LayerGraph, gemms_of, outputs_of
from onnx import TensorProto, helper, numpy_helper
from precision_runs import leave_gemms, run

# isort: split
import stof
from stof.gemm_precision import verify
from stof.runtime.library import library_path


def mlp(path: Path, *, opset: int = 20) -> Path:
    """Two layers as torch writes them for rows of features: Gemm with transB."""
    g = LayerGraph()
    hidden = g.add("Gemm", ["x", g.weight(512, HIDDEN), g.weight(512)], transB=1)
    hidden = g.add("Relu", [hidden])
    output = g.add("Gemm", [hidden, g.weight(130, 512), g.weight(130)], transB=1)
    graph = helper.make_graph(
        g.nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", HIDDEN])],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, ["rows", 130])],
        g.weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def exact(path: Path, x: np.ndarray, *, is_rounded: bool) -> np.ndarray:
    """The definition in fp64, with factors rounded to bf16 where asked for."""
    w0, b0, w1, b1 = (numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer)

    def narrow(array: np.ndarray) -> np.ndarray:
        return (array.astype(np.float32).astype(ml_dtypes.bfloat16) if is_rounded else array).astype(np.float64)

    hidden = np.maximum(narrow(x) @ narrow(w0).T + b0, 0)
    return narrow(hidden) @ narrow(w1).T + b1


@REAL
def test_linear_layers_of_fixed_sizes_are_measured_on_drawn_inputs(tmp_path: Path) -> None:
    """Padding changes nothing there, and one case stands for all."""
    model = onnx.load(mlp(tmp_path / "model.onnx"))
    for value, columns in ((model.graph.input[0], HIDDEN), (model.graph.output[0], 130)):
        value.CopyFrom(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, [40, columns]))
    onnx.save(model, tmp_path / "fixed.onnx")
    report = run(tmp_path, tmp_path / "fixed.onnx", "--allow-bf16")[2]
    rows = report["attention_precision"]["gemms"]["rows"]
    assert [row["reduced"] for row in rows] == [True, True]
    assert all(0 < row["relative_rms"] < 0.01 for row in rows)


@REAL
def test_linear_layers_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = mlp(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    text = capsys.readouterr().out
    assert "OUTPUTS CHANGE: --allow-bf16 lets 2 of 2 GEMMs compute matmuls in bf16" in text.splitlines()[0]
    assert "outputs against the original, worst difference" in text
    assert "nothing to do" not in text
    assert f"register_custom_ops_library('{library_path()}')" in text
    assert report["verification"]["ok"]
    assert [n.op_type for n in onnx.load(target).graph.node] == ["StofGemm", "StofGemm"]
    for rows in (0, 1, 31, 600):
        x = np.random.default_rng(rows).standard_normal((rows, HIDDEN)).astype(np.float32)
        for library, is_rounded, most in ((True, True, 2e-3), (True, False, 0.02), (False, False, 1e-5)):
            wanted, found = exact(model, x, is_rounded=is_rounded), outputs_of(target, x, library=library)
            assert found.shape == wanted.shape == (rows, 130)
            assert np.abs(found - wanted).max(initial=0) <= most * np.abs(wanted).max(initial=0)


@REAL
def test_options_and_gates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs measure the loss; a gate above it ends the run, a plan keeps the choice."""
    model, plan, inputs = mlp(tmp_path / "model.onnx"), tmp_path / "plan.json", tmp_path / "inputs.npz"
    np.savez(inputs, x=np.random.default_rng(1).standard_normal((50, HIDDEN)).astype(np.float32))
    given = ["--allow-bf16", "--inputs", str(inputs)]
    status, target, report = run(tmp_path, model, *given, "--save-plan", str(plan))
    assert status == 0
    (cosine,) = report["attention_precision"]["cosines"].values()
    assert 1 - 1e-4 < cosine < 1
    data = json.loads(plan.read_text())
    assert list(data["gemm_precision"].values()) == ["bf16", "bf16"]
    assert run(tmp_path, model, *given, "--min-cosine", str((1 + cosine) / 2))[0] == 2
    assert "--allow-bf16 changes outputs too much" in capsys.readouterr().err
    data["gemm_precision"].popitem()
    plan.write_text(json.dumps(data))
    status, target, _ = run(tmp_path, model, "--allow-bf16", "--plan", str(plan), "--no-verify")
    assert (status, len(gemms_of(target))) == (0, 1)


@REAL
@pytest.mark.parametrize("options", [["--max-error", "0"], ["--no-verify"], ["--products", "off"]])
def test_nothing_to_write(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no GEMM takes bf16, the named output is a copy of the model."""
    model = mlp(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16", *options)
    assert status == 0
    assert target.read_bytes() == model.read_bytes()
    assert report["copied"]
    assert "the model was copied as it is" in capsys.readouterr().out


@REAL
def test_a_dry_run_names_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, target, _ = run(tmp_path, mlp(tmp_path / "model.onnx"), "--allow-bf16", "--dry-run")
    text = capsys.readouterr().out
    assert "bf16 in 1 GEMM of Gemm Relu" in text
    assert "dry run: no file was written" in text
    assert not target.exists()


@REAL
def test_a_model_that_differs_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Simulated: an edit wires a bias wrongly."""
    right = verify._in_full_precision

    def wrong(model: onnx.ModelProto, attribute: str) -> onnx.ModelProto:
        result = right(model, attribute)
        bias = next(t for t in result.graph.initializer if list(t.dims) == [130])
        bias.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(bias) + 1, bias.name))
        return result

    monkeypatch.setattr(verify, "_in_full_precision", wrong)
    status, target, _ = run(tmp_path, mlp(tmp_path / "model.onnx"), "--allow-bf16")
    assert status == 2
    assert not target.exists()
    assert "verification failed" in capsys.readouterr().err


@REAL
def test_old_opsets_are_converted(tmp_path: Path) -> None:
    status, target, report = run(tmp_path, mlp(tmp_path / "model.onnx", opset=11), "--allow-bf16")
    assert status == 0
    assert report["converted_opset"] == {"from": 11, "to": 13}
    assert len(gemms_of(target)) == 2


@REAL
def test_in_python(tmp_path: Path) -> None:
    model = onnx.load(mlp(tmp_path / "model.onnx"))
    found, report = stof.optimize(model, allow_bf16=True, return_report=True)
    assert report.has_result
    assert sum(n.op_type == "StofGemm" for n in found.graph.node) == 2
    assert "GEMMs" in report.summary()


def test_machines_without_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_gemms(monkeypatch)
    model = mlp(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert (status, report["copied"]) == (0, True)
    assert target.read_bytes() == model.read_bytes()


def test_models_without_matmuls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    g = LayerGraph()
    run(tmp_path, g.save(tmp_path / "model.onnx", g.add("Relu", ["x"])), "--allow-bf16")
    assert "there is no attention, sparse MLP or matmul by a constant weight" in capsys.readouterr().out


@REAL
@pytest.mark.parametrize("is_node", [False, True])
def test_matmuls_in_subgraphs_have_a_reason(is_node: bool, tmp_path: Path) -> None:
    """Those of branches stay, by outer weights and by their own; the one of the main graph is taken.

    With ``is_node`` their own weight is the output of a Constant node.
    """
    g = LayerGraph()
    main = g.linear("x", HIDDEN, HIDDEN)
    outer, condition = (
        g.weight(HIDDEN, HIDDEN),
        g.add("Greater", [g.add("ReduceSum", ["x"], keepdims=0), g.constant(0.0)]),
    )
    own = numpy_helper.from_array(np.eye(HIDDEN, dtype=np.float32), "own")
    info = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    before = [helper.make_node("Constant", [], ["own"], value=own)] if is_node else []
    matmuls = [
        helper.make_node("MatMul", [main, n], ["y"], name=f"{b}/MatMul") for b, n in (("then", outer), ("else", "own"))
    ]
    branches = {
        "then_branch": helper.make_graph(matmuls[:1], "then", [], [info]),
        "else_branch": helper.make_graph([*before, matmuls[1]], "else", [], [info], [] if is_node else [own]),
    }
    g.nodes.append(helper.make_node("If", [condition], ["result"], name="choose", **branches))
    model = g.save(tmp_path / "model.onnx", "result")
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    rows = report["attention_precision"]["gemms"]["rows"]
    assert [(row["node"], row["reduced"]) for row in rows] == [
        ("MatMul_0", True),
        ("else/MatMul", False),
        ("then/MatMul", False),
    ]
    words = "it lies in {}_branch of If node 'choose', where errors of GEMMs cannot be measured"
    assert [row["reason"] for row in rows[1:]] == [words.format("else"), words.format("then")]
    assert len(gemms_of(target)) == 1
    x = np.random.default_rng(6).standard_normal((1, 9, HIDDEN)).astype(np.float32)
    for sign in (1, -1):
        wanted = outputs_of(model, sign * x, library=False)
        assert np.abs(outputs_of(target, sign * x, library=True) - wanted).max() < 0.02 * np.abs(wanted).max()


@REAL
def test_prompts_measure_a_language_model_of_linear_layers(tmp_path: Path) -> None:
    """The KL divergence of next tokens, its gate, and the page of the report."""
    g = LayerGraph()
    embedded = g.add("Gather", [g.weight(256, HIDDEN), "input_ids"])
    hidden = g.add("Add", [g.linear(g.add("Gelu", [g.linear(embedded, HIDDEN, 512)]), 512, HIDDEN), embedded])
    g.nodes.append(helper.make_node("MatMul", [hidden, g.weight(HIDDEN, 256)], ["logits"], name="head"))
    shape = ["batch", "sequence"]
    graph = helper.make_graph(
        g.nodes,
        "lm",
        [helper.make_tensor_value_info("input_ids", TensorProto.INT64, shape)],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*shape, 256])],
        g.weights,
    )
    model, prompts, page = tmp_path / "model.onnx", tmp_path / "prompts.npy", tmp_path / "page.html"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), model)
    np.save(prompts, np.random.default_rng(1).integers(0, 256, (2, 60)))
    given = ["--allow-bf16", "--prompts", str(prompts)]
    status, target, report = run(tmp_path, model, *given, "--report", str(page))
    assert status == 0
    assert len(gemms_of(target)) == 3
    assert 1e-10 < report["attention_precision"]["loss"]["kl"] < 1e-4
    text = page.read_text()
    assert f"Written: {target}" in text
    assert "Nothing to do" not in text
    assert run(tmp_path, model, *given, "--max-kl", "1e-12")[0] == 2
    assert not target.exists()
