# SPDX-License-Identifier: Apache-2.0
"""Opsets 13 to 26: attention as primitive nodes, and as the fused node where the opset has it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import INT32, Fused, Given, forced, run, same
from onnx import parser

from stof.graph.index import opset_of
from stof.graph.load_save import LARGEST_OPSET, SMALLEST_OPSET

OPSETS = range(SMALLEST_OPSET, LARGEST_OPSET + 1)
# A causal mask and padding, a softmax in the middle of a model; ReduceMax has its axes elsewhere from opset 18 on.
MODEL = """
<ir_version: 8, opset_import: ["" : %d]>
layer (float[B, S, 16] x, int64[B, S] pad) => (float[B, S, 16] y) {
    heads = Constant <value = int64[4] {0, 0, 2, 8}> ()
    merged = Constant <value = int64[3] {0, 0, 16}> ()
    both = Constant <value = int64[2] {1, 2}> ()
    first = Constant <value = int64[1] {0}> ()
    last = Constant <value = int64[1] {1}> ()
    one = Constant <value = int64 {1}> ()
    zero = Constant <value = int64 {0}> ()
    scale = Constant <value = float {0.3535}> ()
    nothing = Constant <value = float {0.0}> ()
    minus = Constant <value = float {-3.4028234663852886e38}> ()
    h = Reshape (x, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (h)
    kt = Transpose <perm = [0, 2, 3, 1]> (h)
    shape = Shape (x)
    s = Gather (shape, one)
    r = Range (zero, s, one)
    keys = Unsqueeze (r, first)
    rows = Unsqueeze (r, last)
    causal = LessOrEqual (keys, rows)
    padded = Unsqueeze (pad, both)
    real = Cast <to = 9> (padded)
    allowed = And (causal, real)
    added = Where (allowed, nothing, minus)
    s1 = MatMul (q, kt)
    s2 = Mul (s1, scale)
    s3 = Add (s2, added)
    w = Softmax <axis = -1> (s3)
    o = MatMul (w, q)
    t = Transpose <perm = [0, 2, 1, 3]> (o)
    y = Reshape (t, merged)
}
"""


@pytest.mark.parametrize("opset", OPSETS)
def test_primitive(opset: int, tmp_path: Path) -> None:
    """Matched, lifted, verified, and right by the function body, in the opset of the model."""
    original = parser.parse_model(MODEL % opset)
    report, target = forced(original, tmp_path)
    assert [(s.replaced, s.mask) for s in report.sites] == [(True, "k <= q and pad[b, k]")], report.sites
    optimized = onnx.load(target)
    assert opset_of(optimized) == opset
    rng = np.random.default_rng(opset)
    pad = np.ones((2, 11), np.int64)
    pad[1, 6:] = 0
    feeds = {"x": rng.standard_normal((2, 11, 16)).astype(np.float32), "pad": pad}
    for library in (True, False):
        same(run(target, feeds, library=library), run(original, feeds))


@pytest.mark.parametrize("opset", OPSETS)
def test_fused(opset: int, tmp_path: Path) -> None:
    """ONNX Runtime's fused node in any opset: expanded in the words of that opset."""
    inputs = (*(Given(n, ("B", "S", 16)) for n in "qkv"), None, Given("pad", ("B", "S"), INT32))
    node = Fused("MultiHeadAttention", inputs, {"num_heads": 2}, opset=opset)
    report, target = forced(node.model(), tmp_path)
    assert [(s.replaced, s.mask) for s in report.sites] == [(True, "pad[b, k]")], report.sites
    feeds = node.feeds({"B": 2, "S": 14}, seed=opset)
    for library in (True, False):
        same(run(target, feeds, library=library), run(node.model(), feeds))


@pytest.mark.parametrize("opset", [o for o in OPSETS if o >= 23])
def test_standard(opset: int, tmp_path: Path) -> None:
    """The standard's fused node in every opset that has it."""
    inputs = tuple(Given(n, ("B", 2, "S", 8)) for n in "qkv")
    node = Fused("Attention", inputs, {"is_causal": 1}, rank=4, domain="", opset=opset)
    report, target = forced(node.model(), tmp_path)
    assert [(s.replaced, s.mask) for s in report.sites] == [(True, "k <= q")], report.sites
    feeds = node.feeds({"B": 2, "S": 14}, seed=opset)
    for library in (True, False):
        same(run(target, feeds, library=library), run(node.model(), feeds))
