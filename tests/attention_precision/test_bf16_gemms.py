# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 and matmuls by constant weights: which become StofGemm, their errors, gates, plans, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from gemm_layers import HIDDEN, REAL, bert_layer, drawn, erf_layer, gemms_of, modernbert_layer, outputs_of
from onnx import TensorProto, helper, numpy_helper
from precision_runs import leave_gemms, run

# isort: split
from trained_runs import LENGTH, check_accuracy, measured_options, texts_of, write_model

# isort: split
from stof.attention_precision import apply
from stof.errors import UnsupportedError
from stof.gemm_precision.sites import find_gemms
from stof.runtime.bf16_kernel import cpu_bf16_gemm_kernel
from stof.symbolic import Symbolic

LAYERS = pytest.mark.parametrize(
    ("layer", "operators"),
    [
        (bert_layer, ["MatMul Add", "MatMul Add", "MatMul Add", "MatMul Add Add", "MatMul Add Gelu", "MatMul Add Add"]),
        (erf_layer, [*["MatMul Add"] * 3, "MatMul Add Add", "MatMul Add Div Erf Add Mul Mul", "MatMul Add Add"]),
        (modernbert_layer, ["MatMul", "MatMul Add", "MatMul Split Gelu Mul", "MatMul Add"]),
    ],
)


@REAL
@LAYERS
def test_linear_layers_become_gemms(layer: object, operators: list[str], tmp_path: Path) -> None:
    """With bias, activation, gate and residual; the model stays near the original, also without the library."""
    assert callable(layer)
    model = layer(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    found = report["attention_precision"]["gemms"]
    assert found["kernel"] == cpu_bf16_gemm_kernel()
    assert [row["operators"] for row in found["rows"]] == operators
    assert all(row["reduced"] and 1e-5 < row["relative_rms"] < 0.01 for row in found["rows"])
    nodes = gemms_of(target)
    assert len(nodes) == len(operators)
    assert all(a.i == 1 for n in nodes for a in n.attribute if a.name == "allow_bf16")
    assert not any(n.op_type == "MatMul" for n in onnx.load(target).graph.node)
    for length in (1, 7, 70):
        x = drawn(length)
        exact = outputs_of(model, x, library=False)
        for library, least, most in ((True, 1e-5, 0.02), (False, 0.0, 1e-5)):
            away = outputs_of(target, x, library=library).astype(np.float64) - exact
            error = np.sqrt(np.square(away).sum() / np.square(exact.astype(np.float64)).sum())
            assert least <= error < most, (length, library, error)


@REAL
def test_the_report_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, bert_layer(tmp_path / "model.onnx"), "--allow-bf16")[0] == 0
    text = capsys.readouterr().out
    assert "1 of 1 attentions and 6 of 6 GEMMs compute matmuls in bf16" in text.splitlines()[0]
    assert f"bf16 in 3 GEMMs of MatMul Add: kernel {cpu_bf16_gemm_kernel()}; relative RMS error up to 0.00" in text
    assert "errors of GEMMs: relative RMS against fp64, on 128 rows of a set at most, 2 sets of drawn inputs" in text


