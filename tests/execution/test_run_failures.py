# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's messages about failed runs, as it writes them, and what is drawn after them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from test_input_uses import parse, run, with_tables

from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.execution.narrow_inputs import InputNarrower
from stof.execution.run_failure import RunFailure, parse_failure
from stof.symbolic import Symbolic

_ONES = np.ones((2, 53), np.float32)
_MESSAGES = {
    "Gather": (
        "(int64[B] i) => (float y) <float[3] t> { y = Gather (t, i) }",
        {"i": np.array([7])},
        RunFailure("Gather", "", 7, -3, 2, is_of_values=True),
    ),
    "GatherElements": (
        "(int64[B] i) => (float y) <float[3] t> { y = GatherElements (t, i) }",
        {"i": np.array([7])},
        RunFailure("GatherElements", is_of_values=True),
    ),
    "GatherND": (
        "(int64[B, 1] i) => (float y) <float[3] t> { y = GatherND (t, i) }",
        {"i": np.array([[7]])},
        RunFailure("GatherND", "", 7, is_of_values=True),
    ),
    "ScatterND": (
        "(int64[B, 1] i, float[B] u) => (float y) <float[3] t> { y = ScatterND (t, i, u) }",
        {"i": np.array([[7]]), "u": np.ones(1, np.float32)},
        RunFailure("ScatterND", "", 7, is_of_values=True),
    ),
    "ScatterElements": (
        "(int64[B] i, float[B] u) => (float y) <float[3] t> { y = ScatterElements (t, i, u) }",
        {"i": np.array([-9]), "u": np.ones(1, np.float32)},
        RunFailure("ScatterElements", "", -9, -3, 2, is_of_values=True),
    ),
    "EmbedLayerNormalization": (
        """(int32[B, S] i) => (float y, int32 m) <float[7, 4] w, float[64, 4] p, float[4] g, float[4] b> {
        y, m = com.microsoft.EmbedLayerNormalization (i, , w, p, , g, b) }""",
        {"i": np.array([[7]], np.int32)},
        RunFailure("EmbedLayerNormalization", is_of_values=True),
    ),
    "LSTM": (
        """(float[S, B, 2] x, int32[B] n) => (float y) <float[1, 12, 2] w, float[1, 12, 3] r> {
        y = LSTM <hidden_size = 3> (x, w, r, , n) }""",
        {"x": np.ones((3, 1, 2), np.float32), "n": np.array([5], np.int32)},
        RunFailure("LSTM", "", None, 1, 3, is_of_values=True),
    ),
    "ReverseSequence": (
        "(float[S, B] x, int64[B] n) => (float y) { y = ReverseSequence (x, n) }",
        {"x": np.ones((3, 1), np.float32), "n": np.array([5])},
        RunFailure("ReverseSequence", "", 5, 0, 3, is_of_values=True),
    ),
    "TopK": (
        "(float[A, B] x, int64[1] n) => (float y, int64 z) { y, z = TopK (x, n) }",
        {"x": _ONES, "n": np.array([60])},
        RunFailure("TopK", "", 60, 1, 53, is_of_values=True),
    ),
    "Add": (
        "(float[A, B] x, float[C, D] z) => (float y) { y = Add (x, z) }",
        {"x": _ONES, "z": _ONES[:, :16]},
        RunFailure("Add", unequal=((16, 53),)),
    ),
    "Concat": (
        "(float[A, B] x, float[C, D] z) => (float y) { y = Concat <axis = 0> (x, z) }",
        {"x": _ONES, "z": _ONES[:, :16]},
        RunFailure("Concat", unequal=((16, 53),)),
    ),
    "Reshape": (
        "(float[A, B] x, int64[2] s) => (float y) { y = Reshape (x, s) }",
        {"x": _ONES, "s": np.array([2, 16])},
        RunFailure("Reshape", unequal=((53, 16),)),
    ),
    "an input": (
        "(float[A, 8] x) => (float y) { y = Identity (x) }",
        {"x": _ONES},
        RunFailure(unequal=((53, 8),)),
    ),
}


