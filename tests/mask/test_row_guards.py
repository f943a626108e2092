# SPDX-License-Identifier: Apache-2.0
"""What zeroes rows after the softmax goes only where it is proven to say what the mask says, at every size."""

from __future__ import annotations

import attention_forms as forms
import numpy as np
import onnx
import pytest
from attention_forms import PLAIN, model, only_site, rewrite, run

_MASK = """%kt
    %window
    least = Constant <value = float {-3.4028234663852886e38}> ()
    nothing = Constant <value = float {0.0}> ()
    some = Constant <value = int32 {1}> ()
    axes12 = Constant <value = int64[2] {1, 2}> ()
    end = Constant <value = int64[1] {-1}> ()
    am4 = Unsqueeze (am, axes12)
    amb = Cast <to = 9> (am4)
    both = And (amb, w)
    added = Where (both, nothing, least)
    s1 = MatMul (q, kt)
    s2 = Add (s1, added)
    p = Softmax (s2)
    o1 = MatMul (p, v)
    i = Cast <to = 6> (both)
    """
_OUT = "\nout = Where (empty, nothing, o1)"

_ANY = "c = ReduceSum <keepdims = 1> (i, end)\nempty0 = Less (c, some)\n"
OTHERS = {
    # As they are below 2000 positions, where no mask of a window of 5 is run.
    "rows far away": _ANY
    + "far = Constant <value = int64 {2000}> ()\nlate = GreaterOrEqual (rows, far)\nempty = Or (empty0, late)",
    "long inputs": _ANY
    + "far = Constant <value = int64 {2000}> ()\nlong = GreaterOrEqual (t, far)\nempty = Or (empty0, long)",
    "a window that is longer": """far = Constant <value = int64 {2000}> ()
        near2 = Less (distance, far)
        w2 = And (causal, near2)
        both2 = And (amb, w2)
        i2 = Cast <to = 6> (both2)
        c = ReduceSum <keepdims = 1> (i2, end)
        empty = Less (c, some)""",
    "many keys": "many = Constant <value = int32 {2000}> ()\n"
    "c = ReduceSum <keepdims = 1> (i, end)\nfew = Less (c, some)\nfull = Greater (c, many)\nempty = Or (few, full)",
    "counts that wrap": "c = ReduceSum <keepdims = 1> (i, end)\nc8 = Cast <to = 2> (c)\n"
    "any = Cast <to = 9> (c8)\nempty = Not (any)",
    "the first keys": """first = Constant <value = int64[1] {0}> ()
        stop = Constant <value = int64[1] {2000}> ()
        some_keys = Slice (both, first, stop, end)
        some_i = Cast <to = 6> (some_keys)
        c = ReduceSum <keepdims = 1> (some_i, end)
        empty = Less (c, some)""",
    "two keys": "two32 = Constant <value = int32 {2}> ()\nc = ReduceSum <keepdims = 1> (i, end)\nempty = Less (c, two32)",
}


def guarded(guard: str, inputs: str = "", mask: str = _MASK) -> onnx.ModelProto:
    """A window of 5 and padding, and what zeroes rows."""
    return model(PLAIN + ", int64[B,S] am" + inputs, "float[a,b,c,d] out", mask + guard + _OUT)


def stays(made: onnx.ModelProto) -> bool:
    """Whether the guard of the one site, which is rewritten, stays in the graph; compares the results."""
    assert only_site(made).row_guard == "empty"
    optimized, _ = rewrite(made)
    assert "Softmax" not in [n.op_type for n in optimized.graph.node]
    for length, padded in ((17, 9), (3, 1), (1, 1), (40, 40)):
        given = forms.feeds(made, {"B": 2, "S": length})
        given["am"][0, :padded] = 0
        (wanted,), (found,) = run(made, given), run(optimized, given, library=True)
        np.testing.assert_allclose(found, wanted, atol=2e-6, rtol=0)
    return any("empty" in n.input for n in optimized.graph.node)


@pytest.mark.parametrize("guard", OTHERS.values(), ids=OTHERS.keys())
def test_a_guard_that_says_more_than_short_inputs_show_stays(guard: str) -> None:
    assert stays(guarded(guard))


def test_a_guard_that_says_the_same_goes() -> None:
    assert not stays(guarded(_ANY.replace("empty0", "empty")))


def test_a_guard_stays_beside_a_bias_that_may_leave_a_row_no_key() -> None:
    biased = _MASK.replace("s2 = Add (s1, added)", "s1b = Add (s1, bias)\ns2 = Add (s1b, added)")
    assert stays(guarded(_ANY.replace("empty0", "empty"), ", float[B,1,S,S] bias", biased))