@REAL
def test_errors_beyond_the_bound_keep_matmuls(tmp_path: Path) -> None:
    """A bound of 0 admits nothing; one between the errors of GEMMs admits some."""
    model = bert_layer(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16", "--max-error", "0")
    assert status == 0
    assert not gemms_of(target)
    rows = report["attention_precision"]["gemms"]["rows"]
    assert all("--max-error allows 0" in row["reason"] and not row["reduced"] for row in rows)
    errors = sorted(row["relative_rms"] for row in rows)
    middle = str((errors[2] + errors[3]) / 2)
    status, target, report = run(tmp_path, model, "--allow-bf16", "--max-error", middle)
    assert status == 0
    assert len(gemms_of(target)) == 3


@REAL
def test_a_kernel_that_computes_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the operator multiplies by other weights than those that the definition has."""
    from stof.gemm_precision import errors

    make = errors._make_operator
    monkeypatch.setattr(
        errors,
        "_make_operator",
        lambda site, precision, weights, n: make(site, precision, [1.1 * w for w in weights], n),
    )
    _, target, report = run(tmp_path, bert_layer(tmp_path / "model.onnx"), "--allow-bf16")
    assert not gemms_of(target)
    for row in report["attention_precision"]["gemms"]["rows"]:
        assert "it differs from the definition that rounds as its kernels do: by " in row["reason"]


@REAL
def test_unknown_errors_need_force(tmp_path: Path) -> None:
    model = bert_layer(tmp_path / "model.onnx")
    _, target, report = run(tmp_path, model, "--allow-bf16", "--no-verify")
    assert not gemms_of(target)
    assert "--force allows it all the same" in report["attention_precision"]["gemms"]["rows"][0]["reason"]
    _, target, _ = run(tmp_path, model, "--allow-bf16", "--no-verify", "--force")
    assert len(gemms_of(target)) == 6


@REAL
def test_gates_take_them_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The cosine is that of the model with GEMMs in bf16: with attention alone it is nearer to 1."""
    model, inputs = bert_layer(tmp_path / "model.onnx"), tmp_path / "inputs.npz"
    np.savez(inputs, x=drawn(40))
    cosines = []
    for options in ([], ["--plan", str(tmp_path / "plan.json")]):
        plan = tmp_path / "saved.json"
        given = ["--allow-bf16", "--inputs", str(inputs), "--save-plan", str(plan), *options]
        status, target, report = run(tmp_path, model, *given)
        assert status == 0
        (cosine,) = report["attention_precision"]["cosines"].values()
        cosines.append(1 - cosine)
        assert len(gemms_of(target)) == (0 if options else 6)
        data = json.loads(plan.read_text())
        data["gemm_precision"] = {}
        (tmp_path / "plan.json").write_text(json.dumps(data))
    assert cosines[0] > 2 * cosines[1]
    gate = str(1 - (cosines[0] + cosines[1]) / 2)
    assert run(tmp_path, model, "--allow-bf16", "--inputs", str(inputs), "--min-cosine", gate)[0] == 2
    assert "--allow-bf16 changes outputs too much" in capsys.readouterr().err


@REAL
def test_plans_keep_the_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = bert_layer(tmp_path / "model.onnx"), tmp_path / "plan.json"
    assert run(tmp_path, model, "--allow-bf16", "--save-plan", str(plan))[0] == 0
    data = json.loads(plan.read_text())
    names = list(data["gemm_precision"])
    assert len(names) == 6
    data["gemm_precision"] = {names[1]: "bf16"}
    plan.write_text(json.dumps(data))
    status, target, report = run(tmp_path, model, "--allow-bf16", "--plan", str(plan), "--no-verify")
    assert status == 0
    assert len(gemms_of(target)) == 1
    rows = report["attention_precision"]["gemms"]["rows"]
    assert [row["reason"] for row in rows] == ["the plan says so" if n != names[1] else "" for n in names]
    data["attention_precision"] = {}
    plan.write_text(json.dumps(data))
    assert run(tmp_path, model, "--plan", str(plan))[0] == 1
    assert "computes GEMMs in bf16" in capsys.readouterr().err
    data["gemm_precision"] = {"other": "bf16"}
    plan.write_text(json.dumps(data))
    assert run(tmp_path, model, "--allow-bf16", "--plan", str(plan))[0] == 1
    assert "the optimized model has no such matmul" in capsys.readouterr().err


@REAL
@pytest.mark.parametrize("name", ["documents", "prompts"])
def test_trained_models_find_records(name: str, tmp_path: Path) -> None:
    """With attention and all linear layers in bf16. Tokens that nobody can tell are ties: their agreement says nothing."""
    path = write_model(tmp_path, name)
    given = texts_of(name, LENGTH, 2, seed=1)
    status, target, report = run(tmp_path, path, "--allow-bf16", *measured_options(tmp_path, name, given))
    assert status == 0
    found = report["attention_precision"]
    assert all(row["reduced"] and row["relative_rms"] <= 0.01 for row in found["gemms"]["rows"])
    assert len(gemms_of(target)) == len(found["gemms"]["rows"]) > 5
    if name == "prompts":
        assert 1e-10 < found["loss"]["kl"] < 1e-4
    else:
        assert found["cosines"]["logits"] > 0.9999
    check_accuracy(path, target, name)


@pytest.mark.parametrize("options", [[], ["--allow-bf16", "--products", "off"]])
def test_nothing_changes_without_the_option(options: list[str], tmp_path: Path) -> None:
    status, target, report = run(tmp_path, bert_layer(tmp_path / "model.onnx"), *options)
    assert status == 0
    assert not gemms_of(target)
    found = report["attention_precision"]
    assert found is None or found["gemms"]["rows"] == []


def test_machines_without_a_kernel_keep_matmuls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_gemms(monkeypatch)
    status, target, report = run(tmp_path, bert_layer(tmp_path / "model.onnx"), "--allow-bf16")
    assert status == 0
    assert not gemms_of(target)
    rows = report["attention_precision"]["gemms"]["rows"]
    assert {row["reason"] for row in rows} == {"this machine has no bf16 kernel for GEMMs"}


@REAL
def test_gemms_that_do_not_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: matmuls stay with the reason, and attention takes the precision all the same."""

    def fail(*given: object) -> None:
        raise UnsupportedError("two chains wait for each other")

    monkeypatch.setattr(apply, "put_gemms", fail)
    status, target, report = run(tmp_path, bert_layer(tmp_path / "model.onnx"), "--allow-bf16")
    assert status == 0
    assert not gemms_of(target)
    found = report["attention_precision"]
    assert all(row["reason"] == "two chains wait for each other" for row in found["gemms"]["rows"])
    assert [layer["reduced"] for layer in found["layers"]] == [True]


@REAL
def test_matmuls_beside_gemms_of_a_plan_have_a_reason(tmp_path: Path) -> None:
    _, target, _ = run(tmp_path, bert_layer(tmp_path / "model.onnx"), "--allow-bf16")
    model = onnx.load(target)
    model.graph.node.append(helper.make_node("MatMul", ["x", "beside"], ["more"], name="beside/MatMul"))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((HIDDEN, HIDDEN), np.float32), "beside"))
    model.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))
    found = find_gemms(model, Symbolic(model), tmp_path)
    assert [(site.name, site.chain) for site in found.sites if site.name == "beside/MatMul"] == [
        ("beside/MatMul", None)
    ]
    assert all("has StofGemm already" in site.reason for site in found.sites)
