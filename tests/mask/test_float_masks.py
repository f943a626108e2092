# SPDX-License-Identifier: Apache-2.0
"""Masks that callers give as numbers 0 and 1, from which a graph makes what it adds to scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import stof
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.symbolic import Symbolic

_LOWEST = "-3.4028234663852886e38"
# What is added of a mask m, and whether its ones forbid.
_ADDED = {
    "one less the mask, times the lowest number": (f"x = Sub (one, m) b = Mul (x, fill) {{{_LOWEST}}}", False),
    "one less the mask, times -10000": ("x = Sub (one, m) b = Mul (x, fill) {-10000.0}", False),
    "the mask times -1e9": ("b = Mul (m, fill) {-1e9}", True),
    "the mask less one, times 1e9": ("x = Sub (m, one) b = Mul (fill, x) {1e9}", False),
    "the mask less one, over a small number": ("x = Sub (m, one) b = Div (x, fill) {1e-9}", False),
    "the mask itself": ("b = Identity (m) {1.0}", None),
    "one over the mask": ("b = Div (one, m) {1.0}", None),
    "a little of the mask": ("b = Mul (m, fill) {4.0}", None),
}


def model_of(added: str, mask: str, path: Path) -> onnx.ModelProto:
    nodes, _, fill = added.partition("{")
    axes = "wide = Unsqueeze (mask, axes) m = Identity (wide)" if mask == "float[B, S]" else "m = Identity (mask)"
    text = f"""
    g (float[B, 2, S, 8] q, float[B, 2, S, 8] k, float[B, 2, S, 8] v, {mask} mask) => (float[B, 2, S, 8] y) {{
        axes = Constant <value = int64[2] {{1, 2}}> ()
        one = Constant <value = float {{1}}> ()
        fill = Constant <value = float {{{fill}> ()
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        scores = MatMul (q, kt)
        {axes}
        {nodes}
        masked = Add (scores, b)
        weights = Softmax <axis = -1> (masked)
        y = MatMul (weights, v)
    }}"""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 18]>\n{text}')
    onnx.save(model, path)
    return model


@pytest.mark.parametrize("mask", ["float[B, S]", "float[B, 1, S, S]"])
@pytest.mark.parametrize("name", _ADDED)
def test_a_mask_of_numbers_is_drawn_and_replaced(name: str, mask: str, tmp_path: Path) -> None:
    added, forbids = _ADDED[name]
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    model = model_of(added, mask, path)
    symbolic = Symbolic(model)
    maker = InputMaker(model, symbolic, frozenset(), added=frozenset({"b"}))
    drawn = [maker.draw(Case(4, 9, Padding.RIGHT), np.random.default_rng(seed))["mask"] for seed in range(5)]
    if forbids is None:
        assert any(np.any((x != 0) & (x != 1)) for x in drawn)
    else:
        assert all(np.all((x == 0) | (x == 1)) for x in drawn)
        # The first row of all has every key, others lose some at their ends.
        rows = [x.reshape(-1, 9) for x in drawn]
        assert all(np.all(x[0] != forbids) and np.any(x[1] == forbids) for x in rows)
    (site,) = stof.optimize(path, out).sites
    assert site.replaced, site.reason
    rng = np.random.default_rng(3)
    feeds = {n: rng.standard_normal((2, 2, 7, 8)).astype(np.float32) for n in "qkv"}
    keys = (np.arange(7) < np.array([[7], [4]])).astype(np.float32)
    feeds["mask"] = keys if mask == "float[B, S]" else np.broadcast_to(keys[:, None, None], (2, 1, 7, 7)).copy()
    options = ort.SessionOptions()
    stof.register(options)
    results = [
        ort.InferenceSession(str(p), options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
        for p in (path, out)
    ]
    np.testing.assert_allclose(results[1], results[0], atol=3e-6)
