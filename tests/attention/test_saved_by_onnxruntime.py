# SPDX-License-Identifier: Apache-2.0
"""Models that ONNX Runtime's optimizer has saved: fused nodes of com.microsoft, and convolutions over blocks of channels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from attention_forms import feeds, model, only_site, run
from onnx import numpy_helper

import stof

BODY = """
    one = Constant <value = float {1.0}> ()
    patches0 = Conv <kernel_shape = [2, 2], strides = [2, 2]> (image, w0)
    patches1 = Relu (patches0)
    patches2 = MaxPool <kernel_shape = [1, 1]> (patches1)
    patches = Conv <kernel_shape = [1, 1]> (patches2, w1)
    rows = Constant <value = int64[3] {0, 32, -1}> ()
    flat = Reshape (patches, rows)
    x0 = Transpose <perm = [0, 2, 1]> (flat)
    x1 = LayerNormalization (x0, gain, gain)
    half = Constant <value = float {0.70710678}> ()
    x2 = Mul (x1, half)
    x3 = Erf (x2)
    x4 = Add (x3, one)
    x5 = Mul (x1, x4)
    split = Constant <value = int64[4] {0, 0, 4, 8}> ()
    x6 = Reshape (x5, split)
    q = Transpose <perm = [0, 2, 1, 3]> (x6)
    kt = Transpose <perm = [0, 2, 3, 1]> (x6)
    s1 = MatMul (q, kt)
    scale = Constant <value = float {0.35}> ()
    s2 = Mul (s1, scale)
    p = Softmax <axis = -1> (s2)
    o = MatMul (p, q)
    o4 = Transpose <perm = [0, 2, 1, 3]> (o)
    merged = Constant <value = int64[3] {0, 0, 32}> ()
    out = Reshape (o4, merged)
    """


@pytest.mark.parametrize("level", ["BASIC", "EXTENDED", "ALL"])
def test_the_site_is_found(level: str, tmp_path: Path) -> None:
    graph = model("float[B,3,12,10] image", "float[a,b,c] out", BODY)
    rng = np.random.default_rng(0)
    for name, shape in (("w0", (32, 3, 2, 2)), ("w1", (32, 32, 1, 1)), ("gain", (32,))):
        array = rng.standard_normal(shape).astype(np.float32)
        graph.graph.initializer.append(numpy_helper.from_array(array, name))
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_ENABLE_{level}")
    options.optimized_model_filepath = str(tmp_path / "saved.onnx")
    options.log_severity_level = 4
    ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    saved = onnx.load(tmp_path / "saved.onnx")
    assert only_site(saved).dims[1:] == only_site(graph).dims[1:]
    report = stof.optimize(tmp_path / "saved.onnx", tmp_path / "out.onnx")
    assert [s.replaced for s in report.sites] == [True], report.sites[0].reason
    given = feeds(graph, {"B": 2})
    (found,), (wanted,) = run(onnx.load(tmp_path / "out.onnx"), given, library=True), run(graph, given)
    assert np.abs(found - wanted).max() < 1e-4
