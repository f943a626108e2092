# SPDX-License-Identifier: Apache-2.0
"""Terms that all stay biases: nothing is lifted, so that a few short runs check what there is to check."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from attention_forms import assert_equivalent, only_site

from stof.errors import UnsupportedError
from stof.mask.check.checker import MaskChecker
from stof.mask.lift import lift
from stof.symbolic import Symbolic


def model_with_bias(made: str) -> onnx.ModelProto:
    """Attention with a bias that follows from positions, is no function of their distance, and knows the number 1000."""
    return onnx.parser.parse_model(f"""
    <ir_version: 9, opset_import: ["" : 18]>
    g (float[B, 2, S, 8] q, float[B, 2, S, 8] k, float[B, 2, S, 8] v) => (float[B, 2, S, 8] y) {{
        two = Constant <value = int64 {{2}}> ()
        zero = Constant <value = int64 {{0}}> ()
        one = Constant <value = int64 {{1}}> ()
        last = Constant <value = int64[1] {{1}}> ()
        far = Constant <value = int64 {{700}}> ()
        thousand = Constant <value = float {{1000}}> ()
        shape = Shape (q)
        s = Gather (shape, two)
        columns = Range (zero, s, one)
        rows = Unsqueeze (columns, last)
        products = Mul (rows, columns)
        {made}
        large = Cast <to = 1> (numbers)
        bias = Div (large, thousand)
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        scores = MatMul (q, kt)
        masked = Add (scores, bias)
        weights = Softmax <axis = -1> (masked)
        y = MatMul (weights, v)
    }}""")


def compared_lengths(model: onnx.ModelProto) -> set[int]:
    symbolic = Symbolic(model)
    site = only_site(model)
    checker = MaskChecker(model, symbolic)
    mask = lift(symbolic, site)
    assert mask.expression.allows_all
    assert len(mask.bias) == 1
    assert symbolic.value(mask.bias[0].tensor) is not None
    checker.check(site, mask)
    return checker.compared_lengths


def test_short_inputs_suffice() -> None:
    model = model_with_bias("numbers = Identity (products)")
    found = compared_lengths(model)
    assert len(found) == 3
    assert max(found) < 100
    assert_equivalent(model, {"B": 2, "S": 45}, {"B": 1, "S": 7})


def test_long_ones_run_where_short_ones_do_not() -> None:
    """The bias reads position 700, which short inputs do not have."""
    model = model_with_bias("there = Gather (columns, far) numbers = Add (products, there)")
    assert {1000, 1001, 1200} <= compared_lengths(model)
    assert_equivalent(
        model, {"B": 1, "S": 720}, tolerance=1e-4
    )  # biases of 500, of which fp32 has four digits behind the point


def test_a_bias_of_other_sizes_is_refused() -> None:
    """Behind the back of the symbolic shapes, the graph makes a bias of 99 rows and columns."""
    model = model_with_bias("numbers = Identity (products)")
    symbolic = Symbolic(model)
    site = only_site(model)
    other = onnx.ModelProto.FromString(model.SerializeToString())
    other.graph.initializer.append(onnx.numpy_helper.from_array(np.array(99, np.int64), "n"))
    next(n for n in other.graph.node if n.op_type == "Range").input[1] = "n"
    with pytest.raises(UnsupportedError, match=r"has shape \(1, 1, 99, 99\)|has shape \(99, 99\)"):
        MaskChecker(other, symbolic).check(site, lift(symbolic, site))
