# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 and matmuls at the edge of what StofGemm takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gemm_layers import HIDDEN, REAL, LayerGraph, bert_layer, drawn, gemms_of, outputs_of
from onnx import TensorProto, helper, numpy_helper
from precision_runs import run


def attended(g: LayerGraph, x: str) -> str:
    """One attention of a tensor's heads, without matmuls by weights."""
    return g.attention(*[g.heads(x)] * 3)


def relative(found: np.ndarray, exact: np.ndarray) -> float:
    """The root mean square of the differences over that of the exact numbers."""
    wide = exact.astype(np.float64)
    return float(np.sqrt(np.square(found.astype(np.float64) - wide).sum() / np.square(wide).sum()))


@REAL
def test_matmuls_of_the_models_input_alone(tmp_path: Path) -> None:
    """Nothing has to be computed before them."""
    g = LayerGraph()
    product = g.linear("x", HIDDEN, HIDDEN)
    model = g.save(tmp_path / "model.onnx", g.add("Add", [product, attended(g, "x")]))
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    assert len(gemms_of(target)) == 1
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert 1e-5 < row["relative_rms"] < 0.01
    x = drawn(9)
    assert relative(outputs_of(target, x, library=True), outputs_of(model, x, library=False)) < 0.02


@REAL
def test_a_residual_that_is_the_left_operand(tmp_path: Path) -> None:
    """The matmul is taken, the addition of its own operand is not."""
    g = LayerGraph()
    inner = g.add("Add", ["x", g.weight(HIDDEN)])
    product = g.linear(inner, HIDDEN, HIDDEN, has_bias=False)
    model = g.save(tmp_path / "model.onnx", g.add("Add", [g.add("Add", [inner, product]), attended(g, "x")]))
    _, target, report = run(tmp_path, model, "--allow-bf16")
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert (row["reduced"], row["operators"]) == (True, "MatMul")
    x = drawn(9)
    assert relative(outputs_of(target, x, library=True), outputs_of(model, x, library=False)) < 0.02


@REAL
def test_weights_beyond_the_largest_number_of_bf16(tmp_path: Path) -> None:
    """Finite in fp32, infinite once rounded: the matmul stays, and the output is finite."""
    g = LayerGraph()
    product = g.linear("x", HIDDEN, HIDDEN, has_bias=False)
    model = g.save(tmp_path / "model.onnx", g.add("Add", [g.add("Tanh", [product]), attended(g, "x")]))
    changed = onnx.load(model)
    weight = next(t for t in changed.graph.initializer if tuple(t.dims) == (HIDDEN, HIDDEN))
    array = numpy_helper.to_array(weight).copy()
    array[0, 0] = np.finfo(np.float32).max
    weight.CopyFrom(numpy_helper.from_array(array, weight.name))
    onnx.save(changed, model)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    assert not gemms_of(target)
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reason"] == "a number beyond the largest of the precision takes a finite result away"


@REAL
def test_a_matmul_that_nobody_reads_has_no_row(tmp_path: Path) -> None:
    g = LayerGraph()
    g.linear("x", HIDDEN, HIDDEN, has_bias=False)
    model = g.save(tmp_path / "model.onnx", g.add("Add", ["x", attended(g, "x")]))
    _, _, report = run(tmp_path, model, "--allow-bf16")
    assert report["attention_precision"]["gemms"]["rows"] == []


@REAL
def test_a_plans_gemms_beside_products_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, plan = bert_layer(tmp_path / "model.onnx"), tmp_path / "plan.json"
    assert run(tmp_path, model, "--allow-bf16", "--save-plan", str(plan))[0] == 0
    assert json.loads(plan.read_text())["gemm_precision"]
    status, target, _ = run(tmp_path, model, "--allow-bf16", "--plan", str(plan), "--products", "off")
    assert status == 0
    assert not gemms_of(target)
    assert "the plan's gemm_precision is not applied: --products off" in capsys.readouterr().out


def reasons(report: dict[str, Any]) -> dict[str, str]:
    return {row["node"]: row["reason"] for row in report["attention_precision"]["gemms"]["rows"]}


