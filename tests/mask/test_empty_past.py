# SPDX-License-Identifier: Apache-2.0
"""Keys of a past that may be empty: a mask must hold with one and without."""

from __future__ import annotations

import pytest
from attention_forms import assert_equivalent, model, rewrite

from stof.errors import UnsupportedError

INPUTS = "float[B,4,S,8] q, float[B,4,P,8] pk, float[B,4,S,8] nk, float[B,4,P,8] pv, float[B,4,S,8] nv"
BODY = """
    k = Concat <axis = 2> (pk, nk)
    v = Concat <axis = 2> (pv, nv)
    %kt
    shape_q = Shape (q)
    shape_p = Shape (pk)
    two = Constant <value = int64 {2}> ()
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    three = Constant <value = int64 {3}> ()
    s = Gather (shape_q, two)
    past = Gather (shape_p, two)
    t = Add (past, s)
    rows0 = Range (past, t, one)
    columns = Range (zero, t, one)
    last = Constant <value = int64[1] {1}> ()
    rows = Unsqueeze (rows0, last)
    KEPT
    %added
    s1 = MatMul (q, kt)
    s2 = Add (s1, added)
    p = Softmax (s2)
    out = MatMul (p, v)"""
OUT = "float[a,b,c,d] out"


def test_the_first_position() -> None:
    """Row q of the queries is position q + P, of which one is 0 where there is no past."""
    kept = """first = Less (rows, one)
    mine = LessOrEqual (columns, rows)
    w = Or (first, mine)"""
    graph = model(INPUTS, OUT, BODY.replace("KEPT", kept))
    _, (one,) = rewrite(graph)
    assert one.mask.expression.text not in ("k <= q", "True")
    assert_equivalent(graph, {"B": 2, "S": 5, "P": 0}, {"B": 2, "S": 5, "P": 3})


def test_a_mask_that_differs_without_a_past() -> None:
    """Three keys more for every query, but none of them where there is no past."""
    kept = """some = Sign (past)
    more = Mul (some, three)
    beyond = Sub (columns, rows)
    w = LessOrEqual (beyond, more)"""
    with pytest.raises(UnsupportedError, match="differs"):
        rewrite(model(INPUTS, OUT, BODY.replace("KEPT", kept)))
