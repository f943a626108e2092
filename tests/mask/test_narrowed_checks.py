# SPDX-License-Identifier: Apache-2.0
"""A check of a mask draws sizes with which the graph runs, as verification does.

A graph declares [batch, seq] and runs with one row only: its exporter wrote the 1 of the sample into a Reshape of the mask.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from fused_attention_nodes import forced, run, same

# How the mask [B, S] becomes [1, 1, 1, S]; what a graph computes by way of floats no rule knows.
_SHAPES = {
    "a stored 1": "shape = Concat <axis = 0> (ones, s) r = Reshape (m, shape)",
    "a squeezed axis": "row = Squeeze (m, first) r = Unsqueeze (row, three)",
    "a 1 by way of floats": """f = Cast <to = 1> (s) g = Sigmoid (f) h = Round (g) one = Cast <to = 7> (h)
        shape = Concat <axis = 0> (one, one, one, s) r = Reshape (m, shape)""",
}


def model_of(mask: str, shape: str = "B, S") -> onnx.ModelProto:
    return onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 18]>
    g (float[B, 2, S, 8] q, float[B, 2, S, 8] k, float[B, 2, S, 8] v, bool[{shape}] m) => (float[B, 2, S, 8] y)
    <int64[3] ones = {{1, 1, 1}}, int64[1] first = {{0}}, int64[3] three = {{0, 1, 2}}, float zero = {{0}},
     float low = {{-1e9}}> {{
        s = Shape <start = 1> (m) {mask} bias = Where (r, zero, low)
        kt = Transpose <perm = [0, 1, 3, 2]> (k) scores = MatMul (q, kt) masked = Add (scores, bias)
        weights = Softmax <axis = -1> (masked) y = MatMul (weights, v) }}""")


@pytest.mark.parametrize("name", _SHAPES)
def test_rows_that_an_exporter_has_stored(name: str, tmp_path: Path) -> None:
    model = model_of(_SHAPES[name])
    report, target = forced(model, tmp_path)
    assert [s.replaced for s in report.sites] == [True], report.sites[0].reason
    rng = np.random.default_rng(0)
    for length in (1, 7, 40):
        feed = {n: rng.standard_normal((1, 2, length, 8)).astype(np.float32) for n in "qkv"}
        feed["m"] = (np.arange(length) < max(1, length - 3))[None]
        same(run(target, feed, library=True), run(model, feed))


def test_the_mask_of_one_row_is_padding(tmp_path: Path) -> None:
    """What the graph forces tells the rule of operands, too: [B, S] with B = 1 is read at (0, k)."""
    report, _ = forced(model_of(_SHAPES["a stored 1"]), tmp_path)
    assert report.sites[0].mask == "pad[b, k]"
