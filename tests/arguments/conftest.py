# SPDX-License-Identifier: Apache-2.0
"""A model of one attention, for tests whose subject is what stands around it."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from onnx import parser

ATTENTION = """<ir_version: 8, opset_import: ["": 18]>
g (float[1,2,S,8] q, float[1,2,S,8] k, float[1,2,S,8] v) => (float[a,b,c,d] out) {
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s = MatMul (q, kt)
    p = Softmax (s)
    out = MatMul (p, v)
}"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Its file, ``model.onnx`` in a folder of its own."""
    onnx.save(parser.parse_model(ATTENTION), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"
