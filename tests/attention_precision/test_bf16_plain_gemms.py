# SPDX-License-Identifier: Apache-2.0
"""--allow-bf16 and Gemm nodes with transposed or scaled constants, against fp64 NumPy with the same roundings."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from gemm_layers import HIDDEN, REAL, LayerGraph, gemms_of, run_model
from onnx import TensorProto, helper, numpy_helper
from precision_runs import run

# isort: split
from stof.graph import derived_data

_ROWS = 33
SECOND_COPY = "a second copy would make the file larger"
IN_ANOTHER_WAY = (
    f"its weight 'weight' is read by {{}} in another way, expected the same transB and alpha: {SECOND_COPY}"
)


@dataclass(frozen=True)
class GemmCase:
    """One Gemm behind an attention's input, of fixed rows."""

    columns: int = 200
    inner: int = HIDDEN
    bias: tuple[int, ...] | None = None
    attributes: tuple[tuple[str, float | int], ...] = (("transB", 1),)

    @property
    def is_transposed(self) -> bool:
        return bool(dict(self.attributes).get("transB", 0))

    def write(
        self, folder: Path, *, is_external: bool = False, is_left_transposed: bool = False, factor: float = 1.0
    ) -> tuple[Path, np.ndarray, np.ndarray | None]:
        """The model's file, its weight and its bias, times a factor. The graph has a second output: that of the Gemm."""
        random = np.random.default_rng(len(self.attributes) + self.columns)
        g = LayerGraph()
        shape = (self.columns, self.inner) if self.is_transposed else (self.inner, self.columns)
        weight = (random.standard_normal(shape) * max(self.inner, 1) ** -0.5 * factor).astype(np.float32)
        bias = None if self.bias is None else (random.standard_normal(self.bias) * factor).astype(np.float32)
        g.weights.append(numpy_helper.from_array(weight, "weight"))
        inputs = ["rows", "weight"]
        if bias is not None:
            g.weights.append(numpy_helper.from_array(bias, "bias"))
            inputs.append("bias")
        attended = g.attention(*[g.heads("x")] * 3)
        g.nodes.append(helper.make_node("Gemm", inputs, ["y"], name="gemm", **dict(self.attributes)))
        graph = helper.make_graph(
            g.nodes,
            "gemm",
            [
                helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "sequence", HIDDEN]),
                helper.make_tensor_value_info(
                    "rows", TensorProto.FLOAT, [_ROWS, self.inner][:: -1 if is_left_transposed else 1]
                ),
            ],
            [
                helper.make_tensor_value_info(attended, TensorProto.FLOAT, ["batch", "sequence", HIDDEN]),
                helper.make_tensor_value_info("y", TensorProto.FLOAT, [_ROWS, self.columns]),
            ],
            g.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
        onnx.checker.check_model(model, full_check=True)
        path = folder / "model.onnx"
        onnx.save(model, path, save_as_external_data=is_external, location="model.data", size_threshold=0)
        return path, weight, bias


def rounded(array: np.ndarray) -> np.ndarray:
    """bf16 in fp64."""
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


def compute(path: Path, rows: np.ndarray, *, library: bool, output: str = "y") -> np.ndarray:
    """An output, by default the Gemm's."""
    return run_model(path, {"x": np.zeros((1, 2, HIDDEN), np.float32), "rows": rows}, library=library, output=output)


def put_in_nodes(path: Path) -> None:
    """Makes the weight and the bias outputs of Constant nodes, whose tensors have no names."""
    model = onnx.load(path)
    for tensor in [t for t in model.graph.initializer if t.name in ("weight", "bias")]:
        node = helper.make_node(
            "Constant", [], [tensor.name], value=numpy_helper.from_array(numpy_helper.to_array(tensor))
        )
        model.graph.node.insert(0, node)
        model.graph.initializer.remove(tensor)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)


