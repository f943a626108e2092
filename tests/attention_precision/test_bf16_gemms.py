# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 and matmuls by constant weights: which become StofGemm, their errors, gates, plans, and what they compute."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from precision_runs import leave_gemms, run

# isort: split
from trained_runs import COUNT, LENGTH, evaluate, measured_options, texts_of, write_model

# isort: split
import stof
from stof.attention_precision import apply
from stof.errors import UnsupportedError
from stof.gemm_precision.sites import find_gemms
from stof.graph.index import DOMAIN
from stof.runtime.bf16_kernel import cpu_bf16_gemm_kernel
from stof.runtime.library import library_path
from stof.symbolic import Symbolic

REAL = pytest.mark.skipif(
    not cpu_bf16_gemm_kernel(), reason="this machine has no bf16 instructions, or no kernel of them"
)
_HIDDEN, _HEADS, _SIZE = 128, 4, 32


class _Graph:
    """Nodes and weights, drawn in the order in which they are asked for."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(8)

    def add(self, op: str, inputs: list[str], **attributes: object) -> str:
        output = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [output], name=f"{op}_{len(self.nodes)}", **attributes))
        return output

    def weight(self, *shape: int) -> str:
        scale = shape[0] ** -0.5 if len(shape) > 1 else 0.1
        array = (self._random.standard_normal(shape) * scale).astype(np.float32)
        self.weights.append(numpy_helper.from_array(array, f"w{len(self.weights)}"))
        return self.weights[-1].name

    def constant(self, values: list[int] | float) -> str:
        array = np.float32(values) if isinstance(values, float) else np.array(values, np.int64)
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def linear(self, x: str, inner: int, columns: int, *, has_bias: bool = True) -> str:
        y = self.add("MatMul", [x, self.weight(inner, columns)])
        return self.add("Add", [y, self.weight(columns)]) if has_bias else y

    def heads(self, x: str) -> str:
        y = self.add("Reshape", [x, self.constant([0, 0, _HEADS, _SIZE])])
        return self.add("Transpose", [y], perm=[0, 2, 1, 3])

    def attention(self, q: str, k: str, v: str) -> str:
        keys = self.add("Transpose", [k], perm=[0, 1, 3, 2])
        scores = self.add("Mul", [self.add("MatMul", [q, keys]), self.constant(_SIZE**-0.5)])
        values = self.add("MatMul", [self.add("Softmax", [scores], axis=-1), v])
        joined = self.add("Transpose", [values], perm=[0, 2, 1, 3])
        return self.add("Reshape", [joined, self.constant([0, 0, _HIDDEN])])

    def save(self, path: Path, output: str) -> Path:
        shape = ["batch", "sequence", _HIDDEN]
        graph = helper.make_graph(
            self.nodes,
            "layer",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, shape)],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, path)
        return path


def bert_layer(path: Path, *, has_erf: bool = False) -> Path:
    """Attention and MLP with biases, GELU, spelled out on request, and residuals."""
    g = _Graph()
    q, k, v = (g.heads(g.linear("x", _HIDDEN, _HIDDEN)) for _ in range(3))
    attended = g.add("Add", [g.linear(g.attention(q, k, v), _HIDDEN, _HIDDEN), "x"])
    normed = g.add("LayerNormalization", [attended, g.weight(_HIDDEN)], axis=-1)
    hidden = g.linear(normed, _HIDDEN, 512)
    if has_erf:
        raised = g.add("Add", [g.add("Erf", [g.add("Div", [hidden, g.constant(2**0.5)])]), g.constant(1.0)])
        hidden = g.add("Mul", [g.add("Mul", [hidden, raised]), g.constant(0.5)])
    else:
        hidden = g.add("Gelu", [hidden])
    return g.save(path, g.add("Add", [g.linear(hidden, 512, _HIDDEN), normed]))


def erf_layer(path: Path) -> Path:
    """The same as older exporters write it."""
    return bert_layer(path, has_erf=True)


def modernbert_layer(path: Path) -> Path:
    """Query, key and value of one weight, a gated MLP of one weight, no biases."""
    g = _Graph()
    packed = g.linear("x", _HIDDEN, 3 * _HIDDEN, has_bias=False)
    g.nodes.append(helper.make_node("Split", [packed], ["q", "k", "v"], name="split", axis=-1, num_outputs=3))
    attended = g.linear(g.attention(*map(g.heads, "qkv")), _HIDDEN, _HIDDEN, has_bias=False)
    x = g.add("Add", [attended, "x"])
    both = g.linear(g.add("LayerNormalization", [x, g.weight(_HIDDEN)], axis=-1), _HIDDEN, 320, has_bias=False)
    g.nodes.append(helper.make_node("Split", [both], ["gate", "up"], name="gates", axis=-1, num_outputs=2))
    gated = g.add("Mul", [g.add("Gelu", ["gate"]), "up"])
    return g.save(path, g.add("Add", [g.linear(gated, 160, _HIDDEN, has_bias=False), x]))


def gemms_of(path: Path) -> list[onnx.NodeProto]:
    """The StofGemm nodes of a file."""
    return [n for n in onnx.load(path).graph.node if n.domain == DOMAIN and n.op_type == "StofGemm"]


def outputs_of(path: Path, x: np.ndarray, *, library: bool) -> np.ndarray:
    """The output on an input."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        options.register_custom_ops_library(str(library_path()))
    found: np.ndarray = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]).run(
        None, {"x": x}
    )[0]
    return found


def drawn(length: int) -> np.ndarray:
    """An input of two texts."""
    return np.random.default_rng(length).standard_normal((2, length, _HIDDEN)).astype(np.float32)


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
    texts = texts_of(name, LENGTH, COUNT, seed=5)
    dense = tmp_path / "dense.onnx"
    stof.optimize(path, dense, verify=False)
    exact, accuracy = evaluate(dense, name, texts)[0], evaluate(target, name, texts)[0]
    assert exact >= 0.98
    assert accuracy >= exact - 0.005


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
    model.graph.initializer.append(numpy_helper.from_array(np.ones((_HIDDEN, _HIDDEN), np.float32), "beside"))
    found = find_gemms(model, Symbolic(model))
    assert [(site.name, site.chain) for site in found.sites if site.name == "beside/MatMul"] == [
        ("beside/MatMul", None)
    ]
    assert all("has StofGemm already" in site.reason for site in found.sites)
