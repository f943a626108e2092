# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 and matmuls of fp16 and bf16 models, against fp64 NumPy with the same roundings."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from gemm_layers import HIDDEN, REAL, LayerGraph, bert_layer, erf_layer, gemms_of, modernbert_layer, outputs_of
from onnx import TensorProto, helper, numpy_helper
from precision_runs import run

# isort: split
from stof.runtime.bf16_kernel import cpu_bf16_gemm_kernel
from stof.runtime.library import Op, Tensor, call, tensor_of

TYPES = {
    "fp16": (np.dtype(np.float16), TensorProto.FLOAT16),
    "bf16": (np.dtype(ml_dtypes.bfloat16), TensorProto.BFLOAT16),
}
EACH_TYPE = pytest.mark.parametrize("kind", list(TYPES))


def convert(path: Path, kind: str, weights: Callable[[np.ndarray], np.ndarray] = lambda array: array) -> Path:
    """Gives a file's weights and activations another type; its input and output stay fp32, with casts."""
    dtype, number = TYPES[kind]
    model = onnx.load(path)
    graph = model.graph
    for tensor in graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            tensor.CopyFrom(numpy_helper.from_array(weights(numpy_helper.to_array(tensor)).astype(dtype), tensor.name))
    given, result = graph.input[0].name, graph.output[0].name
    for node in graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = {given: "given", result: "result"}.get(name, name)
    graph.node.insert(0, helper.make_node("Cast", [given], ["given"], name="cast_in", to=number))
    graph.node.append(helper.make_node("Cast", ["result"], [result], name="cast_out", to=TensorProto.FLOAT))
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def rows_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The GEMMs of a report."""
    rows: list[dict[str, Any]] = report["attention_precision"]["gemms"]["rows"]
    return rows


@REAL
@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (bert_layer, "fp16"),
        (bert_layer, "bf16"),
        (erf_layer, "fp16"),  # ONNX Runtime has no Erf in bf16
        (modernbert_layer, "fp16"),
        (modernbert_layer, "bf16"),
    ],
)
def test_linear_layers_of_fp16_and_bf16_models(layer: Callable[[Path], Path], kind: str, tmp_path: Path) -> None:
    """All become StofGemm, and the model stays near its original in fp32."""
    exact = layer(tmp_path / "fp32.onnx")
    model = convert(layer(tmp_path / "model.onnx"), kind)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    assert all(row["reduced"] and 1e-5 < row["relative_rms"] < 0.01 for row in rows_of(report))
    assert len(gemms_of(target)) == len(rows_of(report)) >= 4
    assert not any(n.op_type == "MatMul" for n in onnx.load(target).graph.node)
    for length in (1, 7, 70):
        x = np.random.default_rng(length).standard_normal((2, length, HIDDEN)).astype(np.float32)
        wanted = outputs_of(exact, x, library=True).astype(np.float64)
        for library in (True, False) if kind == "fp16" else (True,):  # ONNX Runtime has no MatMul in bf16
            away = outputs_of(target, x, library=library) - wanted
            assert 1e-5 < np.sqrt(np.square(away).sum() / np.square(wanted).sum()) < 0.03


def single(
    path: Path,
    kind: str,
    columns: int,
    inner: int,
    *,
    is_transposed: bool,
    weights: Callable[[np.ndarray], np.ndarray] = lambda array: array,
) -> Path:
    """One attention, and one linear layer of the input's first columns with a bias."""
    g = LayerGraph()
    attended = g.attention(*[g.heads("x")] * 3)
    first = g.add("Slice", ["x", g.constant([0]), g.constant([inner]), g.constant([2])])
    if is_transposed:
        flat = g.add("Reshape", [first, g.constant([-1, inner])])
        y = g.add("Gemm", [flat, g.weight(columns, inner), g.weight(columns)], transB=1)
    else:
        y = g.add("MatMul", [first, g.weight(inner, columns)])
        y = g.add("Add", [y, g.weight(columns)])
    shape = ["batch", "sequence", HIDDEN]
    graph = helper.make_graph(
        g.nodes,
        "single",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [
            helper.make_tensor_value_info(
                y, TensorProto.FLOAT, ["rows", columns] if is_transposed else [*shape[:2], columns]
            ),
            helper.make_tensor_value_info(attended, TensorProto.FLOAT, shape),
        ],
        g.weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), path)
    model = onnx.load(path)
    # The second output, too, is cast.
    model.graph.node.append(helper.make_node("Cast", [attended], ["attended"], to=TensorProto.FLOAT))
    model.graph.output[1].name = "attended"
    onnx.save(model, path)
    return convert(path, kind, weights)


