# SPDX-License-Identifier: Apache-2.0
"""What masks read at run time: numbers and vectors of any rank, and vectors that a graph computes however it likes."""

from __future__ import annotations

import re

import numpy as np
import onnx
import pytest
from attention_forms import PLAIN, feeds, model, rewrite, run

from stof.errors import UnsupportedError
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.mask.site import OperandView
from stof.symbolic import Symbolic

HEAD = """
    %kt
    shape = Shape (q)
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    two = Constant <value = int64 {2}> ()
    four = Constant <value = int64 {4}> ()
    ones = Constant <value = int64[1] {1}> ()
    zeros = Constant <value = int64[1] {0}> ()
    last = Constant <value = int64[1] {-1}> ()
    middle = Constant <value = int64[2] {1, 2}> ()
    outer = Constant <value = int64[2] {1, 3}> ()
    after = Constant <value = int64[3] {1, 2, 3}> ()
    n = Gather (shape, two)
    i = Range (zero, n, one)
    rows = Unsqueeze (i, ones)
    columns = Unsqueeze (i, zeros)
    causal = LessOrEqual (columns, rows)
"""
CORE = """
    least = Constant <value = float {-1e9}> ()
    s1 = MatMul (q, kt)
    s2 = Where (w, s1, least)
    p = Softmax <axis = -1> (s2)
    out = MatMul (p, v)"""
RNG = np.random.default_rng(0)


def _numbers(most: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, most, shape).astype(np.int64)


