# SPDX-License-Identifier: Apache-2.0
"""Masks computed in types that do not hold every integer: lifted where exact, left alone where they may overflow."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from attention_forms import PLAIN, feeds, model, rewrite, run

from stof.symbolic import Symbolic

_ENDS = """nothing = Constant <value = float {0.0}> ()
    least = Constant <value = float {-3.4028234663852886e38}> ()
    added = Where (kept, nothing, least)
    s1 = MatMul (q, kt)
    s2 = Add (s1, added)
    p = Softmax (s2)
    out = MatMul (p, v)"""
_DOCUMENTS = """%%kt
    axes12 = Constant <value = int64[2] {1, 2}> ()
    axes13 = Constant <value = int64[2] {1, 3}> ()
    ids = Cast <to = %(type)s> (am)
    ids32 = Cast <to = 1> (ids)
    rows = Unsqueeze (ids32, axes13)
    columns = Unsqueeze (ids32, axes12)
    kept = Equal (rows, columns)
    """
_LIMIT = """%%kt
    axes12 = Constant <value = int64[2] {1, 2}> ()
    ids = Cast <to = %(type)s> (am)
    ids32 = Cast <to = 1> (ids)
    limit = Constant <value = float {%(limit)s}> ()
    over = %(compare)s (%(operands)s)
    kept = Unsqueeze (over, axes12)
    """
# The window of five, its positions or its flat index in a type of their own.
_POSITIONS = """%%kt
    %%window
    qx = Cast <to = %(type)s> (rows)
    kx = Cast <to = %(type)s> (columns)
    q1 = Cast <to = 1> (qx)
    k1 = Cast <to = 1> (kx)
    far = Constant <value = float {%(far)s}> ()
    d = Sub (q1, k1)
    near1 = Less (d, far)
    kept = And (causal, near1)
    """
_FLAT = """%%kt
    %%window
    tx = Cast <to = %(type)s> (t)
    qx = Cast <to = %(type)s> (rows)
    kx = Cast <to = %(type)s> (columns)
    start = Mul (qx, tx)
    flat = Add (start, kx)
    row = Div (flat, tx)
    column = Mod (flat, tx)
    kept = LessOrEqual (column, row)
    """
# Numbers of keys, compared with positions in a float type.
_LENGTHS = """%%kt
    %%window
    kx = Cast <to = %(type)s> (columns)
    k1 = Cast <to = 1> (kx)
    axes = Constant <value = int64[3] {1, 2, 3}> ()
    lx = Cast <to = %(type)s> (lengths)
    l1 = Cast <to = 1> (lx)
    l4 = Unsqueeze (l1, axes)
    nil = Constant <value = float {0.0}> ()
    %(test)s
    """
# One Range over all pairs.
_COUNTED = """%%kt
    %%window
    tx = Cast <to = %(type)s> (t)
    sx = Cast <to = %(type)s> (s)
    count = Mul (sx, tx)
    z = Cast <to = %(type)s> (zero)
    o = Cast <to = %(type)s> (one)
    flat = Range (z, count, o)
    row1 = Div (flat, tx)
    column1 = Mod (flat, tx)
    kept1 = LessOrEqual (column1, row1)
    axis = Constant <value = int64[1] {0}> ()
    su = Unsqueeze (s, axis)
    tu = Unsqueeze (t, axis)
    square = Concat <axis = 0> (su, tu)
    kept = Reshape (kept1, square)
    """
_WRAPPED = """%%kt
    %%window
    qx = Cast <to = %(type)s> (rows)
    kx = Cast <to = %(type)s> (columns)
    many = Constant <value = %(literal)s> ()
    far = Mul (qx, many)
    near1 = Mul (kx, many)
    kept = LessOrEqual (near1, far)
    """
FP16, FP32, FP64, BF16, INT32, INT64 = 10, 1, 11, 16, 6, 7


def graph(body: str, inputs: str = PLAIN + ", int64[B,S] am", **words: object) -> onnx.ModelProto:
    return model(inputs, "float[a,b,c,d] out", body % words + _ENDS)


def assert_same(made: onnx.ModelProto, given: dict[str, np.ndarray], expression: str) -> None:
    optimized, (found,) = rewrite(made)
    assert found.mask.expression.text == expression
    (wanted,), (got,) = run(made, given), run(optimized, given, library=True)
    np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=0)


def assert_left(made: onnx.ModelProto, words: str) -> None:
    """The mask stays in the graph as a bias, and the report says why."""
    _, (found,) = rewrite(made)
    assert found.mask.expression.text == ""
    assert len(found.mask.bias) == 1
    assert words in " ".join(map(str, found.mask.notes))


@pytest.mark.parametrize(("kind", "first"), [(FP16, 2048), (BF16, 256), (FP32, 1 << 24)])
def test_documents_in_floats_that_take_one_for_another(kind: int, first: int) -> None:
    made = graph(_DOCUMENTS, type=kind)
    given = feeds(made, {"B": 1, "S": 8})
    given["am"] = np.array([[first, first, first, first, first + 1, first + 1, first + 1, first + 1]])
    joined = run(made, given)[0]
    given["am"] = given["am"] * 0
    if kind != BF16:  # which the CPU provider does not compare
        np.testing.assert_array_equal(joined, run(made, given)[0])  # in the graph, they are one document
    assert_left(made, "does not hold every integer")


@pytest.mark.parametrize("kind", [FP16, FP32, FP64])
@pytest.mark.parametrize(
    ("compare", "operands", "limit", "expression"),
    [
        ("Greater", "ids32, limit", "0.5", "1 <= segment_k[b, k]"),
        ("GreaterOrEqual", "ids32, limit", "3.0", "3 <= segment_k[b, k]"),
        ("Less", "limit, ids32", "2.0", "3 <= segment_k[b, k]"),
        ("Equal", "ids32, limit", "1.0", "segment_k[b, k] == 1"),
        ("Less", "ids32, limit", "2.0", "segment_k[b, k] <= 1"),
    ],
)
def test_numbers_compared_with_a_small_one(kind: int, compare: str, operands: str, limit: str, expression: str) -> None:
    made = graph(_LIMIT, type=kind, compare=compare, operands=operands, limit=limit)
    given = feeds(made, {"B": 2, "S": 9})
    given["am"] = np.array([[0, 1, 2, 3, 4, 2049, 70_000, 1 << 24, (1 << 24) + 1], [-1, 1, 1, 3, 5, 1, -70_000, 2, 3]])
    assert_same(made, given, expression)


@pytest.mark.parametrize(("kind", "far"), [(FP32, 5.0), (FP32, 4.5), (FP64, 5.0)])
def test_positions_in_floats_that_hold_them(kind: int, far: float) -> None:
    made = graph(_POSITIONS, PLAIN, type=kind, far=far)
    assert_same(made, feeds(made, {"B": 1, "S": 40}), "k <= q and q - k <= 4")


@pytest.mark.parametrize("kind", [FP16, BF16])
def test_positions_in_floats_that_do_not(kind: int) -> None:
    assert_left(graph(_POSITIONS, PLAIN, type=kind, far=5.0), "does not hold every integer")


@pytest.mark.parametrize("kind", [FP16, FP32])
def test_positions_of_a_fixed_length_that_fits(kind: int) -> None:
    inputs = PLAIN.replace("S", "40").replace("B", "1")
    made = graph(_POSITIONS, inputs, type=kind, far=5.0)
    assert_same(made, feeds(made, {}), "k <= q and q - k <= 4")


@pytest.mark.parametrize("text", [_FLAT, _COUNTED], ids=["sum", "range"])
def test_a_flat_index(text: str) -> None:
    made = graph(text, PLAIN, type=INT64)
    assert_same(made, feeds(made, {"B": 1, "S": 30}), "k <= q")
    assert_left(graph(text, PLAIN, type=INT32), "int32")  # from 46341 positions on it wraps
    fixed = graph(text, PLAIN.replace("S", "30"), type=INT32)
    assert_same(fixed, feeds(fixed, {"B": 1}), "k <= q")


@pytest.mark.parametrize(
    ("kind", "literal", "exact"),
    [
        (INT32, "int32 {100}", True),
        (INT32, "int32 {1000}", False),
        (INT64, "int64 {1000}", True),
        (INT64, "int64 {4000000000000}", False),
        (FP32, "float {4.0}", True),
        (FP32, "float {100.0}", False),
    ],
)
def test_products_that_wrap_or_round_at_long_inputs(kind: int, literal: str, exact: bool) -> None:
    made = graph(_WRAPPED, PLAIN, type=kind, literal=literal)
    if exact:
        assert_same(made, feeds(made, {"B": 1, "S": 30}), "k <= q")
        return
    assert_left(made, "does not hold the numbers of long inputs")


def test_sizes_alone_may_be_multiplied() -> None:
    text = """sizes = Shape (x)
        small = Cast <to = 6> (sizes)
        count = ReduceProd <keepdims = 0> (small)
        i0 = Constant <value = int64 {0}> ()
        i1 = Constant <value = int64 {1}> ()
        b = Gather (small, i0)
        s = Gather (small, i1)
        n = Mul (b, s)
        wide = Cast <to = 7> (n)
        axis = Constant <value = int64[1] {0}> ()
        rest = Constant <value = int64[1] {-1}> ()
        rows = Unsqueeze (wide, axis)
        target = Concat <axis = 0> (rows, rest)
        out = Reshape (x, target)"""
    symbolic = Symbolic(model("float[B, S, 8] x", "float[a, b] out", text))
    assert [str(d) for d in symbolic.shape("out") or ()] == ["1*size(B)*size(S)", "8"]


_LIMITED = PLAIN + ", int64[B] lengths"


@pytest.mark.parametrize(
    "test",
    [
        "kept = Less (k1, l4)",
        "kept = Greater (l4, k1)",
        "unit = Constant <value = float {1.0}> ()\nl5 = Sub (l4, unit)\nkept = LessOrEqual (k1, l5)",
        "d = Sub (k1, l4)\nkept = Less (d, nil)",
    ],
)
def test_lengths_compared_with_positions_in_floats(test: str) -> None:
    made = graph(_LENGTHS, _LIMITED, type=FP32, test=test)
    given = feeds(made, {"B": 3, "S": 12})
    given["lengths"] = np.array([5, 12, (1 << 24) + 1])
    optimized, (found,) = rewrite(made)
    # What rounds is not restated: what the graph computes of it is read as a vector.
    assert found.mask.expression.text == ("pad[b, k]" if test.startswith("d =") else "k + 1 <= lengths[b]")
    (wanted,), (got,) = run(made, given), run(optimized, given, library=True)
    np.testing.assert_allclose(got, wanted, atol=2e-6, rtol=0)


def test_lengths_compared_with_positions_in_halves() -> None:
    """They are not restated either: 2049 is 2048 in a half, and the graph's own comparison is read."""
    made = graph(_LENGTHS, _LIMITED, type=FP16, test="kept = Less (k1, l4)")
    given = feeds(made, {"B": 2, "S": 2056})
    given["lengths"] = np.array([12, 2049])
    optimized, (found,) = rewrite(made)
    assert found.mask.expression.text == "pad[b, k]"
    (wanted,), (got,) = run(made, given), run(optimized, given, library=True)
    np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=0)
