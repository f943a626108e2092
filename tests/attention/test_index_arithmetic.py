# SPDX-License-Identifier: Apache-2.0
"""Masks from index arithmetic of exporters: bits, truncated quotients, squares, slices, assignments."""

from __future__ import annotations

import numpy as np
import pytest
from attention_forms import PLAIN, assert_equivalent, model, rewrite, run

from stof.symbolic import Symbolic, integer
from stof.symbolic.algebra.sizes import evaluate

SIZES = ({"B": 2, "S": 19}, {"B": 1, "S": 7})

INDICES = """
    %kt
    shape = Shape (q)
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    two = Constant <value = int64 {2}> ()
    ones = Constant <value = int64[1] {1}> ()
    zeros = Constant <value = int64[1] {0}> ()
    n = Gather (shape, two)
    i = Range (zero, n, one)
    rows = Unsqueeze (i, ones)
    columns = Unsqueeze (i, zeros)
    d = Sub (rows, columns)
    n1 = Unsqueeze (n, zeros)
    square = Concat <axis = 0> (n1, n1)
    all = ConstantOfShape <value = bool[1] {1}> (square)
    lower = Trilu <upper = 0> (all)
"""
CORE = """
    least = Constant <value = float {-inf}> ()
    s1 = MatMul (q, kt)
    s2 = Where (w, s1, least)
    p = Softmax <axis = -1> (s2)
    out = MatMul (p, v)"""

