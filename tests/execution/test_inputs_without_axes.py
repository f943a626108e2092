# SPDX-License-Identifier: Apache-2.0
"""Inputs without axes: speeds, temperatures and thresholds are drawn as arrays, which the runtime takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

import stof
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.symbolic import Symbolic

BODY = """
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s = MatMul (q, kt)
    scaled = Mul (s, factor)
    p = Softmax (scaled)
    out = MatMul (p, v)
    number = Cast <to = 1> (speed)
    more = Mul (out, number)"""


def model(kind: str) -> onnx.ModelProto:
    shape = "float[1,2,S,8]"
    return parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18]>\n'
        f"g ({shape} q, {shape} k, {shape} v, float factor, {kind} speed) => (float[a,b,c,d] more) {{{BODY}\n}}"
    )


@pytest.mark.parametrize("kind", ["float", "float16", "double", "int64", "bool"])
def test_inputs_without_axes_are_arrays(kind: str, tmp_path: Path) -> None:
    """The kind: arithmetic makes NumPy scalars of arrays without axes, which ONNX Runtime does not take."""
    onnx.save(model(kind), tmp_path / "m.onnx")
    report = stof.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx")
    assert report.replaced == 1
    assert report.verification is not None
    assert not report.verification.failures


@pytest.mark.parametrize("magnitude", [1.0, 1 / 256])
def test_reduced_numbers_without_axes_are_arrays(magnitude: float) -> None:
    graph = model("int64")
    maker = InputMaker(graph, Symbolic(graph), frozenset())
    maker.magnitudes.update({"factor": magnitude, "speed": magnitude})
    drawn = maker.draw(Case(2, 5, Padding.NONE), np.random.default_rng(0))
    assert drawn["speed"].shape == drawn["factor"].shape == ()
    for array in drawn.values():
        assert isinstance(array, np.ndarray)
