# SPDX-License-Identifier: Apache-2.0
"""Originals that do not run here: which part of them runs, what is compared of their sites, and what is said of that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.cached_attention.gqa_models import Shape, model_of

import stof
from stof import cli
from stof.cached_attention.checks import site_checks
from stof.cached_attention.checks.oracle import CacheStep, CacheStepResult
from stof.execution.ort_sessions import drop_outputs_without_arrays, find_without_arrays
from stof.execution.run_failure import parse_failure
from stof.execution.session_process import RuntimeFailure, create_session
from stof.execution.session_worker import SessionSpec
from stof.symbolic import Symbolic
from stof.verification.runnable_part import RunnablePart, find_runnable_part

# Caches of fp8 have no kernel in ONNX Runtime's CPU provider; q/k norms, windows and types of the builder's models beside them.
SHAPES = {
    "fp8": Shape(cache="float8", rotary=16),
    "fp8, fp16": Shape(cache="float8", rotary=16, dtype="float16", packed=True, channels=(True, True)),
    "fp8, bf16, norms": Shape(cache="float8", rotary=16, dtype="bfloat16", norms=True),
    "fp8, sliding": Shape(cache="float8", window=6, sliding=True, sink=True),
}


def _optimize(model: onnx.ModelProto, folder: Path, *options: str) -> tuple[int, dict[str, Any]]:
    path, report = folder / "model.onnx", folder / "report.json"
    onnx.save(model, path)
    status = cli.main([str(path), "--json", str(report), "--report", str(folder / "report.html"), *options])
    return status, json.loads(report.read_text())


@pytest.mark.parametrize("name", SHAPES)
def test_fp8_caches_need_no_option(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kind: --no-verify must not be needed where the original cannot run here; what was checked instead is said."""
    shape = SHAPES[name]
    status, report = _optimize(model_of(shape, shape, masks=True), tmp_path)
    out, errors = capsys.readouterr()
    assert status == 0, errors
    found = report["verification"]
    assert {c["site"] for c in found["comparisons"]} == {"layer0/node", "layer1/node"}
    assert all(c["coverage"]["compared"] > 100 for c in found["comparisons"])
    assert (found["ok"], found["complete"]) == (True, False)
    partial = {
        "left_out": {"com.microsoft::GroupQueryAttention": 2},
        "inputs": {},
        "shapes": 6,
        "ran": True,
        "message": "",
    }
    assert found["partial"] == partial
    lines = out.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("verified"))
    assert lines[first] == (
        "verified in part: the original does not run here, and no output was compared with it. ONNX Runtime's CPU provider "
        "has no kernel for nodes of it (2 com.microsoft::GroupQueryAttention)"
    )
    assert lines[first + 1] == "verified: types and shapes of 6 tensors of the optimized model (it ran here)"
    assert lines[first + 2].startswith("verified: 2 sites against fp64, worst error ")
    assert "outputs against the original," not in out
    page = (tmp_path / "report.html").read_text()
    assert "Verified in part: the original does not run here" in page
    assert ">in part<" in page
    nodes = onnx.load(tmp_path / "model.stof.onnx").graph.node
    assert sum(n.op_type == "StofCachedAttention" for n in nodes) == 2


def test_a_summary_says_that_it_is_a_part(tmp_path: Path) -> None:
    onnx.save(model_of(SHAPES["fp8"], masks=True), tmp_path / "model.onnx")
    words = "; verified in part: the original does not run here; sites, types and shapes were compared"
    assert stof.optimize(tmp_path / "model.onnx").summary().endswith(words)


def test_faults_of_sites_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = site_checks.run_step

    def wrong(attributes: Any, step: CacheStep) -> CacheStepResult:
        found = own(attributes, step)
        found.output[0, 0, 3] += 1e-2
        return found

    monkeypatch.setattr(site_checks, "run_step", wrong)
    status, report = _optimize(model_of(SHAPES["fp8"], masks=True), tmp_path)
    assert status == 0  # caches can be left as they are
    assert "differs by" in report["caches"][0]["reason"]
    assert not report["caches"][0]["replaced"]
    assert not (tmp_path / "model.stof.onnx").exists()