@REAL
@EACH_TYPE
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize(("inner", "columns"), [(128, 128), (128, 129), (127, 161), (64, 257), (1, 16400)])
def test_one_layer_equals_the_definition(
    inner: int, columns: int, is_transposed: bool, kind: str, tmp_path: Path
) -> None:
    """Factors are bf16 numbers, sums are not rounded, the result is rounded once to its type."""
    dtype, _ = TYPES[kind]
    model = single(tmp_path / "model.onnx", kind, columns, inner, is_transposed=is_transposed)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    (row,) = rows_of(report)
    assert row["reduced"], row["reason"]
    stored = [numpy_helper.to_array(t) for t in onnx.load(model).graph.initializer]
    weight = next(a for a in stored if a.ndim == 2)
    bias = next(a for a in stored if a.shape == (columns,) and a.dtype == dtype)
    x = np.random.default_rng(3).standard_normal((2, 17, HIDDEN)).astype(np.float32)
    left = x[..., :inner].astype(dtype).astype(ml_dtypes.bfloat16).astype(np.float64).reshape(-1, inner)
    right = (weight.T if is_transposed else weight).astype(ml_dtypes.bfloat16).astype(np.float64)
    exact = left @ right + bias.astype(np.float64)
    found = outputs_of(target, x, library=True).astype(np.float64).reshape(exact.shape)
    # One rounding to the type: half a unit in the last place, and the rounding of sums.
    half_unit = float(ml_dtypes.finfo(dtype).eps) / 2
    assert (np.abs(found - exact) <= half_unit * np.abs(exact) * 1.001 + 1e-6 * np.abs(exact).max()).all()


@REAL
def test_bf16_models_are_not_rounded_again(tmp_path: Path) -> None:
    """A matmul that moves bf16 numbers moves them bit by bit."""
    place = np.random.default_rng(1).permutation(HIDDEN)

    def choose(array: np.ndarray) -> np.ndarray:
        if array.shape != (HIDDEN, HIDDEN):
            return np.zeros_like(array) if array.ndim == 1 else array
        matrix = np.zeros_like(array)
        matrix[place, np.arange(HIDDEN)] = 1.0
        return matrix

    path = tmp_path / "model.onnx"
    model = single(path, "bf16", HIDDEN, HIDDEN, is_transposed=False, weights=choose)
    _, target, report = run(tmp_path, model, "--allow-bf16")
    (row,) = rows_of(report)
    assert row["reduced"]
    x = np.random.default_rng(2).standard_normal((1, 40, HIDDEN)).astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(outputs_of(target, x, library=True), x[..., place])


@REAL
@EACH_TYPE
def test_gates_and_plans(kind: str, tmp_path: Path) -> None:
    """Cosines on inputs, and a plan that keeps the choice."""
    model, plan, inputs = (
        convert(bert_layer(tmp_path / "model.onnx"), kind),
        tmp_path / "plan.json",
        tmp_path / "in.npz",
    )
    np.savez(inputs, x=np.random.default_rng(2).standard_normal((2, 33, HIDDEN)).astype(np.float32))
    status, target, report = run(tmp_path, model, "--allow-bf16", "--inputs", str(inputs), "--save-plan", str(plan))
    assert status == 0
    (cosine,) = report["attention_precision"]["cosines"].values()
    assert 1 - 1e-4 < cosine < 1
    assert len(json.loads(plan.read_text())["gemm_precision"]) == 6
    status, target, _ = run(tmp_path, model, "--allow-bf16", "--plan", str(plan), "--no-verify")
    assert status == 0
    assert len(gemms_of(target)) == 6


@REAL
@pytest.mark.parametrize("is_exact", [True, False])
def test_fp16_sums_beyond_its_largest_number(is_exact: bool, tmp_path: Path) -> None:
    """Infinite with and without rounding of factors: no fault of the kernel. Infinite by rounding alone: the matmul stays."""
    g = LayerGraph()
    y = g.add("Tanh", [g.linear("x", HIDDEN, HIDDEN, has_bias=False)])
    model = g.save(tmp_path / "model.onnx", g.add("Add", [y, g.attention(*[g.heads("x")] * 3)]))

    def enlarge(array: np.ndarray) -> np.ndarray:
        if array.shape != (HIDDEN, HIDDEN):
            return array
        return np.sign(array) * 2**15 if is_exact else array.clip(-0.5, 0.5) * 1.2e5

    convert(model, "fp16", enlarge)
    inputs = tmp_path / "inputs.npz"
    numbers = np.random.default_rng(0).integers(-2, 3, (1, 50, HIDDEN)).astype(np.float32)
    np.savez(inputs, x=numbers if is_exact else numbers / 3)
    _, target, report = run(tmp_path, model, "--allow-bf16", "--inputs", str(inputs))
    (row,) = rows_of(report)
    assert (row["reduced"], len(gemms_of(target))) == (is_exact, int(is_exact)), row["reason"]
    assert is_exact or "a number beyond the largest of the precision" in row["reason"]


