# SPDX-License-Identifier: Apache-2.0
"""Loads unusual declarations: dimensions of -1, and initializers among the inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper

import stof

_GRAPH = """<ir_version: 8, opset_import: ["" : 18]>
g (float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v, int64[B, S] m) => (float[B, 4, S, 8] y) {
    shape = Shape (q)
    n = Gather (shape, two)
    i = Range (zero, n, one)
    rows = Unsqueeze (i, ones)
    columns = Unsqueeze (i, zeros)
    causal = LessOrEqual (columns, rows)
    kept = Cast <to = 9> (m)
    padding = Unsqueeze (kept, middle)
    allowed = And (causal, padding)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    products = MatMul (q, kt)
    scores = Mul (products, scale)
    masked = Where (allowed, scores, lowest)
    weights = Softmax <axis = -1> (masked)
    y = MatMul (weights, v)
}"""


def _model() -> onnx.ModelProto:
    model = onnx.parser.parse_model(_GRAPH)
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "two": np.array(2),
        "zeros": np.array([0]),
        "ones": np.array([1]),
        "middle": np.array([1, 2]),
        "scale": np.float32(0.25),
        "lowest": np.float32(np.finfo(np.float32).min),
    }
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items())
    return model


def _session(path: Path) -> ort.InferenceSession:
    options = ort.SessionOptions()
    stof.register(options)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _check(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    path, out = folder / "model.onnx", folder / "out.onnx"
    onnx.save(model, path)
    (site,) = stof.optimize(path, out).sites
    assert site.mask == "k <= q and pad[b, k]"
    onnx.checker.check_model(str(out))
    rng = np.random.default_rng(0)
    for batch, length in ((1, 5), (3, 33)):
        feeds = {n: rng.standard_normal((batch, 4, length, 8)).astype(np.float32) for n in "qkv"}
        feeds["m"] = (rng.random((batch, length)) < 0.7).astype(np.int64)
        before, after = (_session(p).run(None, feeds)[0] for p in (path, out))
        assert np.abs(before - after).max() < 5e-6
    return onnx.load(str(out))


def test_a_dimension_of_minus_one_is_not_fixed(tmp_path: Path) -> None:
    model = _model()
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = -1
    _check(model, tmp_path)


def _with_inputs(model: onnx.ModelProto, version: int) -> onnx.ModelProto:
    declared = [helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer]
    model.graph.input.extend(declared)
    model.ir_version = version
    return model


@pytest.mark.parametrize("version", [3, 4])
def test_initializers_among_the_inputs(version: int, tmp_path: Path) -> None:
    model = _with_inputs(_model(), version)
    if version == 3:  # constants, which ONNX Runtime asks nobody for
        optimized = _check(model, tmp_path)
        assert [i.name for i in optimized.graph.input] == ["q", "k", "v", "m"]
        return
    path = tmp_path / "model.onnx"  # defaults that a caller may override: the scale is not known
    onnx.save(model, path)
    report = stof.optimize(path, tmp_path / "out.onnx")
    (site,) = report.sites
    assert not site.replaced
    assert "among the graph's inputs, where a caller may override" in site.reason


def test_one_default_is_named_and_a_large_one_is_no_cause(tmp_path: Path) -> None:
    model = _model()
    scale = next(t for t in model.graph.initializer if t.name == "lowest")
    model.graph.input.append(helper.make_tensor_value_info(scale.name, scale.data_type, scale.dims))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    (site,) = stof.optimize(path, tmp_path / "out.onnx").sites
    assert not site.replaced
    assert "the initializer 'lowest' is among the graph's inputs" in site.reason


def test_weights_among_the_inputs_are_still_replaced_around(tmp_path: Path) -> None:
    model = _model()
    table = numpy_helper.from_array(np.ones((4, 8, 8), np.float32), "table")
    model.graph.initializer.append(table)
    model.graph.input.append(helper.make_tensor_value_info("table", table.data_type, table.dims))
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            if name == "v":
                node.input[i] = "turned"
    model.graph.node.insert(0, helper.make_node("MatMul", ["v", "table"], ["turned"]))
    _check(model, tmp_path)


def test_a_classifier_of_such_weights_is_called_one(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18]>
        g (float[B, S, 8] x, float[8, 5] w) => (float[B, S, 5] y) { s = MatMul (x, w)  y = Softmax <axis = -1> (s) }"""
    )
    model.graph.initializer.append(numpy_helper.from_array(np.ones((8, 5), np.float32), "w"))
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    (site,) = stof.optimize(path, tmp_path / "out.onnx").sites
    assert site.reason == "no attention but a classifier: the scores are a product with the weight 'w'"