ATTENTION = """
<ir_version: 10, opset_import: ["": 18, "org.other": 1]>
g (float[B, S, 32] x) => (float[B, S, 32] y)
<float scale = {0.25}, int64[4] cut = {0, 0, 2, 16}, int64[3] join = {0, 0, 32}>
{
    BEFORE
    q = MatMul (h, wq) k = MatMul (h, wk) v = MatMul (h, wv)
    qr = Reshape (q, cut) kr = Reshape (k, cut) vr = Reshape (v, cut)
    qt = Transpose <perm = [0, 2, 1, 3]> (qr) kt = Transpose <perm = [0, 2, 3, 1]> (kr)
    vt = Transpose <perm = [0, 2, 1, 3]> (vr)
    s = MatMul (qt, kt) t = Mul (s, scale) p = Softmax <axis = -1> (t) o = MatMul (p, vt)
    oc = Transpose <perm = [0, 2, 1, 3]> (o) y0 = Reshape (oc, join)
    y = org.other.Mine (y0)
}"""


def _attention(before: str = "h = Identity (x)", value: str = "h") -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(ATTENTION.replace("BEFORE", before))
    for name in ("wq", "wk", "wv"):
        model.graph.initializer.append(
            numpy_helper.from_array((rng.standard_normal((32, 32)) * 0.2).astype(np.float32), name)
        )
    if value:
        model.graph.value_info.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, ["B", "S", 32]))
    return model


def test_attention_behind_operators_that_nobody_registered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, report = _optimize(_attention("h = org.other.Mine (x)"), tmp_path)
    out, errors = capsys.readouterr()
    assert status == 0, errors
    assert report["verification"]["partial"] == {
        "left_out": {"org.other::Mine": 2},
        "inputs": {},
        "shapes": 2,
        "ran": False,
        "message": "",
    }
    assert "as they follow from its graph: it does not run here, either" in out
    assert [c["site"] for c in report["verification"]["comparisons"]] == [report["sites"][0]["site"]]


def test_sites_that_cannot_be_compared_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of integers that an unknown operator computes, nothing is known by which they could be drawn."""
    model = _attention("i = org.other.Mine (x) f = Cast <to = 1> (i) h = Mul (x, f)", "")
    model.graph.value_info.append(helper.make_tensor_value_info("i", TensorProto.INT64, ["B", "S", 32]))
    onnx.save(model, tmp_path / "model.onnx")
    assert cli.main([str(tmp_path / "model.onnx")]) == 3
    errors = capsys.readouterr().err
    assert "cannot be verified, because ONNX Runtime's CPU provider cannot load or run it" in errors
    assert "--no-verify" in errors
    assert not (tmp_path / "model.stof.onnx").exists()


def test_nodes_that_can_be_left_are_left_and_the_option_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where sites cannot be compared by themselves."""
    monkeypatch.setattr("stof.verification.verifier.verify_sites_alone", lambda *_: False)
    status, report = _optimize(model_of(SHAPES["fp8"], masks=True), tmp_path)
    assert status == 0
    assert not report["caches"][0]["replaced"]
    assert "--no-verify replaces it unverified" in report["caches"][0]["reason"]
    assert not (tmp_path / "model.stof.onnx").exists()