@REAL
def test_models_of_two_types(tmp_path: Path) -> None:
    """One function serves all StofGemm: the type of most matmuls is taken, others have a reason."""
    model = convert(bert_layer(tmp_path / "model.onnx"), "fp16")
    loaded = onnx.load(model)
    weight = np.random.default_rng(0).standard_normal((HIDDEN, 256)).astype(np.float32)
    loaded.graph.initializer.append(numpy_helper.from_array(weight, "single"))
    loaded.graph.node.append(helper.make_node("MatMul", ["x", "single"], ["more"], name="single/MatMul"))
    loaded.graph.output.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, None))
    onnx.save(loaded, model)
    _, target, report = run(tmp_path, model, "--allow-bf16")
    left = [row for row in rows_of(report) if not row["reduced"]]
    reason = "it is fp32, expected fp16 as most matmuls by constant weights: all StofGemm of a model share one type"
    assert [(row["node"], row["reason"]) for row in left] == [("single/MatMul", reason)]
    assert len(gemms_of(target)) == 6


_AXES = "axes m = x0.0, n = x0.1; out y0 {} [m, n] = "


def gelu(x: np.ndarray) -> np.ndarray:
    """By erf."""
    return np.asarray(x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2)


def silu(x: np.ndarray) -> np.ndarray:
    """The argument times its sigmoid."""
    return np.asarray(x / (1 + np.exp(-x)))


@EACH_TYPE
@pytest.mark.parametrize("allowed", [0, 1])
@pytest.mark.parametrize("rows", [0, 1, 33, 600])
@pytest.mark.parametrize(
    ("epilogue", "pair", "shapes", "definition"),
    [
        ("", 0, (), lambda p: p),
        ("gelu(x0[m, n] + x1[n])", 0, ("n",), lambda p, x: gelu(p + x)),
        ("(x0[m, n] + x1[n]) * x2[n] + x3[m, n]", 0, ("n", "n", "mn"), lambda p, x, y, z: (p + x) * y + z),
        ("x0[m, n] * x1[m] + x2[m, n]", 0, ("m", "mn"), lambda p, x, y: p * x[:, None] + y),
        ("tanh(x0[m, n]) * x0[m, n] + x1[]", 0, ("",), lambda p, x: np.tanh(p) * p + x),
        ("gelu(x0[m, n]) * x1[m, n]", 1, (), lambda p, q: gelu(p) * q),
        ("x0[m, n] * silu(x1[m, n] + x2[n])", 1, ("n",), lambda p, q, x: p * silu(q + x)),
        (
            "silu(x0[m, n] + x2[n]) * (x1[m, n] + x3[n])",
            2,
            ("n", "n"),
            lambda p, q, x, y: silu(p + x) * (q + y),
        ),
    ],
)
def test_the_operator_equals_its_definition(
    epilogue: str,
    pair: int,
    shapes: tuple[str, ...],
    definition: Callable[..., np.ndarray],
    rows: int,
    allowed: int,
    kind: str,
) -> None:
    """Epilogues that kernels apply, others that are applied as chains, pairs and empty operands, with packed weights."""
    dtype, _ = TYPES[kind]
    columns, inner = 41, 70
    random = np.random.default_rng(rows + pair)
    sizes = {"n": (columns,), "m": (rows,), "mn": (rows, columns), "": ()}

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(random.standard_normal(shape) / 4).astype(dtype)

    a = draw(rows, inner)
    wide = columns * (2 if pair == 1 else 1)
    weights = [draw(inner, wide) for _ in range(2 if pair == 2 else 1)]
    further = [draw(*sizes[shape]) for shape in shapes]
    text = _AXES.format({"fp16": "f16", "bf16": "bf16"}[kind]) + epilogue if epilogue else ""
    operator = Op("StofGemm", {"epilogue": text, "pair": pair, "allow_bf16": allowed})
    known = [Tensor(), *map(tensor_of, weights), *[Tensor()] * len(further)]
    call("stof_op_prepare", operator.handle, (Tensor * len(known))(*known), ctypes.c_int(len(known)))
    found = np.full((rows, columns), np.nan, dtype)
    operator.run([a, *weights, *further], [found], threads=2)

    def narrow(array: np.ndarray) -> np.ndarray:
        is_rounded = allowed and cpu_bf16_gemm_kernel()
        return (array.astype(ml_dtypes.bfloat16) if is_rounded else array).astype(np.float64)

    products = [narrow(a) @ narrow(w) for w in weights]
    if pair == 1:
        products = [products[0][:, :columns], products[0][:, columns:]]
    exact = definition(*products, *(x.astype(np.float64) for x in further))
    half_unit = float(ml_dtypes.finfo(dtype).eps) / 2
    away = np.abs(found.astype(np.float64) - exact)
    assert (away <= 1.001 * half_unit * np.abs(exact) + 2e-6 * max(1.0, np.abs(exact).max(initial=0))).all()