@pytest.mark.parametrize("name", _MESSAGES)
def test_messages_of_the_runtime_are_understood(name: str) -> None:
    graph, feed, expected = _MESSAGES[name]
    with pytest.raises(Exception, match="ONNXRuntimeError") as caught:
        run(with_tables(parse(graph)), feed)
    found = parse_failure(str(caught.value))
    # Versions differ in the order of two sizes.
    assert {frozenset(p) for p in found.unequal} == {frozenset(p) for p in expected.unequal}
    assert (found.op, found.value, found.low, found.high, found.is_of_values) == (
        expected.op,
        expected.value,
        expected.low,
        expected.high,
        expected.is_of_values,
    )


@pytest.mark.parametrize("size", [1 << 45, 1 << 62])
def test_messages_about_memory_are_understood(size: int) -> None:
    """Of tensors that are too large: smaller numbers may make them smaller."""
    with pytest.raises(Exception, match="ONNXRuntimeError") as caught:
        run(parse("(int64[1] n) => (float y) { y = ConstantOfShape (n) }"), {"n": np.array([size])})
    assert parse_failure(str(caught.value)).is_of_memory


@pytest.mark.parametrize(
    "text", ["", "[", "idx=", "range [1,", "{1,2", "was ended by SIGSEGV", "idx=" + "9" * 400, "\udcff"]
)
def test_other_messages_say_nothing(text: str) -> None:
    found = parse_failure(text)
    assert (found.op, found.node, found.low, found.high, found.unequal) == ("", "", None, None, ())


# Graphs that hide from the nodes alone what an input may hold.
_HIDDEN = {
    "a product of an input with itself": (
        "(int64[B, S] i) => (float y) <float[50] t> { s = Mul (i, i) y = Gather (t, s) }"
    ),
    "indices by way of floats": (
        """(int64[B, S] i) => (float y) <float[9] t> {
        f = Cast <to = 1> (i) e = Sqrt (f) c = Cast <to = 7> (e) d = Mul (c, c) y = Gather (t, d) }"""
    ),
    "slots by way of a running sum": (
        """(float[P] x, int64[1, S] i, float[1, S] v) => (float y)
        <int64 axis = {0}, int64[1] last = {1}, int64[1] first = {0}> {
        f = Squeeze (i, first) u = Squeeze (v, first) s = CumSum (f, axis) j = Unsqueeze (s, last) y = ScatterND (x, j, u) }"""
    ),
    "positions that are computed by way of floats": (
        """(float[1, S] x) => (float y) <int64 zero = {0}, int64 one = {1}, float[16] t> {
        s = Shape <start = 1, end = 2> (x) n = Squeeze (s) r = Range (zero, n, one) f = Cast <to = 1> (r)
        e = Exp (f) l = Log (e) q = Round (l) i = Cast <to = 7> (q) y = Gather (t, i) }"""
    ),
}


@pytest.mark.parametrize("name", _HIDDEN)
def test_refused_inputs_are_drawn_again(name: str) -> None:
    model = with_tables(parse(_HIDDEN[name]))
    maker = InputMaker(model, Symbolic(model), frozenset())
    narrower = InputNarrower(maker)
    case = Case(1, 53, Padding.NONE)
    refusals = 0
    while (error := _refusal(model, feed := maker.draw(case, np.random.default_rng(0)))) is not None:
        refusals += 1
        assert narrower.narrow(model, str(error), case, feed), error
    assert 0 < refusals <= 8
    for short in (Case(1, 5, Padding.NONE), Case(1, 9, Padding.NONE)):
        assert _refusal(model, maker.draw(short, np.random.default_rng(1))) is None