def test_other_failures_are_no_missing_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An original that refuses every input is refused: that says something about the model."""
    model = _attention("c = Reshape (x, wrong) h = Reshape (c, join)")
    model.graph.initializer.append(numpy_helper.from_array(np.array([0, 0, 31]), "wrong"))
    del model.graph.node[-1]
    model.graph.node[-1].output[0] = "y"
    onnx.save(model, tmp_path / "model.onnx")
    assert cli.main([str(tmp_path / "model.onnx")]) == 3
    assert "verified in part" not in capsys.readouterr().out


MESSAGES = {
    "Could not find an implementation for MatMul(13) node with name '/a/b'": ("MatMul", "/a/b"),
    "Failed to find kernel for com.microsoft.GroupQueryAttention(1) (node:'n' ep:'CPUExecutionProvider'). Op with": (
        "GroupQueryAttention",
        "n",
    ),
    "Fatal error: org.other:Mine(-1) is not a registered function/op": ("Mine", ""),
    "No Op registered for Mine with domain_version of 1": ("Mine", ""),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_about_missing_kernels(message: str) -> None:
    found = parse_failure(f"[ONNXRuntimeError] : 9 : NOT_IMPLEMENTED : {message}")
    assert found.lacks_kernel
    assert (found.op, found.node) == MESSAGES[message]
    assert not found.is_of_inputs


# ---- the part that runs ----
PART = """
<ir_version: 10, opset_import: ["": 18, "org.other": 1]>
g (float[N] x, float[N] z) => (float[N] y)
{ a = Neg (x) b = org.other.One (a) c = org.other.Two (b, z) d = Add (c, a) e = Exp (d) f = org.other.One (e) y = Neg (f) }"""


def _part(wanted: list[str], without: tuple[str, ...] = ()) -> RunnablePart | None:
    model = onnx.parser.parse_model(PART)
    for name in "abcdef":
        model.graph.value_info.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N"]))
    symbolic = Symbolic(model)

    def load(part: onnx.ModelProto) -> None:
        for node in part.graph.node:
            if node.domain == "org.other":
                raise RuntimeFailure(f"Fatal error: org.other:{node.op_type}(-1) is not a registered function/op")
        create_session(SessionSpec(part.SerializeToString()), 60.0)

    return find_runnable_part(model, wanted, without, symbolic.dtype, load)


def test_nodes_without_kernels_are_left_out() -> None:
    part = _part(["a", "c", "e"])
    assert part is not None
    assert (part.drawn, part.computed) == (("c",), ("a", "e"))
    assert part.left_out == {"org.other::One": 2, "org.other::Two": 1} or part.left_out == {"org.other::Two": 1}
    assert [n.op_type for n in part.model.graph.node] == ["Neg", "Add", "Exp"]
    assert {i.name for i in part.model.graph.input} == {"x", "c"}


def test_inputs_that_cannot_be_given_are_left_out() -> None:
    part = _part(["d"], without=("x",))
    assert part is not None
    assert set(part.drawn) == {"a", "c"}
    assert {i.name for i in part.model.graph.input} == {"a", "c"}
    assert _part(["a"], without=("x",)) is None  # nothing is known


def test_other_refusals_are_raised() -> None:
    model = onnx.parser.parse_model(PART)

    def load(_: onnx.ModelProto) -> None:
        raise RuntimeFailure("the graph is cyclic")

    with pytest.raises(RuntimeFailure, match="cyclic"):
        find_runnable_part(model, ["a"], (), Symbolic(model).dtype, load)


# ---- types of arrays ----
@pytest.mark.parametrize(
    "kind", ["FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "BFLOAT16", "FLOAT16"]
)
def test_arrays_of_types_that_numpy_lacks(kind: str) -> None:
    """Sessions take and give them, bit by bit."""
    number = TensorProto.DataType.Value(kind)
    values = [helper.make_tensor_value_info(n, number, ["N", "M"]) for n in ("x", "y")]
    large = helper.make_tensor_value_info("z", TensorProto.FLOAT, ["N", "M"])
    nodes = [helper.make_node("Identity", ["x"], ["y"]), helper.make_node("Cast", ["x"], ["z"], to=TensorProto.FLOAT)]
    graph = helper.make_graph(nodes, "g", values[:1], [values[1], large])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session = create_session(SessionSpec(model.SerializeToString()), 60.0)
    dtype = helper.tensor_dtype_to_np_dtype(number)
    for shape in ((5, 3), (0, 3)):
        given = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        same, wide = session.run(None, {"x": given}, 60.0)
        assert (same.dtype, same.shape) == (np.dtype(dtype), shape)
        assert same.tobytes() == given.tobytes()
        np.testing.assert_array_equal(wide, given.astype(np.float32))


def test_outputs_of_other_types_are_dropped() -> None:
    values = [
        helper.make_tensor_value_info(n, t, ["N"]) for n, t in (("x", TensorProto.FLOAT), ("y", TensorProto.INT4))
    ]
    graph = helper.make_graph([helper.make_node("Cast", ["x"], ["y"], to=TensorProto.INT4)], "g", values[:1], values)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    assert find_without_arrays(model.graph.output) == {"y": "INT4"}
    assert [o.name for o in drop_outputs_without_arrays(model).graph.output] == ["x"]
    del model.graph.output[1:]
    assert drop_outputs_without_arrays(model) is model