def check(
    case: GemmCase, folder: Path, *, is_external: bool = False, has_constant_nodes: bool = False
) -> dict[str, Any]:
    """Runs the command, and compares the result with fp64. Gives the GEMM's row of the report."""
    model, weight, bias = case.write(folder, is_external=is_external)
    if has_constant_nodes:
        put_in_nodes(model)
    status, target, report = run(folder, model, "--allow-bf16")
    assert status == 0
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reduced"], row["reason"]
    assert len(gemms_of(target)) == 1
    assert not any(n.op_type == "Gemm" for n in onnx.load(target).graph.node)
    values = dict(case.attributes)
    alpha, beta = values.get("alpha", 1.0), values.get("beta", 1.0)
    scaled = (np.float64(np.float32(alpha)) * weight).astype(np.float32)
    matrix = scaled.T if case.is_transposed else scaled
    added = 0.0 if bias is None else np.float64(np.float32(beta)) * bias
    rows = np.random.default_rng(4).standard_normal((_ROWS, case.inner)).astype(np.float32)
    found = compute(target, rows, library=True).astype(np.float64)
    exact = rounded(rows) @ rounded(matrix) + added
    assert np.abs(found - exact).max() < 1e-5 * np.abs(exact).max()
    wide = rows.astype(np.float64) @ matrix.astype(np.float64) + added
    assert np.abs(compute(target, rows, library=False) - wide).max() < 1e-5 * np.abs(wide).max()
    return dict(row)


@REAL
@pytest.mark.parametrize("columns", [128, 129, 144, 161, 200, 255, 257])
def test_transposed_weights_around_edges_of_tiles(columns: int, tmp_path: Path) -> None:
    assert check(GemmCase(columns), tmp_path)["weights"] == f"{HIDDEN} x {columns}"


@REAL
@pytest.mark.parametrize(("inner", "columns"), [(1, 16384), (2, 8200), (700, 24), (683, 25)])
def test_narrow_and_shallow_weights(inner: int, columns: int, tmp_path: Path) -> None:
    check(GemmCase(columns, inner), tmp_path)


@REAL
@pytest.mark.parametrize(("inner", "columns"), [(0, 200), (HIDDEN, 0)])
def test_weights_without_elements(inner: int, columns: int, tmp_path: Path) -> None:
    """They stay: there is nothing to gain."""
    model, *_ = GemmCase(columns, inner, bias=(columns,)).write(tmp_path)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert (status, gemms_of(target)) == (0, [])
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reason"] == "a weight of 0 elements, expected 16384: nothing to gain"


@REAL
@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("bias", [(), (1,), (200,), (1, 200), (1, 1), (_ROWS, 200)])
def test_every_shape_of_bias(bias: tuple[int, ...], transposed: int, tmp_path: Path) -> None:
    check(GemmCase(bias=bias, attributes=(("transB", transposed),)), tmp_path)


@REAL
@pytest.mark.parametrize("factors", [(0.25, 1.0), (1.0, -2.5), (0.7, 0.3), (-3.0, 0.0)])
@pytest.mark.parametrize("transposed", [0, 1])
def test_factors_become_part_of_constants(factors: tuple[float, float], transposed: int, tmp_path: Path) -> None:
    alpha, beta = factors
    check(GemmCase(bias=(200,), attributes=(("transB", transposed), ("alpha", alpha), ("beta", beta))), tmp_path)


@REAL
def test_a_factor_of_no_bias_says_nothing(tmp_path: Path) -> None:
    check(GemmCase(attributes=(("beta", 0.5),)), tmp_path)


@REAL
@pytest.mark.parametrize("transposed", [0, 1])
def test_a_bias_of_rows_stays_with_a_reason(transposed: int, tmp_path: Path) -> None:
    """A kernel adds a vector of columns or a matrix."""
    model, *_ = GemmCase(bias=(_ROWS, 1), attributes=(("transB", transposed),)).write(tmp_path)
    _, target, report = run(tmp_path, model, "--allow-bf16")
    assert not gemms_of(target)
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reason"].startswith("no kernel computes it")
    assert "weight" in {t.name for t in onnx.load(target).graph.initializer}


