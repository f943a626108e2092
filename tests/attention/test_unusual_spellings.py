# SPDX-License-Identifier: Apache-2.0
"""Unusual spellings: masks by products, masks again after the softmax, channels first, heads in the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_forms import PLAIN, UnsupportedError, assert_equivalent, feeds, model, only_site, rewrite, run

import stof
from stof.mask.site import EmptyRows, Layout
from stof.options import Options

SIZES = ({"B": 2, "S": 19, "T": 19}, {"B": 1, "S": 7, "T": 7})
PADDED = PLAIN + ", int64[B,S] am"

# w: bool [B, 1, S, S], a causal window of 5 and padding, whose first key always is one; f: the same as float
MASK = """
    %kt
    %window
    axes = Constant <value = int64[2] {1, 2}> ()
    am4 = Unsqueeze (am, axes)
    real = Cast <to = 9> (am4)
    ww = And (real, w)
    f = Cast <to = 1> (ww)
    unit = Constant <value = float {1.0}> ()
    null = Constant <value = float {0.0}> ()
    minus = Constant <value = float {-inf}> ()
    low = Constant <value = float {-1e9}> ()
    soft = Constant <value = float {-1e4}> ()
    dropped = Not (ww)
    s1 = MatMul (q, kt)
"""

# name: nodes, what rows without a key give
GUARDED = {
    "weights filled with 0": (
        """s2 = Where (ww, s1, minus)
        p0 = Softmax (s2)
        p = Where (dropped, null, p0)""",
        EmptyRows.ZERO,
    ),
    "weights times the mask": (
        """s2 = Where (ww, s1, low)
        p0 = Softmax (s2)
        p = Mul (f, p0)""",
        EmptyRows.ZERO,
    ),
    "weights times the mask, NaN among them": (
        """s2 = Where (ww, s1, minus)
        p0 = Softmax (s2)
        p = Mul (p0, f)""",
        EmptyRows.NAN,
    ),
    "nan_to_num": (
        """s2 = Where (ww, s1, minus)
        p0 = Softmax (s2)
        nan = IsNaN (p0)
        p1 = Where (nan, null, p0)
        most = Constant <value = float {3.4028235e38}> ()
        least = Constant <value = float {-3.4028235e38}> ()
        infinite = IsInf (p1)
        above = Greater (p1, null)
        top = And (infinite, above)
        p2 = Where (top, most, p1)
        below = Less (p1, null)
        bottom = And (infinite, below)
        p = Where (bottom, least, p2)""",
        EmptyRows.ZERO,
    ),
    "scores times the mask, plus a number elsewhere": (
        """s2 = Mul (s1, f)
        other = Sub (unit, f)
        filled = Mul (other, soft)
        s3 = Add (s2, filled)
        p = Softmax (s3)""",
        EmptyRows.MEAN,
    ),
    "scores times the mask, minus a number elsewhere": (
        """s2 = Mul (f, s1)
        other = Sub (unit, f)
        ten = Constant <value = float {1e10}> ()
        filled = Mul (ten, other)
        s3 = Sub (s2, filled)
        p = Softmax (s3)""",
        EmptyRows.MEAN,
    ),
}


@pytest.mark.parametrize("name", GUARDED)
def test_masks_beside_the_sum(name: str) -> None:
    nodes, rows = GUARDED[name]
    graph = model(PADDED, "float[B,4,S,8] out", MASK + nodes + "\nout = MatMul (p, v)")
    _, (one,) = rewrite(graph)
    assert one.mask.expression.text == "k <= q and q - k <= 4 and pad[b, k]"
    assert one.mask.empty_rows is rows
    assert_equivalent(graph, *SIZES)
    optimized, _ = rewrite(graph)
    given = feeds(graph, SIZES[0])
    given["am"][0, :12] = 0  # rows without a key
    before, after = run(graph, given)[0], run(optimized, given, library=True)[0]
    assert np.array_equal(np.isnan(before), np.isnan(after))
    np.testing.assert_allclose(np.nan_to_num(after), np.nan_to_num(before), atol=2e-6)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ("p = Where (w, p0, null)", "expected the same mask before and after the softmax"),
        ("p = Mul (p0, gate)", "by more than 0 and 1"),
        ("p = Clip (p0, tenth)", "expected MatMul with the values"),
        ("big = Greater (p0, tenth)\n p = Where (big, p0, null)", "expected"),
    ],
)
def test_other_changes_of_weights_are_refused(nodes: str, words: str) -> None:
    text = """s2 = Where (ww, s1, low)
        tenth = Constant <value = float {0.1}> ()
        gate = Constant <value = float[1, 4, 1, 1] {0.5, 1.0, 2.0, 1.0}> ()
        p0 = Softmax (s2)
        """
    graph = model(PADDED, "float[B,4,S,8] out", MASK + text + nodes + "\nout = MatMul (p, v)")
    with pytest.raises((UnsupportedError, AssertionError), match=words):
        rewrite(graph)


@pytest.mark.parametrize(
    "nodes",
    [
        # 0 where the mask is 1 is needed: here 1 is added there
        "s2 = Mul (s1, f)\n other = Mul (f, soft)\n s3 = Sub (s2, other)",
        # half of the scores is left where the mask is 0
        "half = Constant <value = float {0.5}> ()\n g = Add (f, half)\n s2 = Mul (s1, g)\n"
        "other = Sub (unit, f)\n filled = Mul (other, soft)\n s3 = Add (s2, filled)",
    ],
)
def test_products_that_are_no_mask_are_refused(nodes: str) -> None:
    graph = model(PADDED, "float[B,4,S,8] out", MASK + nodes + "\np = Softmax (s3)\nout = MatMul (p, v)")
    with pytest.raises((AssertionError, UnsupportedError), match=r"no MatMul of a query and a key|nothing forbids all"):
        rewrite(graph)


def test_channels_first() -> None:
    """As convolutions give them; the weights are transposed to multiply the values from the right."""
    graph = model(
        "float[B,16,S] q, float[B,16,S] k, float[B,16,S] v",
        "float[B,16,S] out",
        """qt = Transpose <perm = [0, 2, 1]> (q)
        s1 = MatMul (qt, k)
        p = Softmax (s1)
        pt = Transpose <perm = [0, 2, 1]> (p)
        out = MatMul (v, pt)""",
    )
    assert only_site(graph).output_perm == (0, 2, 1)
    assert_equivalent(graph, *SIZES)


def test_channels_first_with_heads() -> None:
    graph = model(
        "float[B,4,8,S] q, float[B,4,8,S] k, float[B,4,8,S] v",
        "float[B,32,S] out",
        """qt = Transpose <perm = [0, 1, 3, 2]> (q)
        s1 = MatMul (qt, k)
        p = Softmax (s1)
        pt = Transpose <perm = [0, 1, 3, 2]> (p)
        o = MatMul (v, pt)
        flat = Constant <value = int64[3] {0, 32, -1}> ()
        out = Reshape (o, flat)""",
    )
    assert (only_site(graph).output_layout, only_site(graph).output_perm) == (Layout.BSN, (0, 2, 1))
    assert_equivalent(graph, *SIZES)


def test_heads_in_the_batch_and_rows_in_one() -> None:
    """nn.MultiheadAttention with its weights: [S, B * H, D], padding of [B, S] for every head, a result [S * B, N]."""
    graph = model(
        "float[S,B,32] x, float[S,B,32] y, float[S,B,32] z, bool[B,S] drop",
        "float[R,32] out",
        """shape = Shape (x)
        i0 = Constant <value = int64[1] {0}> ()
        i1 = Constant <value = int64[1] {1}> ()
        one = Constant <value = int64[1] {1}> ()
        four = Constant <value = int64[1] {4}> ()
        eight = Constant <value = int64[1] {8}> ()
        S = Gather (shape, i0)
        B = Gather (shape, i1)
        BH = Mul (B, four)
        inner = Concat <axis = 0> (S, BH, eight)
        q0 = Reshape (x, inner)
        q = Transpose <perm = [1, 0, 2]> (q0)
        k0 = Reshape (y, inner)
        kt = Transpose <perm = [1, 2, 0]> (k0)
        v0 = Reshape (z, inner)
        v = Transpose <perm = [1, 0, 2]> (v0)
        null = Constant <value = float {0.0}> ()
        minus = Constant <value = float {-inf}> ()
        pad = Where (drop, minus, null)
        axes = Constant <value = int64[2] {1, 2}> ()
        pad4 = Unsqueeze (pad, axes)
        spread = Concat <axis = 0> (B, four, one, S)
        wide = Expand (pad4, spread)
        merged = Concat <axis = 0> (BH, one, S)
        mask = Reshape (wide, merged)
        s1 = MatMul (q, kt)
        s2 = Add (s1, mask)
        p = Softmax (s2)
        o = MatMul (p, v)
        o0 = Transpose <perm = [1, 0, 2]> (o)
        flat = Constant <value = int64[2] {-1, 32}> ()
        out = Reshape (o0, flat)""",
    )
    site = only_site(graph)
    assert (site.num_heads, site.output_flat, site.output_perm) == (4, True, (1, 0, 2))
    optimized, (one,) = rewrite(graph)
    assert one.mask.expression.text == "not pad[b, k]"
    for sizes in ({"B": 2, "S": 19}, {"B": 1, "S": 7}):
        given = feeds(graph, sizes)
        given["drop"][:] = False
        given["drop"][-1, 2:5] = True
        for library in (False, True):
            np.testing.assert_allclose(run(optimized, given, library=library)[0], run(graph, given)[0], atol=2e-6)


def test_sizes_of_keys_and_values_by_different_names() -> None:
    """Exporters name the past of keys and that of values each for itself."""
    graph = model(
        "float[B,4,S,8] q, float[B,4,P,8] pk, float[B,4,R,8] pv, float[B,4,S,8] k1, float[B,4,S,8] v1",
        "float[B,4,S,8] out",
        """k = Concat <axis = 2> (pk, k1)
        v = Concat <axis = 2> (pv, v1)
        %kt
        %window
        %added
        s1 = MatMul (q, kt)
        s2 = Add (s1, added)
        p = Softmax (s2)
        out = MatMul (p, v)""",
    )
    _, (one,) = rewrite(graph)
    assert one.mask.expression.text == "k <= q and q - k <= 4"
    assert_equivalent(graph, {"B": 2, "S": 5, "P": 9, "R": 9}, {"B": 1, "S": 1, "P": 20, "R": 20})


SUM = """
    %kt
    %window
    %added
    least = Constant <value = float {-3.4028235e38}> ()
    null = Constant <value = float {0.0}> ()
    mask = Where (w, null, LEVEL)
    both = Add (mask, OTHER)
    s1 = MatMul (q, kt)
    s2 = Add (s1, both)
    p = Softmax (s2)
    out = MatMul (p, v)"""


def test_a_sum_of_mask_and_bias_is_read_by_its_parts() -> None:
    """A bias that the network computes, added to the mask once for all layers."""
    text = SUM.replace("LEVEL", "least").replace("OTHER", "bias")
    text = text.replace("s1 = MatMul (q, kt)", "s1 = MatMul (q, kt)\n bias = Tanh (s1)")
    text = "\n".join(line for line in text.splitlines() if "both" not in line or "s2" in line)
    text = text.replace("s2 = Add (s1, both)", "both = Add (mask, bias)\n s2 = Add (s1, both)")
    graph = model(PLAIN, "float[B,4,S,8] out", text)
    _, (one,) = rewrite(graph)
    assert one.mask.expression.text == "k <= q and q - k <= 4"
    assert [t.tensor for t in one.mask.bias] == ["bias"]
    assert_equivalent(graph, *SIZES)


@pytest.mark.parametrize(("level", "wanted"), [("minus", "k <= q and q - k <= 4"), ("least", "")])
def test_masks_of_a_caller_beside_the_models_own(level: str, wanted: str, tmp_path: Path) -> None:
    """Where both fill with the lowest number, a query whose window the caller forbids attends to what only the window does."""
    text = SUM.replace("LEVEL", level).replace("OTHER", "given")
    text = text.replace("%window", "minus = Constant <value = float {-inf}> ()\n %window")
    graph = model(PLAIN + ", float[B,1,1,S] given", "float[B,4,S,8] out", text)
    onnx.save(graph, tmp_path / "m.onnx")
    report = stof.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx", Options(verify_budget=5))
    assert [(s.replaced, s.mask) for s in report.sites] == [(True, wanted)]
    values = feeds(graph, SIZES[0])
    values["given"] = np.zeros((2, 1, 1, 19), np.float32)
    values["given"][0, ..., :12] = np.finfo(np.float32).min
    before, after = run(graph, values)[0], run(onnx.load(tmp_path / "o.onnx"), values, library=True)[0]
    np.testing.assert_allclose(after, before, atol=2e-6)


def test_rows_of_scores_beside_minus_ten_thousand_are_verified(tmp_path: Path) -> None:
    """fp32 keeps three digits of such scores: the original is off, and what the operator makes of them is not wrong."""
    nodes = """other = Sub (unit, f)
        added2 = Mul (other, soft)
        s2 = Add (s1, added2)
        p = Softmax (s2)
        out = MatMul (p, v)"""
    graph = model(PADDED, "float[B,4,S,8] out", MASK + nodes)
    onnx.save(graph, tmp_path / "m.onnx")
    report = stof.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx", Options(verify_budget=5))
    assert [(s.replaced, s.empty_rows) for s in report.sites] == [(True, "all")]
    assert report.verification is not None
    assert report.verification.comparisons


def test_a_bias_before_a_mask_that_replaces_scores(tmp_path: Path) -> None:
    """Rows that are replaced by -10000 throughout have lost bias and scores."""
    nodes = """table = Constant <value = float[3] {0.5, -1.0, 2.0}> ()
        span = Constant <value = int64 {1}> ()
        edge = Neg (span)
        d0 = Max (distance, edge)
        d1 = Min (d0, span)
        d2 = Add (d1, span)
        bias = Gather (table, d2)
        s2 = Add (s1, bias)
        s3 = Where (ww, s2, soft)
        p = Softmax (s3)
        out = MatMul (p, v)"""
    graph = model(PADDED, "float[B,4,S,8] out", MASK + nodes)
    onnx.save(graph, tmp_path / "m.onnx")
    report = stof.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx", Options(verify_budget=5))
    assert [(s.replaced, s.empty_rows) for s in report.sites] == [(True, "mean")], report.sites


WRITTEN_OUT = {
    "divided by the sum": (
        """m = ReduceMax <keepdims = 1> (s2, last)
        z = Sub (s2, m)
        e = Exp (z)
        total = ReduceSum <keepdims = 1> (e, last)
        p = Div (e, total)""",
        EmptyRows.NAN,
    ),
    "times its inverse": (
        """m0 = ReduceMax <keepdims = 1> (s2, last)
        m = Identity (m0)
        z = Sub (s2, m)
        e = Exp (z)
        total = ReduceSum <keepdims = 1> (e, last)
        r = Reciprocal (total)
        p = Mul (e, r)""",
        EmptyRows.NAN,
    ),
    "masked between": (
        """m = ReduceMax <keepdims = 1> (s1, last)
        z = Sub (s1, m)
        e0 = Exp (z)
        e = Where (ww, e0, null)
        total = ReduceSum <keepdims = 1> (e, last)
        p = Div (e, total)""",
        EmptyRows.NAN,
    ),
    "masked between by a product": (
        """m = ReduceMax <keepdims = 1> (s1, last)
        z = Sub (s1, m)
        e0 = Exp (z)
        e = Mul (f, e0)
        total = ReduceSum <keepdims = 1> (e, last)
        p = Div (e, total)""",
        EmptyRows.NAN,
    ),
}


@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_a_softmax_that_is_written_out(name: str) -> None:
    nodes, rows = WRITTEN_OUT[name]
    text = "last = Constant <value = int64[1] {-1}> ()\n s2 = Where (ww, s1, minus)\n" + nodes
    graph = model(PADDED, "float[B,4,S,8] out", MASK + text + "\nout = MatMul (p, v)")
    _, (one,) = rewrite(graph)
    assert one.mask.expression.text == "k <= q and q - k <= 4 and pad[b, k]"
    assert one.mask.empty_rows is rows
    assert_equivalent(graph, *SIZES)


@pytest.mark.parametrize(
    "nodes",
    [
        # nothing taken off: rows of -1e9 are 0 / 0
        "e = Exp (s2)\n total = ReduceSum <keepdims = 1> (e, last)\n p = Div (e, total)",
        "m = ReduceMax <keepdims = 1> (s2, last)\n z = Sub (s2, m)\n e = Exp (z)\n"
        "total = ReduceSum <keepdims = 1> (e, last)\n more = Add (total, unit)\n p = Div (e, more)",
        "m = ReduceMax <keepdims = 1> (s2, last)\n z = Sub (s2, m)\n e = Exp (z)\n"
        "total = ReduceSum <keepdims = 1> (e, rows_axis)\n p = Div (e, total)",
    ],
)
def test_other_quotients_of_exponentials_are_no_softmax(nodes: str) -> None:
    text = """last = Constant <value = int64[1] {-1}> ()
        rows_axis = Constant <value = int64[1] {-2}> ()
        s2 = Where (ww, s1, low)
        """
    graph = model(PADDED, "float[B,4,S,8] out", MASK + text + nodes + "\nout = MatMul (p, v)")
    assert rewrite(graph)[1] == []


SINKS = {
    "a zero behind": ("pads = Constant <value = int64[8] {0,0,0,0,0,0,0,1}> ()\n s3 = Pad (s2, pads)", 0, -1),
    "a number in front": (
        "pads = Constant <value = int64[8] {0,0,0,1,0,0,0,0}> ()\n two_f = Constant <value = float {2.0}> ()\n"
        "s3 = Pad (s2, pads, two_f)",
        1,
        9223372036854775807,
    ),
    "numbers of heads in front": (
        """logits = Constant <value = float[1, 4, 1, 1] {0.5, -1.0, 2.0, 0.0}> ()
        sizes = Shape (s2)
        firsts = Slice (sizes, begin, three)
        wide = Concat <axis = 0> (firsts, one1)
        column = Expand (logits, wide)
        s3 = Concat <axis = -1> (column, s2)""",
        1,
        9223372036854775807,
    ),
}


@pytest.mark.parametrize("name", SINKS)
def test_sinks_of_constants(name: str) -> None:
    nodes, start, end = SINKS[name]
    text = f"""begin = Constant <value = int64[1] {{0}}> ()
        three = Constant <value = int64[1] {{3}}> ()
        one1 = Constant <value = int64[1] {{1}}> ()
        s2 = Where (ww, s1, minus)
        {nodes}
        p0 = Softmax <axis = -1> (s3)
        starts = Constant <value = int64[1] {{{start}}}> ()
        ends = Constant <value = int64[1] {{{end}}}> ()
        axis = Constant <value = int64[1] {{3}}> ()
        p = Slice (p0, starts, ends, axis)
        out = MatMul (p, v)"""
    graph = model(PADDED, "float[B,4,S,8] out", MASK + text)
    site = only_site(graph)
    assert site.sink is not None
    assert_equivalent(graph, *SIZES)
    onnx.checker.check_model(rewrite(graph)[0])


def test_a_column_that_stays_among_the_weights_is_no_sink() -> None:
    """A column in front, and the last one dropped."""
    text = """pads = Constant <value = int64[8] {0,0,0,1,0,0,0,0}> ()
        s2 = Where (ww, s1, minus)
        s3 = Pad (s2, pads)
        p0 = Softmax <axis = -1> (s3)
        begin = Constant <value = int64[1] {0}> ()
        ends = Constant <value = int64[1] {-1}> ()
        axis = Constant <value = int64[1] {3}> ()
        p = Slice (p0, begin, ends, axis)
        out = MatMul (p, v)"""
    graph = model(PADDED, "float[B,4,S,8] out", MASK + text)
    with pytest.raises(AssertionError, match="expected MatMul with the values"):
        rewrite(graph)