# name: (input, nodes, expression, views by role, what is given at B = 2, S = 19)
CASES = {
    "a number for all batches": (
        "int64 n0",
        """first = Less (columns, n0)
        w = Or (causal, first)""",
        "k <= q or k + 1 <= lengths[b]",
        {"lengths": OperandView.FLAT},
        lambda: np.array(6, np.int64),
    ),
    "a number for each batch, of rank 2": (
        "int64[B, 1] n0",
        """n4 = Unsqueeze (n0, middle)
        w = Less (columns, n4)""",
        "k + 1 <= lengths[b]",
        {"lengths": OperandView.FLAT},
        lambda: np.array([[6], [19]], np.int64),
    ),
    "positions of all batches": (
        "int64[S] at",
        """a = Unsqueeze (at, ones)
        w = LessOrEqual (columns, a)""",
        "k <= segment_q[b, q]",
        {"segment_q": OperandView.ROW},
        lambda: _numbers(19, 19),
    ),
    "a mask of rank 4": (
        "bool[B, 1, 1, S] m",
        "w = And (m, causal)",
        "k <= q and pad[b, k]",
        {"pad": OperandView.ROWS},
        lambda: RNG.random((2, 1, 1, 19)) < 0.7,
    ),
    "a mask of keys before batches": (
        "int64[S, B] m",
        """turned = Transpose <perm = [1, 0]> (m)
        m4 = Unsqueeze (turned, middle)
        w = Cast <to = 9> (m4)""",
        "pad[b, k]",
        {"pad": OperandView.TURNED},
        lambda: np.concatenate([np.ones((1, 2), np.int64), _numbers(2, 18, 2)]),
    ),
    "keys and queries of the same mask": (
        "int64[B, S] m",
        """a = Unsqueeze (m, middle)
        b = Unsqueeze (m, outer)
        both = Mul (a, b)
        w = Cast <to = 9> (both)""",
        "pad[b, k] and pad[b, q]",
        {"pad": OperandView.SAME},
        lambda: np.concatenate([np.ones((2, 1), np.int64), _numbers(2, 2, 18)], axis=1),
    ),
    "entries of a table, from its end as well": (
        "int64[B, S] at",
        """kept = Constant <value = bool[6] {1, 0, 1, 1, 0, 1}> ()
        found = Gather (kept, at)
        padding = Unsqueeze (found, middle)
        w = And (padding, causal)""",
        "k <= q and table0[segment_k[b, k] % 6]",
        {"segment_k": OperandView.SAME},
        lambda: RNG.integers(-6, 6, (2, 19)),
    ),
    "entries of a table of numbers, by an index of each batch": (
        "int64[B] at",
        """windows = Constant <value = int64[3] {3, 1, 7}> ()
        each = Gather (windows, at)
        e4 = Unsqueeze (each, after)
        distance = Sub (rows, columns)
        near = Less (distance, e4)
        w = And (near, causal)""",
        "k <= q and q + 1 <= table0[lengths[b] % 3] + k",
        {"lengths": OperandView.SAME},
        lambda: np.array([-3, 2]),
    ),
    "entries of a table by what is not negative": (
        "int64[B, S] at",
        """kept = Constant <value = bool[6] {1, 0, 1, 1, 0, 1}> ()
        six = Constant <value = int64 {6}> ()
        rest = Mod (at, six)
        found = Gather (kept, rest)
        padding = Unsqueeze (found, middle)
        w = And (padding, causal)""",
        "k <= q and table0[segment_k[b, k] % 6]",
        {"segment_k": OperandView.SAME},
        lambda: RNG.integers(-60, 60, (2, 19)),
    ),
    "two vectors of lengths, which are made masks": (
        "int64[B] queries, int64[B] keys",
        """queries2 = Unsqueeze (queries, ones)
        keys2 = Unsqueeze (keys, ones)
        a = Less (columns, queries2)
        b = Less (columns, keys2)
        a4 = Unsqueeze (a, outer)
        b4 = Unsqueeze (b, middle)
        w = And (a4, b4)""",
        "segment_q[b, q] != 0 and pad[b, k]",
        {"pad": OperandView.SAME, "segment_q": OperandView.SAME},
        lambda: (np.array([9, 19], np.int64), np.array([12, 3], np.int64)),
    ),
    "numbers of documents, by where they begin": (
        "int64[D] starts",
        """at = Unsqueeze (i, ones)
        starts2 = Unsqueeze (starts, zeros)
        reached = GreaterOrEqual (at, starts2)
        counts = Cast <to = 7> (reached)
        document = ReduceSum <keepdims = 0> (counts, ones)
        a = Unsqueeze (document, ones)
        b = Unsqueeze (document, zeros)
        w = Equal (a, b)""",
        "segment_k[b, k] == segment_q[b, q]",
        {"segment_k": OperandView.ROW, "segment_q": OperandView.ROW},
        lambda: np.array([0, 5, 6, 13], np.int64),
    ),
    "groups of a mask of tokens, by an operator without a formula": (
        "int64[B, S] tokens",
        """doubled = Mul (tokens, two)
        mixed = BitwiseXor (tokens, doubled)
        a = Unsqueeze (mixed, outer)
        b = Unsqueeze (mixed, middle)
        same = Equal (a, b)
        w = Or (causal, same)""",
        "k <= q or segment_k[b, k] == segment_q[b, q]",
        {"segment_k": OperandView.SAME, "segment_q": OperandView.SAME},
        lambda: _numbers(9, 2, 19),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_vectors(name: str) -> None:
    inputs, nodes, wanted, views, draw = CASES[name]
    graph = model(f"{PLAIN}, {inputs}", "float[B,4,S,8] out", HEAD + nodes + CORE)
    optimized, (one,) = rewrite(graph)
    assert one.mask.expression.text == wanted
    assert {o.role: o.view for o in one.mask.operands} == views
    onnx.checker.check_model(optimized)
    values = draw()
    names = [i.name for i in graph.graph.input][3:]
    given = {n: RNG.standard_normal((2, 4, 19, 8)).astype(np.float32) for n in "qkv"}
    given |= dict(zip(names, values if isinstance(values, tuple) else (values,), strict=True))
    (before,) = run(graph, given)
    for library in (False, True):
        (after,) = run(optimized, given, library=library)
        np.testing.assert_allclose(after, before, atol=2e-6)
    for value in graph.graph.input:  # a batch of 0
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param == "B":
                given[value.name] = np.take(given[value.name], [], axis)
    (before,) = run(graph, given)
    (after,) = run(optimized, given, library=True)
    assert before.shape == after.shape == (0, 4, 19, 8)


def _stays_a_bias(graph: onnx.ModelProto, words: str) -> None:
    optimized, (found,) = rewrite(graph)
    assert found.mask.expression.text == ""
    assert any(re.search(words, str(note)) for note in found.mask.notes), found.mask.notes
    given = feeds(graph, {"B": 2, "S": 9})
    given["m"] = (np.random.default_rng(0).random(given["m"].shape) < 0.7).astype(given["m"].dtype)
    given["m"][..., 0] = 1
    (before,) = run(graph, given)
    for library in (False, True):
        (after,) = run(optimized, given, library=library)
        np.testing.assert_allclose(after, before, atol=2e-6)


def test_a_mask_of_pairs_that_is_given_is_told() -> None:
    """No vector: it stays a bias, and a note names the input and how it is read."""
    graph = model(f"{PLAIN}, bool[B, S, S] m", "float[B,4,S,8] out", HEAD + "w = Unsqueeze (m, ones)" + CORE)
    _stays_a_bias(graph, r"'m' of shape .* at \(b, q, k\)")


def test_a_mask_row_of_one_batch_is_not_taken_for_all() -> None:
    """The first row of a mask, read for every batch."""
    nodes = """m0 = Gather (m, zeros)
        w = Cast <to = 9> (m0)"""
    graph = model(f"{PLAIN}, int64[B, S] m", "float[B,4,S,8] out", HEAD + nodes + CORE)
    _stays_a_bias(graph, r"'m' of shape .* at \(0, k\)")


@pytest.mark.parametrize(
    ("declared", "nodes"),
    [
        ("bool[4] m", "own = Unsqueeze (m, middle) w = Or (causal, own)"),
        ("float[4] m", "own0 = Unsqueeze (m, middle) own = Cast <to = 9> (own0) w = And (causal, own)"),
        (
            "bool[B, 4] m",
            "inner = Constant <value = int64[2] {2, 3}> () own = Unsqueeze (m, inner) w = Or (causal, own)",
        ),
        (
            "int64[4] m",
            "each = Unsqueeze (m, middle) far = Sub (rows, columns) own = Less (far, each) w = And (causal, own)",
        ),
        (
            "int64[B, 4] m",
            """inner = Constant <value = int64[2] {2, 3}> () each = Unsqueeze (m, inner)
            far = Sub (rows, columns) own = Less (far, each) w = And (causal, own)""",
        ),
    ],
)
def test_what_is_given_for_each_head_is_no_vector(declared: str, nodes: str) -> None:
    """The operator's vectors have a number for each key or query, or one for each batch."""
    graph = model(f"{PLAIN}, {declared}", "float[B,4,S,8] out", HEAD + nodes + CORE)
    _stays_a_bias(graph, r"'m' of shape \[.*4\] at \((b, )?h\)")


def test_padding_of_more_keys_than_there_are_is_refused() -> None:
    """The first part of a longer vector: as an operand it would have to be cut."""
    nodes = """length = Unsqueeze (n, zeros)
        m0 = Slice (m, zeros, length, ones)
        m4 = Unsqueeze (m0, middle)
        w = And (causal, m4)"""
    graph = model(f"{PLAIN}, bool[B, 3000] m", "float[B,4,S,8] out", HEAD + nodes + CORE)
    with pytest.raises(
        UnsupportedError, match=r"'m' as padding of shape \[\d, 3000\], where the operator takes \[\d, \d+\]"
    ):
        rewrite(graph)


def test_a_vector_has_the_length_of_queries_or_of_all_keys() -> None:
    """A dimension that only a vector has first is no batch where others have it behind theirs, or where it is as long as keys."""
    cached = "float[B,4,S,8] q, float[B,4,P,8] past, float[B,4,S,8] v, bool[T] real, bool[S] asked"
    body = """
        k = Concat <axis = 2> (past, q)
        v2 = Concat <axis = 2> (past, v)
        kt = Transpose <perm = [0, 1, 3, 2]> (k)
        columns = Constant <value = int64[1] {0}> ()
        rows = Constant <value = int64[1] {1}> ()
        both = Unsqueeze (real, columns)
        own = Unsqueeze (asked, rows)
        least = Constant <value = float {-1e9}> ()
        s1 = MatMul (q, kt)
        w = And (both, own)
        s2 = Where (w, s1, least)
        p = Softmax <axis = -1> (s2)
        out = MatMul (p, v2)"""
    graph = model(cached, "float[B,4,S,8] out", body)
    optimized, (one,) = rewrite(graph)
    assert {o.tensor for o in one.mask.operands} == {"real", "asked"}
    sizes = InputMaker(graph, Symbolic(graph), frozenset()).sizes(Case(2, 13, Padding.NONE))
    assert (sizes["B"], sizes["S"]) == (2, 13)
    assert sizes["T"] == sizes["S"] + sizes["P"]
    given = feeds(graph, {"B": 2, "S": 5, "P": 6, "T": 11})
    given |= {"real": RNG.random(11) < 0.6, "asked": RNG.random(5) < 0.7}
    np.testing.assert_allclose(run(optimized, given, library=True)[0], run(graph, given)[0], atol=2e-6)