# name: nodes that make w, bool [S, S], of i [S], rows, columns and their difference d; what it is
MASKS = {
    "remainder with the sign of the dividend": (
        """c = Constant <value = int64 {3}> ()
        r = Mod <fmod = 1> (d, c)
        w = Equal (r, zero)""",
        "(q - k) % 3 == 0",
    ),
    "quotient that truncates, by signs": (
        """c = Constant <value = float {5.0}> ()
        x = Cast <to = 1> (i)
        y = Div (x, c)
        size = Abs (y)
        low = Floor (size)
        sign = Sign (y)
        both = Mul (low, sign)
        block = Cast <to = 7> (both)
        b0 = Unsqueeze (block, ones)
        b1 = Unsqueeze (block, zeros)
        w = Equal (b0, b1)""",
        "k // 5 == q // 5",
    ),
    "low bits": (
        """c = Constant <value = int64 {7}> ()
        r = BitwiseAnd (rows, c)
        x = BitwiseAnd (columns, c)
        w = LessOrEqual (x, r)""",
        "k % 8 <= q % 8",
    ),
    "shifted by bits, with the sign put back": (
        """three = Constant <value = uint64 {3}> ()
        top = Constant <value = uint64 {16140901064495857664}> ()
        negative = Less (i, zero)
        u = Cast <to = 13> (i)
        high = BitShift <direction = "RIGHT"> (u, three)
        filled = BitwiseOr (high, top)
        x = Cast <to = 7> (filled)
        y = Cast <to = 7> (high)
        block = Where (negative, x, y)
        b0 = Unsqueeze (block, ones)
        b1 = Unsqueeze (block, zeros)
        w = Equal (b0, b1)""",
        "k // 8 == q // 8",
    ),
    "a bit in the middle": (
        """c = Constant <value = int64 {4}> ()
        r = BitwiseAnd (rows, c)
        x = BitwiseAnd (columns, c)
        w = Equal (x, r)""",
        "k // 4 % 2 == q // 4 % 2",
    ),
    "square of the distance": (
        """c = Constant <value = int64 {30}> ()
        x = Pow (d, two)
        w = LessOrEqual (x, c)""",
        "abs(q - k) <= 5",
    ),
    "turned around twice": (
        """back = Constant <value = int64[1] {-1}> ()
        end = Constant <value = int64[1] {-9223372036854775807}> ()
        x = Slice (lower, back, end, zeros, back)
        w = Slice (x, back, end, ones, back)""",
        "q <= k",
    ),
    "first row assigned": (
        """row = Constant <value = bool[1, 1] {1}> ()
        wide = Concat <axis = 0> (ones, n1)
        update = Expand (row, wide)
        place0 = Constant <value = int64[1, 1] {0}> ()
        place = Expand (place0, wide)
        w = ScatterElements <axis = 0> (lower, place, update)""",
        "k <= q or q == 0",
    ),
    "listed columns assigned": (
        """places = Constant <value = int64[2, 1] {1, 4}> ()
        turned = Transpose <perm = [1, 0]> (lower)
        twos = Constant <value = int64[1] {2}> ()
        wide = Concat <axis = 0> (twos, n1)
        update = ConstantOfShape <value = bool[1] {1}> (wide)
        x = ScatterND (turned, places, update)
        w = Transpose <perm = [1, 0]> (x)""",
        "k <= q or k == 1 or k == 4",
    ),
    "positions in a table": (
        """t = Constant <value = int64[40] {0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29,
            30,31,32,33,34,35,36,37,38,39}> ()
        x = Gather (t, i)
        b0 = Unsqueeze (x, ones)
        w = LessOrEqual (columns, b0)""",
        "k <= q",
    ),
    "blocks in a table": (
        """t = Constant <value = int64[24] {0,0,0,1,1,1,2,2,2,3,3,3,4,4,4,5,5,5,6,6,6,7,7,7}> ()
        x = Gather (t, i)
        b0 = Unsqueeze (x, ones)
        b1 = Unsqueeze (x, zeros)
        w = Equal (b0, b1)""",
        "k // 3 == q // 3",
    ),
    "columns of an image in a table": (
        """t = Constant <value = int64[24] {0,1,2,3,0,1,2,3,0,1,2,3,0,1,2,3,0,1,2,3,0,1,2,3}> ()
        x = Gather (t, i)
        b0 = Unsqueeze (x, ones)
        b1 = Unsqueeze (x, zeros)
        w = Equal (b0, b1)""",
        "k % 4 == q % 4",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_arithmetic(name: str) -> None:
    nodes, wanted = MASKS[name]
    graph = model(PLAIN, "float[B,4,S,8] out", INDICES + nodes + CORE)
    _, (one,) = rewrite(graph)
    assert one.mask.expression.text == wanted
    assert_equivalent(graph, *SIZES)


def test_a_mask_of_pieces_that_need_a_length() -> None:
    """Four corners: no shorter input than the first piece is valid."""
    nodes = """
        six = Constant <value = int64 {6}> ()
        sixes = Constant <value = int64[1] {6}> ()
        rest = Sub (n1, sixes)
        s00 = Concat <axis = 0> (sixes, sixes)
        s01 = Concat <axis = 0> (sixes, rest)
        s10 = Concat <axis = 0> (rest, sixes)
        s11 = Concat <axis = 0> (rest, rest)
        a = ConstantOfShape <value = bool[1] {1}> (s00)
        b = ConstantOfShape <value = bool[1] {0}> (s01)
        c = ConstantOfShape <value = bool[1] {1}> (s10)
        d0 = ConstantOfShape <value = bool[1] {1}> (s11)
        d1 = Trilu <upper = 0> (d0)
        top = Concat <axis = 1> (a, b)
        bottom = Concat <axis = 1> (c, d1)
        w = Concat <axis = 0> (top, bottom)"""
    graph = model(PLAIN, "float[B,4,S,8] out", INDICES + nodes + CORE)
    assert_equivalent(graph, {"B": 2, "S": 19}, {"B": 1, "S": 8})


def test_a_window_around_a_ring() -> None:
    """A neighbour on either side, also around the ends: rolled by one, which is the axis modulo its size."""
    nodes = """
        minus = Constant <value = int64[1] {-1}> ()
        same = Equal (rows, columns)
        end = Constant <value = int64[1] {9223372036854775807}> ()
        cut = Mod (minus, n1)
        a = Slice (same, zeros, cut, zeros)
        b = Slice (same, cut, end, zeros)
        next = Concat <axis = 0> (b, a)
        w = Or (same, next)"""
    graph = model(PLAIN, "float[B,4,S,8] out", INDICES + nodes + CORE)
    optimized = assert_equivalent(graph, *SIZES, {"B": 1, "S": 2})
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal((1, 4, 6, 8)).astype(np.float32) for n in "qkv"}
    (out,) = run(optimized, given)
    q, k, v = (given[n].astype(np.float64) for n in "qkv")
    near = np.eye(6, dtype=bool) | np.roll(np.eye(6, dtype=bool), 1, 0)
    scores = np.where(near, q @ np.swapaxes(k, -1, -2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    np.testing.assert_allclose(out, weights / weights.sum(-1, keepdims=True) @ v, atol=1e-5)


def test_a_strided_slice_of_any_length() -> None:
    graph = model(
        "float[B,S] x",
        "float[B,T] y",
        """starts = Constant <value = int64[1] {1}> ()
        ends = Constant <value = int64[1] {9223372036854775807}> ()
        axes = Constant <value = int64[1] {1}> ()
        steps = Constant <value = int64[1] {3}> ()
        y = Slice (x, starts, ends, axes, steps)""",
    )
    symbolic = Symbolic(graph)
    shape, value = symbolic.shape("y"), symbolic.value("y")
    assert shape is not None
    assert value is not None
    assert [evaluate(shape[1], {"B": 1, "S": n}) for n in (1, 2, 3, 4, 5, 8)] == [0, 1, 1, 1, 2, 3]
    assert str(value.at((integer(0), integer(2)))) == str(symbolic.value("x").at((integer(0), integer(7))))  # type: ignore[union-attr]


def test_constants_are_run_where_no_rule_says_what_they_are() -> None:
    """Positions of a fixed length, divided before they were stored; and parts of a stored mask beside each other."""
    positions = ", ".join(str(n / 5) for n in range(24))
    nodes = f"""t = Constant <value = float[24] {{{positions}}}> ()
        low = Floor (t)
        b0 = Unsqueeze (low, ones)
        b1 = Unsqueeze (low, zeros)
        same = Equal (b0, b1)
        first = Constant <value = bool[2, 24] {{{", ".join(["1", "0", "0"] * 16)}}}> ()
        rest = Constant <value = bool[22, 24] {{{", ".join(["0", "1"] * 264)}}}> ()
        stored = Concat <axis = 0> (first, rest)
        w = Or (same, stored)"""
    graph = model(
        "float[B,4,24,8] q, float[B,4,24,8] k, float[B,4,24,8] v", "float[B,4,24,8] out", INDICES + nodes + CORE
    )
    assert_equivalent(graph, {"B": 2}, {"B": 1})


@pytest.mark.parametrize("row", [0, -1, -2])
def test_a_row_assigned_from_the_end(row: int) -> None:
    """An index below 0 counts from the end of the rows."""
    nodes = f"""place = Constant <value = int64[1, 1] {{{row}}}> ()
        opened = ConstantOfShape <value = bool[1] {{1}}> (n1)
        update = Unsqueeze (opened, zeros)
        w = ScatterND (lower, place, update)"""
    graph = model("float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v", "float[B,4,S,8] out", INDICES + nodes + CORE)
    assert_equivalent(graph, {"B": 2, "S": 19}, {"B": 1, "S": 7})


@pytest.mark.parametrize("vectors", [False, True])
def test_random_tensors_have_no_value(vectors: bool) -> None:
    graph = model(
        "bool training",
        "float[4] kept, float[4] dropped, float[4] chosen, float[4] drawn",
        """x = Constant <value = float[4] {1.0, 0.0, 1.0, 0.0}> ()
        ratio = Constant <value = float {0.5}> ()
        on32 = Constant <value = int32 {1}> ()
        on = Cast <to = 9> (on32)
        off = Not (on)
        kept = Dropout (x, ratio, off)
        dropped = Dropout (x, ratio, on)
        chosen = Dropout (x, ratio, training)
        drawn = Bernoulli (x)""",
    )
    symbolic = Symbolic(graph, vectors=vectors)
    assert symbolic.constant("kept") is not None
    assert [symbolic.value(n) for n in ("dropped", "chosen", "drawn")] == [None] * 3


def test_a_mask_that_is_clipped_on_one_side_has_no_infinity() -> None:
    """The bound that is not given is finite: a row without a key is the mean of all values, not NaN."""
    graph = model(
        PLAIN,
        "float[a,b,c,d] out",
        """%kt
        %window
        nothing = Constant <value = float {0.0}> ()
        inf = Constant <value = float {-inf}> ()
        before = Less (columns, rows)
        added = Where (before, nothing, inf)
        clipped = Clip (added, , nothing)
        s1 = MatMul (q, kt)
        s2 = Add (s1, clipped)
        p = Softmax (s2)
        out = MatMul (p, v)""",
    )
    assert_equivalent(graph, *SIZES)
    assert Symbolic(graph).value("added") is not None
    assert Symbolic(graph).value("clipped") is None


def test_a_condition_that_doubles_with_each_exclusive_or_stays_a_bias() -> None:
    """It would be larger than any machine after 24 of them."""
    steps = [
        f"""m{i} = Constant <value = int64 {{{i + 2}}}> ()
        r{i} = Mod (d, m{i})
        e{i} = Equal (r{i}, zero)
        x{i + 1} = Xor (x{i}, e{i})"""
        for i in range(24)
    ]
    first = "x0 = Identity (lower)"
    last = """edge = Equal (columns, zeros)
        w = Or (x24, edge)"""
    graph = model(PLAIN, "float[B,4,S,8] out", "\n".join([INDICES, first, *steps, last, CORE]))
    (found,) = rewrite(graph)[1]
    assert found.mask.bias
    assert_equivalent(graph, *SIZES)