@REAL
@pytest.mark.parametrize("option", ["gemm:MatMul_4", "gemm:1", "gemm:*_4"])
def test_one_left_out_by_skip(option: str, tmp_path: Path) -> None:
    """By its name, its number and a pattern; the plan has it as the options have it."""
    model, plan = bert_layer(tmp_path / "model.onnx"), tmp_path / "plan.json"
    _, _, before = run(tmp_path, model, "--allow-bf16")
    names = [*reasons(before)]
    assert names[1] == "MatMul_4"
    assert not any(reasons(before).values())
    assert reasons(run(tmp_path, model, "--allow-bf16", "--skip", option, "--dry-run")[2])["MatMul_4"]
    status, target, report = run(tmp_path, model, "--allow-bf16", "--skip", option, "--save-plan", str(plan))
    assert status == 0
    assert reasons(report) == {name: "left out by --skip" if name == "MatMul_4" else "" for name in names}
    assert len(gemms_of(target)) == len(names) - 1
    assert [n.name for n in onnx.load(target).graph.node if n.op_type == "MatMul"] == ["MatMul_4"]
    assert "MatMul_4" not in json.loads(plan.read_text())["gemm_precision"]


@REAL
def test_one_chosen_by_only(tmp_path: Path) -> None:
    """Attention is chosen by names of its own."""
    model = bert_layer(tmp_path / "model.onnx")
    status, target, report = run(tmp_path, model, "--allow-bf16", "--only", "gemm:MatMul_4")
    assert status == 0
    assert {name for name, reason in reasons(report).items() if not reason} == {"MatMul_4"}
    assert set(reasons(report).values()) == {"", "not among --only"}
    assert len(gemms_of(target)) == 1
    assert report["sites"][0]["replaced"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--allow-bf16", "--skip", "gemm:no"],
            "--skip 'gemm:no' names no GEMM of the model; its GEMMs are 0 'MatMul_0', 1",
        ),
        (["--allow-bf16", "--only", "gemm:9"], "--only 'gemm:9' names no GEMM of the model"),
        (["--skip", "gemm:0"], "no GEMM is looked for here; --allow-bf16 alone looks for them"),
        (
            ["--allow-bf16", "--products", "off", "--skip", "gemm:0"],
            "no GEMM is looked for here; --products off leaves",
        ),
        (["--allow-bf16", "--explain", "gemm:0"], "--explain 'gemm:0' names a GEMM, and these have one reason each"),
    ],
)
def test_wrong_names_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, target, _ = run(tmp_path, bert_layer(tmp_path / "model.onnx"), *options)
    assert (status, target.exists()) == (1, False)
    assert message in capsys.readouterr().err


@REAL
def test_transposed_weights_of_other_types_have_a_reason(tmp_path: Path) -> None:
    """It has the type and shape that were found."""
    g = LayerGraph()
    output = attended(g, "x")
    model = onnx.load(g.save(tmp_path / "model.onnx", output))
    model.graph.initializer.append(numpy_helper.from_array(np.ones((200, HIDDEN)), "wide"))
    model.graph.node.append(helper.make_node("Gemm", ["rows", "wide"], ["y"], name="gemm", transB=1))
    model.graph.input.append(helper.make_tensor_value_info("rows", TensorProto.DOUBLE, [33, HIDDEN]))
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.DOUBLE, [33, 200]))
    onnx.save(model, tmp_path / "model.onnx")
    status, target, report = run(tmp_path, tmp_path / "model.onnx", "--allow-bf16")
    assert (status, gemms_of(target)) == (0, [])
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reason"] == (
        f"it has transB=1, and its weight 'wide' is 200 x {HIDDEN} DOUBLE, expected a stored matrix of fp32, fp16 or bf16"
    )


@REAL
def test_a_transposed_weight_that_is_an_output_stays(tmp_path: Path) -> None:
    """Whoever runs the model reads it as it is stored."""
    g = LayerGraph()
    output = attended(g, "x")
    model = onnx.load(g.save(tmp_path / "model.onnx", output))
    weight = np.random.default_rng(1).standard_normal((200, HIDDEN)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    model.graph.node.append(helper.make_node("Gemm", ["rows", "weight"], ["y"], name="gemm", transB=1))
    model.graph.input.append(helper.make_tensor_value_info("rows", TensorProto.FLOAT, [33, HIDDEN]))
    model.graph.output.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, [33, 200]))
    model.graph.output.append(helper.make_tensor_value_info("weight", TensorProto.FLOAT, [200, HIDDEN]))
    onnx.save(model, tmp_path / "model.onnx")
    status, target, report = run(tmp_path, tmp_path / "model.onnx", "--allow-bf16")
    assert (status, gemms_of(target)) == (0, [])
    (row,) = report["attention_precision"]["gemms"]["rows"]
    words = "an output of the model as well: a second copy would make the file larger"
    assert row["reason"] == f"its weight 'weight' is {words}"