def _refusal(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> Exception | None:
    try:
        run(model, feed)
    except Exception as error:  # whatever the runtime raises
        return error
    return None


@pytest.mark.parametrize(("message", "length"), [("other than 1. 16 by 53", 16), ("other than 1. 53 by 61", 61)])
@pytest.mark.parametrize("op", ["Add", "Where"])
def test_sizes_are_made_to_agree(op: str, message: str, length: int) -> None:
    model = parse("(float[B, S] x, float[B, T] z) => (float y) { u = Sigmoid (x) w = Sigmoid (z) y = Identity (u) }")
    maker = InputMaker(model, Symbolic(model), frozenset())
    case = Case(2, 53, Padding.NONE)
    words = f"Non-zero status code returned while running {op} node. Name:'' Status Message: {message}"
    assert InputNarrower(maker).narrow(model, words, case, maker.draw(case, np.random.default_rng(0)))
    sizes = maker.sizes(case)
    assert (sizes["B"], sizes["S"], sizes["T"]) == (2, length, length)
    assert maker.sizes(Case(2, 9, Padding.NONE))["S"] == (9 if length < 53 else length)


_ONE = "f = Cast <to = 1> (s) g = Sigmoid (f) h = Round (g) i = Cast <to = 7> (h)"  # 1, as no rule knows
_STORED = {
    "a Reshape to one row": (f"{_ONE} t = Concat <axis = 0> (i, s) r = Reshape (x, t) y = Relu (r)", 1),
    "a Reshape to three rows": (
        f"{_ONE} j = Add (i, two) t = Concat <axis = 0> (j, s) r = Reshape (x, t) y = Relu (r)",
        3,
    ),
    "a sum with three rows": (
        f"{_ONE} j = Add (i, two) t = Concat <axis = 0> (j, s) z = ConstantOfShape (t) y = Add (x, z)",
        3,
    ),
}


@pytest.mark.parametrize("name", _STORED)
def test_rows_of_a_sample_are_found(name: str) -> None:
    """A graph that declares [batch, seq] and runs with the rows of its exporter's sample alone."""
    body, rows = _STORED[name]
    graph = f"(float[B, S] x) => (float y) <int64[1] two = {{2}}> {{ s = Shape <start = 1> (x) {body} }}"
    model = with_tables(parse(graph))
    maker = InputMaker(model, Symbolic(model), frozenset())
    narrower = InputNarrower(maker)
    for case in (Case(2, 53, Padding.NONE), Case(4, 9, Padding.RIGHT)):
        while (error := _refusal(model, feed := maker.draw(case, np.random.default_rng(0)))) is not None:
            assert narrower.narrow(model, str(error), case, feed), error
        assert maker.sizes(case) == {"B": rows, "S": case.length}


def test_tries_come_to_an_end() -> None:
    model = with_tables(parse("(int64[B, S] i) => (float y) <float[3] t> { s = Mul (i, i) y = Gather (t, s) }"))
    maker = InputMaker(model, Symbolic(model), frozenset())
    narrower = InputNarrower(maker, most=5)
    case = Case(1, 53, Padding.NONE)
    message = "while running Gather node. Name:'' Status Message: idx=9 must be within the inclusive range [-3,2]"
    changes = [narrower.narrow(model, message, case, maker.draw(case, np.random.default_rng(0))) for _ in range(9)]
    assert sum(changes) <= 5
    assert not changes[-1]


@pytest.mark.parametrize("message", ["", "returned while running NoSuchOp node. Name:'x' Status Message: no"])
def test_unknown_failures_change_no_words(message: str) -> None:
    model = with_tables(parse("(int64[B, S] i) => (float y) <float[3] t> { y = Gather (t, i) }"))
    maker = InputMaker(model, Symbolic(model), frozenset())
    case = Case(1, 9, Padding.NONE)
    feed = maker.draw(case, np.random.default_rng(0))
    assert not InputNarrower(maker).narrow(model, message, case, feed)
    assert np.array_equal(maker.draw(case, np.random.default_rng(0))["i"], feed["i"])
