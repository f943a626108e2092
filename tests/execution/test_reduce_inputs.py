# SPDX-License-Identifier: Apache-2.0
"""Inputs whose numbers decide how long a run takes, and smaller numbers for them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from test_input_uses import parse, with_tables

from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.execution.reduce_inputs import InputReducer, find_deciding_inputs
from stof.execution.run_limits import RunLimits, TimeLimit
from stof.symbolic import Symbolic

CASE = Case(1, 9, Padding.NONE)
_FRAMES = "n = Cast <to = 7> (f) w = Concat <axis = 0> (one, n)"
# Graphs with the inputs that decide.
GRAPHS = {
    "lengths of data": (
        f"(float[S] x, float[1] f) => (float y) <int64[1] one = {{1}}> {{ {_FRAMES} y = Expand (x, w) }}",
        {"f"},
    ),
    "lengths of shapes": ("(float[S] x, float[T] z) => (float y) { w = Shape (z) y = Expand (x, w) }", set()),
    "sizes of lengths of data": (
        f"(float[S] x, float[1] f) => (float y) <int64[1] one = {{1}}> {{ {_FRAMES} e = Expand (x, w) s = Shape (e) "
        "y = ConstantOfShape (s) }",
        {"f"},  # the length of e is that of data, which Shape does not hide: Expand reads it
    ),
    "numbers alone": ("(float[S] x, int64[S] i) => (float y) <float[9] t> { g = Gather (t, i) y = Mul (x, g) }", set()),
    "a position that counts up to a number": (
        "(float[S] x, int64 n) => (float y) <int64 zero = {0}, int64 one = {1}> { r = Range (zero, n, one) "
        "c = Cast <to = 1> (r) y = ReduceSum (c) z = Neg (x) }",
        {"n"},
    ),
    "iterations": (
        """(float[S] x, int64 n, bool go) => (float[S] y) {
        y = Loop (n, go, x) <body = b (int64 i, bool c, float[S] h) => (bool d, float[S] o) {
        d = Identity (c) o = Sin (h) }> }""",
        {"n", "go"},
    ),
    "a condition that an iteration computes": (
        """(float[S] x, float top) => (float[S] y) <bool go = {1}> {
        y = Loop (, go, x) <body = b (int64 i, bool c, float[S] h) => (bool d, float[S] o) {
        o = Add (h, h) m = ReduceMax <keepdims = 0> (o) d = Less (m, top) }> }""",
        {"x", "top"},
    ),
    "a length inside a branch": (
        """(float[S] x, bool go, float[1] f) => (float y) {
        y = If (go) <then_branch = a () => (float u) { n = Cast <to = 7> (f) u = Expand (x, n) },
        else_branch = b () => (float v) { v = Neg (x) }> }""",
        {"f"},
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_inputs_that_decide_are_found(name: str) -> None:
    text, expected = GRAPHS[name]
    model = parse(text)
    assert find_deciding_inputs(model, {i.name for i in model.graph.input}) == expected


def test_calls_of_functions_count() -> None:
    model = parse("(float[S] x, float[1] f) => (float y) { y = own.widen (x, f) }")
    body = parse("(float[S] x, float[1] f) => (float y) { n = Cast <to = 7> (f) y = Expand (x, n) }").graph.node
    function = model.functions.add(domain="own", name="widen")
    function.input.extend(["x", "f"])
    function.output.append("y")
    function.node.extend(body)
    assert find_deciding_inputs(model, {"x", "f"}) == {"x", "f"}


def _maker(text: str) -> InputMaker:
    model = with_tables(parse(text))
    return InputMaker(model, Symbolic(model), frozenset())


LENGTHS = """(float[S] x, float[S, 8] style, float[1] speed, int64[S] repeats, int64[S] ids) => (float y)
<float[9] t, int64[1] all = {0}> {
g = Gather (t, ids) e = Mul (style, style) m = ReduceSum <keepdims = 0> (e) v = Div (m, speed) r = Cast <to = 1> (repeats)
p = Mul (r, g) q = ReduceSum <keepdims = 0> (p) w = Add (v, q) n = Cast <to = 7> (w) y = Expand (x, n) }"""


def test_smaller_numbers_come_first() -> None:
    """Kind: run time that depends on drawn values is searched for values that run. Indices of a table are left."""
    maker = _maker(LENGTHS)
    reducer = InputReducer(maker)
    usual = maker.draw(CASE, np.random.default_rng(0))
    assert reducer.can_reduce
    first, *others = reducer.search(usual)
    assert [set(f) for f in first] == [{"style", "repeats"}] * len(first)
    factors = [f["style"] for f in first]
    assert factors == sorted(factors)
    assert factors[-1] < 1
    # What divides a length makes it shorter where it is larger: both directions are tried.
    assert [{t["speed"] < 1 for t in trials} for trials in others] == [{True}, {False}]
    assert all(t["style"] == factors[0] for trials in others for t in trials)
    assert not reducer.can_reduce  # a model is searched once
    for trial in itertools.chain(first, *others):
        reducer.apply(trial)
        drawn = maker.draw(CASE, np.random.default_rng(0))
        np.testing.assert_allclose(drawn["style"], usual["style"] * np.float32(trial["style"]), rtol=1e-6)
        np.testing.assert_allclose(drawn["speed"], usual["speed"] * np.float32(trial.get("speed", 1)), rtol=1e-6)
        fewer = np.trunc(usual["repeats"] * trial["style"])
        np.testing.assert_array_equal(drawn["repeats"], np.where(usual["repeats"] > 0, np.maximum(fewer, 1), 0))
        np.testing.assert_array_equal(drawn["ids"], usual["ids"])
        np.testing.assert_array_equal(drawn["x"], usual["x"])
    reducer.apply({})
    again = maker.draw(CASE, np.random.default_rng(0))
    assert all(np.array_equal(again[n], usual[n]) for n in usual)


def test_models_without_such_inputs_are_not_searched() -> None:
    reducer = InputReducer(
        _maker("(float[S] x, int64[S] ids) => (float y) <float[9] t> { g = Gather (t, ids) y = Mul (x, g) }")
    )
    assert not reducer.can_reduce
    assert not list(reducer.search({}))


def test_what_was_tried_is_told() -> None:
    maker = _maker(LENGTHS)
    reducer = InputReducer(maker)
    error = TimeLimit("it took too long")
    error.seconds = 3.0
    found = reducer.explain(error)
    assert type(found) is TimeLimit
    assert found.seconds == 3.0
    assert str(found).startswith("it took too long. Numbers of 'repeats', 'speed', 'style' from 1/256 ")


@pytest.mark.parametrize(
    ("seconds", "has_limit", "words"),
    [
        (0.3, False, "--verify-budget is used up: 0.3 s were left to run the original, which was not enough"),
        (20.0, False, "--verify-budget is used up: 20.0 s were left"),
        (40.0, False, "took longer than 40.0 s to run the original, which may be endless"),
        (0.3, True, "took longer than 0.3 s to run the original, the share of --verify-budget for that"),
        (22.0, True, "took longer than 22.0 s to run the original, which may be endless"),
    ],
)
def test_the_rest_of_a_budget_is_no_endless_run(seconds: float, has_limit: bool, words: str) -> None:
    """Kind: "took longer than 0.3 s, which may be endless" where little of the budget was left."""
    limits = RunLimits(45.0, 1 << 30)
    error = limits.end_step("run the original", seconds, limits.end - 10.0 if has_limit else None)
    assert error.seconds == seconds
    assert words in str(error)
    assert "Nothing was written" in str(error)
    assert "raise --verify-budget (45 s)" in str(error)
    assert ("endless" in str(error)) == ("endless" in words)
