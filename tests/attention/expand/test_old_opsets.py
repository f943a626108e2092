# SPDX-License-Identifier: Apache-2.0
"""Opsets 7 to 12, which are converted, and the reshapes that converters write around a softmax."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import forced, run, same
from onnx import numpy_helper, parser

import stof
from stof.errors import ModelError
from stof.graph.external_data import is_external
from stof.graph.index import opset_of
from stof.graph.load_save import SMALLEST_OPSET, load
from stof.graph.old_opsets import OLDEST_CONVERTED
from stof.options import Options

OPSETS = range(OLDEST_CONVERTED, SMALLEST_OPSET)
# Axes and ratios are attributes. Padding is added to scores, since these opsets have no Where of their own before 9.
MODEL = """
<ir_version: %d, opset_import: ["" : %d]>
layer (float[B, S, 16] x, int64[B, S] pad) => (float[B, S, 16] y) {
    heads = Constant <value = int64[4] {0, 0, 2, 8}> ()
    merged = Constant <value = int64[3] {0, 0, 16}> ()
    one = Constant <value = float {1.0}> ()
    low = Constant <value = float {-1e30}> ()
    p = MatMul (x, weight)
    h = Reshape (p, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (h)
    kt = Transpose <perm = [0, 2, 3, 1]> (h)
    padded = Unsqueeze <axes = [1, 2]> (pad)
    real = Cast <to = 1> (padded)
    away = Sub (one, real)
    added = Mul (away, low)
    s1 = MatMul (q, kt)
    s2 = Add (s1, added)
    w = Softmax <axis = 3> (s2)
    d = Dropout (w)
    o = MatMul (d, q)
    t = Transpose <perm = [0, 2, 1, 3]> (o)
    y = Reshape (t, merged)
}
"""


def old_model(opset: int, ir_version: int = 6, size: int = 16) -> onnx.ModelProto:
    made = parser.parse_model(MODEL % (ir_version, opset))
    weight = np.random.default_rng(0).standard_normal((size, 16)).astype(np.float32) / 8
    made.graph.initializer.append(numpy_helper.from_array(weight, "weight"))
    if ir_version < 4:
        made.graph.input.append(onnx.helper.make_tensor_value_info("weight", 1, weight.shape))
    return made


def feeds() -> dict[str, np.ndarray]:
    pad = np.ones((2, 11), np.int64)
    pad[1, 6:] = 0
    return {"x": np.random.default_rng(1).standard_normal((2, 11, 16)).astype(np.float32), "pad": pad}


@pytest.mark.parametrize("opset", OPSETS)
def test_old_opset(opset: int, tmp_path: Path) -> None:
    original = old_model(opset)
    report, target = forced(original, tmp_path)
    assert [(s.replaced, s.mask) for s in report.sites] == [(True, "pad[b, k]")], report.sites
    assert opset_of(onnx.load(target)) == SMALLEST_OPSET
    for library in (True, False):
        same(run(target, feeds(), library=library), run(original, feeds()))


def test_the_report_says_that_the_model_was_converted(tmp_path: Path) -> None:
    path, page = tmp_path / "old.onnx", tmp_path / "report.html"
    onnx.save(old_model(11), str(path))
    report = stof.optimize(path, options=Options(report=page, verify_budget=5.0))
    assert report.output
    assert report.converted_opset == (11, SMALLEST_OPSET)
    assert json.loads(report.to_json())["converted_opset"] == {"from": 11, "to": SMALLEST_OPSET}
    assert f"opset: 11 -> {SMALLEST_OPSET} (the model was converted" in report.to_text()
    assert f"11 → {SMALLEST_OPSET}" in page.read_text()
    assert "the model was converted" in page.read_text()
    # Where nothing is replaced, what is copied keeps its opset.
    kept = stof.optimize(path, tmp_path / "copy.onnx", Options(skip=("*",)))
    assert kept.copied
    assert opset_of(onnx.load(tmp_path / "copy.onnx")) == 11
    assert kept.converted_opset is None
    onnx.save(old_model(SMALLEST_OPSET - 1), str(path))
    new = onnx.version_converter.convert_version(onnx.load(path), 17)
    onnx.save(new, str(path))
    plain = stof.optimize(path, options=Options(report=page, verify_budget=5.0))
    assert plain.output
    assert json.loads(plain.to_json())["converted_opset"] is None
    assert "opset:" not in plain.to_text()
    assert "converted" not in page.read_text()


def test_weights_that_are_inputs(tmp_path: Path) -> None:
    """Before IR version 4 every initializer is an input, too."""
    original = old_model(9, ir_version=3)
    report, target = forced(original, tmp_path)
    assert [s.replaced for s in report.sites] == [True], report.sites
    assert [i.name for i in onnx.load(target).graph.input] == ["x", "pad"]
    same(run(target, feeds()), run(original, feeds()))


def test_external_weights_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(old_model(11), path, save_as_external_data=True, location="weights", size_threshold=0)
    converted = load(path)
    assert opset_of(converted) == SMALLEST_OPSET
    assert [is_external(t) for t in converted.graph.initializer if t.name == "weight"] == [True]


def test_no_conversion(tmp_path: Path) -> None:
    """The converter has no form of this operator in a later opset."""
    original = old_model(9)
    original.graph.node.append(onnx.helper.make_node("Upsample", ["y", "scales"], ["up"], mode="cubic"))
    original.graph.node.append(onnx.helper.make_node("NoOperator", ["y"], ["z"]))
    original.graph.initializer.append(numpy_helper.from_array(np.array([1, 1, 2], np.float32), "scales"))
    path = tmp_path / "model.onnx"
    path.write_bytes(original.SerializeToString())
    with pytest.raises(
        ModelError, match=r"has opset 9, which cannot be converted to 13 .*; export it again with opset 13"
    ):
        load(path)


WRAPPED = {
    "flattened": ("f = Flatten <axis = 3> (s2)", "shape = Shape (s2) w = Reshape (m, shape)"),
    "reshaped": ("two = Constant <value = int64[2] {-1, 11}> () f = Reshape (s2, two)", "w = Reshape (m, own)"),
    "in two steps": (
        "three = Constant <value = int64[3] {-1, 11, 11}> () a = Reshape (s2, three) f = Flatten <axis = 2> (a)",
        "c = Reshape (m, three) w = Reshape (c, own)",
    ),
}
PLAIN = """
<ir_version: 8, opset_import: ["" : 17]>
layer (float[2, 11, 16] x) => (float[2, 11, 16] y) {
    heads = Constant <value = int64[4] {0, 0, 2, 8}> ()
    merged = Constant <value = int64[3] {0, 0, 16}> ()
    own = Constant <value = int64[4] {2, 2, 11, 11}> ()
    h = Reshape (x, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (h)
    kt = Transpose <perm = [0, 2, 3, 1]> (h)
    s2 = MatMul (q, kt)
    %s
    m = Softmax <axis = %d> (f)
    %s
    o = MatMul (w, q)
    t = Transpose <perm = [0, 2, 1, 3]> (o)
    y = Reshape (t, merged)
}
"""


@pytest.mark.parametrize("form", WRAPPED)
def test_softmax_between_reshapes(form: str, tmp_path: Path) -> None:
    before, after = WRAPPED[form]
    original = parser.parse_model(PLAIN % (before, -1, after))
    report, target = forced(original, tmp_path)
    assert [s.replaced for s in report.sites] == [True], report.sites
    given = {"x": feeds()["x"]}
    for library in (True, False):
        same(run(target, given, library=library), run(original, given))


@pytest.mark.parametrize(
    ("before", "axis", "after"),
    [
        ("f = Flatten <axis = 2> (s2)", -1, "w = Reshape (m, own)"),  # over all keys of all queries of a head
        ("f = Flatten <axis = 3> (s2)", 0, "w = Reshape (m, own)"),  # over the rows
    ],
)
def test_softmax_over_other_axes_is_kept(before: str, axis: int, after: str, tmp_path: Path) -> None:
    original = parser.parse_model(PLAIN % (before, axis, after))
    report, _ = forced(original, tmp_path)
    assert [s.replaced for s in report.sites] == [False]
