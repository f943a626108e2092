# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 and matmuls at the edge of what StofGemm takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from gemm_layers import HIDDEN, REAL, LayerGraph, bert_layer, drawn, gemms_of, outputs_of
from onnx import numpy_helper
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
