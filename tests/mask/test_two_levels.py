# SPDX-License-Identifier: Apache-2.0
"""Rows without a key where scores are replaced by the lowest number and a mask of it is added: both together are -inf."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import stof

_HEAD = """<ir_version: 9, opset_import: ["" : 18]>
g (float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v, int64[B, S] mask) => (float[B, 4, S, 8] y) {
    size = Shape (mask)
    n = Gather (size, one)
    i = Range (zero, n, one)
    rows = Unsqueeze (i, ones)
    causal = LessOrEqual (i, rows)
    kept = Cast <to = 9> (mask)
    real = Unsqueeze (kept, middle)
    distance = Sub (rows, i)
    near = Less (distance, five)
    window = And (causal, near)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    scores = MatMul (q, kt)
"""
_TAIL = """
    p = Softmax <axis = -1> (masked)
    y = MatMul (p, v)
}"""
_BOTH = "    both = And (causal, real)\n    added = Where (both, null, lowest)\n"
# name: (nodes, the mask of the site; empty where it is kept)
FORMS = {
    "causal twice, as GPT-Neo": (
        "    first = Where (causal, scores, lowest)\n" + _BOTH + "    masked = Add (first, added)",
        "k <= q",
    ),
    "the sum written the other way round": (
        "    first = Where (causal, scores, lowest)\n" + _BOTH + "    masked = Add (added, first)",
        "k <= q",
    ),
    "a low number whose double is finite": (
        "    first = Where (causal, scores, low)\n"
        + _BOTH.replace("lowest", "low")
        + "    masked = Add (first, added)",
        "k <= q",
    ),
    "a window beside a causal mask": (
        "    first = Where (window, scores, lowest)\n" + _BOTH + "    masked = Add (first, added)",
        "",
    ),
    "a causal mask beside padding": (
        "    first = Where (causal, scores, lowest)\n    added = Where (real, null, lowest)\n    masked = Add (first, added)",
        "",
    ),
    "-10000 beside padding, as OpenAI-GPT": (
        "    first = Where (causal, scores, soft)\n    added = Where (real, null, lowest)\n    masked = Add (first, added)",
        "",
    ),
}


def _model(nodes: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_HEAD + nodes + _TAIL)
    lowest = np.float32(np.finfo(np.float32).min)
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "five": np.array(5),
        "ones": np.array([1]),
        "middle": np.array([1, 2]),
        "null": np.float32(0),
        "lowest": lowest,
        "low": np.float32(-1e30),
        "soft": np.float32(-1e4),
    }
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items())
    return model


def _run(path: Path, feeds: dict[str, np.ndarray], library: bool) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.parametrize("name", FORMS)
def test_rows_without_a_key_get_what_the_graph_gives(name: str, tmp_path: Path) -> None:
    nodes, expression = FORMS[name]
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(_model(nodes), path)
    (site,) = stof.optimize(path, out).sites
    assert site.replaced == bool(expression), site.reason
    if not expression:
        assert "a query without any key gives another mixture of values" in site.reason
        assert "--empty-rows ignore" in site.reason
        return
    assert site.mask == expression
    rng = np.random.default_rng(0)
    for length in (9, 40):
        feeds: dict[str, np.ndarray] = {
            n: rng.standard_normal((4, 4, length, 8)).astype(np.float32) for n in ("q", "k", "v")
        }
        mask = np.ones((4, length), np.int64)
        mask[1, : length // 2] = 0  # the first rows have no key
        mask[2, length // 2 :] = 0
        mask[3] = 0
        feeds["mask"] = mask
        want = _run(path, feeds, False)
        assert np.isfinite(want).all()
        for library in (True, False):
            np.testing.assert_allclose(_run(out, feeds, library), want, atol=3e-6)