@REAL
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("is_external", [False, True])
def test_the_file_does_not_grow_by_the_weight(
    is_external: bool, large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The transposed weight takes the place of the stored one. Simulated: one for which a file has no room."""
    if large:
        monkeypatch.setattr(derived_data, "_LARGE", 1 << 20)
    check(GemmCase(3000), tmp_path, is_external=is_external)
    model = onnx.load(tmp_path / "out.onnx", load_external_data=False)
    assert [t.name for t in model.graph.initializer if "weight" in t.name] == ["weight/transposed"]
    (weight,) = (t for t in model.graph.initializer if t.name == "weight/transposed")
    assert bool(weight.external_data) == large
    before = sum(
        (tmp_path / name).stat().st_size for name in ("model.onnx", "model.data") if (tmp_path / name).exists()
    )
    after = sum(path.stat().st_size for path in tmp_path.glob("out.onnx*"))
    assert after < before + 20_000


@REAL
def test_transposed_weights_beside_external_ones(tmp_path: Path) -> None:
    """They go into a new file. The old one is read for what stays, and keeps the stored weight."""
    model, weight, _ = GemmCase(3000).write(tmp_path)
    small = np.random.default_rng(6).standard_normal((HIDDEN, 10)).astype(np.float32)
    loaded = onnx.load(model)
    loaded.graph.initializer.append(numpy_helper.from_array(small, "small"))
    loaded.graph.node.append(helper.make_node("MatMul", ["rows", "small"], ["z"], name="second"))
    loaded.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    onnx.save(loaded, model, save_as_external_data=True, location="model.data", size_threshold=0)
    before = (tmp_path / "model.data").read_bytes()
    _, target, _ = run(tmp_path, model, "--allow-bf16")
    written = onnx.load(target, load_external_data=False).graph.initializer
    places = {t.name: {e.key: e.value for e in t.external_data}["location"] for t in written if t.external_data}
    assert places["small"] == "model.data"
    assert (tmp_path / "model.data").read_bytes() == before
    assert re.fullmatch(r"out\.onnx\.[0-9a-f]{16}\.data", places["weight/transposed"])
    assert weight.tobytes() in before
    assert weight.T.tobytes() in (tmp_path / places["weight/transposed"]).read_bytes()
    rows = np.random.default_rng(5).standard_normal((_ROWS, HIDDEN)).astype(np.float32)
    for output, exact in (("y", rounded(rows) @ rounded(weight).T), ("z", rows.astype(np.float64) @ small)):
        assert np.abs(compute(target, rows, library=True, output=output) - exact).max() < 1e-5 * np.abs(exact).max()


@REAL
def test_gemms_that_stay_keep_their_weights(tmp_path: Path) -> None:
    """Above the bound of errors nothing is transposed."""
    model, weight, _ = GemmCase(bias=()).write(tmp_path)
    _, target, _ = run(tmp_path, model, "--allow-bf16", "--max-error", "0")
    written = onnx.load(target)
    assert [n.attribute[0].i for n in written.graph.node if n.op_type == "Gemm"] == [1]
    stored = {t.name: numpy_helper.to_array(t) for t in written.graph.initializer}
    np.testing.assert_array_equal(stored["weight"], weight)
    assert not any(name.startswith("weight/") for name in stored)


def add_reader(path: Path, op: str, inputs: list[str], **attributes: object) -> None:
    """A second reader of the weight, before the Gemm or behind it, whose result is an output."""
    model = onnx.load(path)
    model.graph.node.append(helper.make_node(op, inputs, ["z"], name="second", **attributes))
    model.graph.output.append(helper.make_tensor_value_info("z", TensorProto.FLOAT, None))
    onnx.save(model, path)


@REAL
def test_a_weight_that_is_read_twice_once_transposed(tmp_path: Path) -> None:
    """The matmul that reads it as it is stored is taken, the other one stays; both are right."""
    model, weight, _ = GemmCase(HIDDEN).write(tmp_path)
    add_reader(model, "MatMul", ["rows", "weight"])
    _, target, report = run(tmp_path, model, "--allow-bf16")
    first, second = report["attention_precision"]["gemms"]["rows"]
    assert (first["node"], first["reduced"], second["reduced"]) == ("gemm", False, True)
    assert first["reason"] == IN_ANOTHER_WAY.format("MatMul node 'second'")
    rows = np.random.default_rng(5).standard_normal((_ROWS, HIDDEN)).astype(np.float32)
    exact, z = rows.astype(np.float64) @ weight.T, rounded(rows) @ rounded(weight)
    assert np.abs(compute(target, rows, library=True) - exact).max() < 1e-5
    assert np.abs(compute(target, rows, library=True, output="z") - z).max() < 1e-5 * np.abs(z).max()


@REAL
@pytest.mark.parametrize("has_constant_nodes", [False, True])
def test_two_gemms_share_a_transposed_weight(has_constant_nodes: bool, tmp_path: Path) -> None:
    """One copy takes the place of the stored one."""
    model, weight, _ = GemmCase().write(tmp_path)
    if has_constant_nodes:
        put_in_nodes(model)
    add_reader(model, "Gemm", ["rows", "weight"], transB=1)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert status == 0
    assert [row["reduced"] for row in report["attention_precision"]["gemms"]["rows"]] == [True, True]
    assert len(gemms_of(target)) == 2
    assert [t.name for t in onnx.load(target).graph.initializer if t.name.startswith("weight")] == ["weight/transposed"]
    assert target.stat().st_size < model.stat().st_size + 20_000
    rows = np.random.default_rng(5).standard_normal((_ROWS, HIDDEN)).astype(np.float32)
    exact = rounded(rows) @ rounded(weight).T
    for output in ("y", "z"):
        assert np.abs(compute(target, rows, library=True, output=output) - exact).max() < 1e-5 * np.abs(exact).max()


@REAL
def test_one_of_two_that_share_a_weight_is_left_out(tmp_path: Path) -> None:
    """It computes in full precision, and reads the transposed weight as well."""
    model, weight, _ = GemmCase().write(tmp_path)
    add_reader(model, "Gemm", ["rows", "weight"], transB=1)
    status, target, _ = run(tmp_path, model, "--allow-bf16", "--skip", "gemm:second")
    assert status == 0
    assert len(gemms_of(target)) == 1
    written = onnx.load(target).graph
    assert [len(n.attribute) for n in written.node if n.op_type == "Gemm"] == [0]
    assert [t.name for t in written.initializer if t.name.startswith("weight")] == ["weight/transposed"]
    rows = np.random.default_rng(5).standard_normal((_ROWS, HIDDEN)).astype(np.float32)
    exact, wide = rounded(rows) @ rounded(weight).T, rows.astype(np.float64) @ weight.T
    assert np.abs(compute(target, rows, library=True) - exact).max() < 1e-5 * np.abs(exact).max()
    assert np.abs(compute(target, rows, library=True, output="z") - wide).max() < 1e-5 * np.abs(wide).max()
    assert np.abs(exact - wide).max() > 1e-4 * np.abs(wide).max()


@REAL
def test_a_weight_that_is_the_bias_as_well(tmp_path: Path) -> None:
    """The stored one stays for it, so a transposed one would be a second copy."""
    model, weight, _ = GemmCase(HIDDEN).write(tmp_path)
    loaded = onnx.load(model)
    loaded.graph.node[-1].input.append("weight")
    loaded.graph.input[1].type.tensor_type.shape.dim[0].dim_value = HIDDEN
    loaded.graph.output[1].type.tensor_type.shape.dim[0].dim_value = HIDDEN
    onnx.save(loaded, model)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert (status, gemms_of(target)) == (0, [])
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reason"] == f"its weight 'weight' is another operand of Gemm node 'gemm' as well: {SECOND_COPY}"
    rows = np.random.default_rng(5).standard_normal((HIDDEN, HIDDEN)).astype(np.float32)
    exact = rows.astype(np.float64) @ weight.T + weight
    assert np.abs(compute(target, rows, library=True) - exact).max() < 1e-5 * np.abs(exact).max()


@REAL
@pytest.mark.parametrize(
    "attributes", [{"transB": 1, "alpha": 0.5}, {"transB": 1, "transA": 1}], ids=["another factor", "no plain form"]
)
def test_two_that_read_a_weight_in_two_ways_stay(attributes: dict[str, Any], tmp_path: Path) -> None:
    """Two copies would make the file larger."""
    model, weight, _ = GemmCase().write(tmp_path)
    turned = "transA" in attributes
    if turned:
        loaded = onnx.load(model)
        loaded.graph.node.append(helper.make_node("Transpose", ["rows"], ["turned"], perm=[1, 0]))
        onnx.save(loaded, model)
    add_reader(model, "Gemm", ["turned" if turned else "rows", "weight"], **attributes)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert (status, gemms_of(target)) == (0, [])
    reasons = [row["reason"] for row in report["attention_precision"]["gemms"]["rows"]]
    if turned:
        second = "its left operand is transposed (transA)"
        words = f"read by Gemm node 'second' as well, which stays ({second})"
        assert reasons == [f"its weight 'weight' is {words}: {SECOND_COPY}", second]
    else:
        assert reasons == [IN_ANOTHER_WAY.format(f"Gemm node {name!r}") for name in ("second", "gemm")]
    stored = {t.name: numpy_helper.to_array(t) for t in onnx.load(target).graph.initializer}
    np.testing.assert_array_equal(stored["weight"], weight)


@REAL
@pytest.mark.parametrize(
    ("attributes", "bias", "reason"),
    [
        ({"transA": 1}, None, "its left operand is transposed (transA)"),
        ({"alpha": 0.0}, None, "alpha is 0"),
        ({"alpha": 1e30}, None, "alpha is 1e+30, and its weight times alpha exceeds the largest number of fp32"),
        ({"beta": 1e30}, (200,), "beta is 1e+30, and its bias times beta exceeds the largest number of fp32"),
    ],
)
def test_reasons_of_gemms_that_stay(
    attributes: dict[str, float], bias: tuple[int, ...] | None, reason: str, tmp_path: Path
) -> None:
    case = GemmCase(bias=bias, attributes=tuple(attributes.items()))
    path, *_ = case.write(tmp_path, is_left_transposed="transA" in attributes, factor=1e9)
    status, target, report = run(tmp_path, path, "--allow-bf16")
    assert status == 0
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert (row["reduced"], row["reason"]) == (False, reason)
    assert not gemms_of(target)


@REAL
def test_a_scaled_bias_that_is_computed(tmp_path: Path) -> None:
    model, *_ = GemmCase(bias=(200,), attributes=(("transB", 1), ("beta", 2.0))).write(tmp_path)
    loaded = onnx.load(model)
    loaded.graph.node.insert(0, helper.make_node("ReduceSum", ["rows"], ["sum"], keepdims=0))
    loaded.graph.node[-1].input[2] = "sum"
    onnx.save(loaded, model)
    _, _, report = run(tmp_path, model, "--allow-bf16")
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reason"] == "its bias is not constant, and beta is 2"


@REAL
def test_weights_that_scaling_takes_beyond_bf16(tmp_path: Path) -> None:
    """Finite in fp32 also times alpha, infinite once rounded: the Gemm stays as it is."""
    model, weight, _ = GemmCase(attributes=(("transB", 1), ("alpha", 2.0))).write(tmp_path)
    loaded = onnx.load(model)
    tensor = next(t for t in loaded.graph.initializer if t.name == "weight")
    changed = weight.copy()
    changed[3, 5] = np.finfo(np.float32).max / 2
    tensor.CopyFrom(numpy_helper.from_array(changed, "weight"))
    loaded.graph.node[-1].output[0] = "product"
    loaded.graph.node.append(helper.make_node("Tanh", ["product"], ["y"]))
    onnx.save(loaded, model)
    _, target, report = run(tmp_path, model, "--allow-bf16")
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reason"] == "a number beyond the largest of the precision takes a finite result away"
    assert not gemms_of(target)
    assert any(n.op_type == "Gemm" for n in onnx.load(target).graph.node)


@REAL
def test_plans_name_transposed_gemms(tmp_path: Path) -> None:
    model, *_ = GemmCase().write(tmp_path)
    plan = tmp_path / "plan.json"
    run(tmp_path, model, "--allow-bf16", "--save-plan", str(plan))
    assert json.loads(plan.read_text())["gemm_precision"] == {"gemm": "bf16"}
    status, target, _ = run(tmp_path, model, "--allow-bf16", "--plan", str(plan), "--no-verify")
    assert status == 0
    assert len(gemms_of(target)) == 1


@REAL
def test_a_weight_that_a_node_transposes(tmp_path: Path) -> None:
    """A Transpose of a constant is constant: both matmuls are taken, and the runtime folds it before weights are packed."""
    model, weight, _ = GemmCase(HIDDEN, attributes=()).write(tmp_path)
    add_reader(model, "MatMul", ["rows", "turned"])
    loaded = onnx.load(model)
    loaded.graph.node.insert(0, helper.make_node("Transpose", ["weight"], ["turned"], perm=[1, 0]))
    onnx.save(loaded, model)
    _, target, report = run(tmp_path, model, "--allow-bf16")
    assert [row["reduced"] for row in report["attention_precision"]["gemms"]["rows"]] == [True, True]
    rows = np.random.default_rng(5).standard_normal((_ROWS, HIDDEN)).astype(np.float32)
    for output, matrix in (("y", weight), ("z", weight.T)):
        exact = rounded(rows) @ rounded(matrix)
        assert np.abs(compute(target, rows, library=True, output=output) - exact).max() < 1e-5 * np.abs(exact).max()


@REAL
@pytest.mark.parametrize(
    "attributes",
    [(), (("transB", 1),), (("alpha", 0.7), ("beta", 0.3)), (("transB", 1), ("alpha", 0.7), ("beta", 0.3))],
)
@pytest.mark.parametrize("bias", [None, (200,), (1,)])
def test_weights_of_constant_nodes(
    attributes: tuple[tuple[str, float | int], ...], bias: tuple[int, ...] | None, tmp_path: Path
) -> None:
    """They are as good as initializers. The node of one that is transposed or scaled is gone."""
    check(GemmCase(bias=bias, attributes=attributes), tmp_path, has_constant_nodes=True)
    written = onnx.load(tmp_path / "out.onnx").graph
    read = {name for n in written.node for name in n.input}
    large = [n for n in written.node if n.op_type == "Constant" and int(np.prod(n.attribute[0].t.dims)) >= HIDDEN * 200]
    assert len(large) + sum(int(np.prod(t.dims)) >= HIDDEN * 200 for t in written.initializer) == 1
    assert all(n.output[0] in read for n in written.node if n.op_type == "Constant")


def with_computed_weight(path: Path, op: str, **attributes: object) -> None:
    """Makes the Gemm read its weight behind another node."""
    model = onnx.load(path)
    model.graph.node[-1].input[1] = "computed"
    model.graph.node.insert(0, helper.make_node(op, ["weight"], ["computed"], name="before", **attributes))
    onnx.save(model, path)


@REAL
@pytest.mark.parametrize(
    ("op", "attributes"),
    [("Transpose", {"perm": [1, 0]}), ("Cast", {"to": TensorProto.FLOAT}), ("Identity", {})],
)
def test_computed_weights_of_transposing_gemms_have_a_reason(
    op: str, attributes: dict[str, object], tmp_path: Path
) -> None:
    """A computed weight cannot take another layout. The reason names the node, and what to do."""
    model, *_ = GemmCase(HIDDEN, attributes=(("transB", 1), ("alpha", 0.5))).write(tmp_path)
    with_computed_weight(model, op, **attributes)
    status, target, report = run(tmp_path, model, "--allow-bf16")
    assert (status, gemms_of(target)) == (0, [])
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reason"] == (
        f"it has alpha=0.5, transB=1, and its weight 'computed' is no stored tensor but computed by {op} node 'before': "
        "fold constants first"
    )


@REAL
@pytest.mark.parametrize(("op", "attributes"), [("Cast", {"to": TensorProto.FLOAT}), ("Identity", {})])
def test_computed_weights_of_plain_gemms_are_taken(op: str, attributes: dict[str, object], tmp_path: Path) -> None:
    model, weight, _ = GemmCase(HIDDEN, attributes=()).write(tmp_path)
    with_computed_weight(model, op, **attributes)
    _, target, report = run(tmp_path, model, "--allow-bf16")
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reduced"], row["reason"]
    rows = np.random.default_rng(5).standard_normal((_ROWS, HIDDEN)).astype(np.float32)
    exact = rounded(rows) @ rounded(weight)
    assert np.abs(compute(target, rows, library=True) - exact).max() < 1e-5 * np.abs(exact).max()


@REAL
def test_weights_that_are_no_matrices_have_a_reason(tmp_path: Path) -> None:
    g = LayerGraph()
    model = g.save(tmp_path / "model.onnx", g.add("Add", [g.add("MatMul", ["x", g.weight(1, HIDDEN, HIDDEN)]), "x"]))
    _, _, report = run(tmp_path, model, "--allow-bf16")
    (row,) = report["attention_precision"]["gemms"]["rows"]
    assert row["reason"] == "its weight 'w0' has 3 axes, expected a matrix"
