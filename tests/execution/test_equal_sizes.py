# SPDX-License-Identifier: Apache-2.0
"""Dimensions that a graph ties together are drawn as one, and lengths stay inside tables: ONNX Runtime runs each model.

torch's dynamo exporter names the lengths of past keys and past values apart; a MatMul ties them.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from test_input_uses import CASES, parse, run, with_tables

from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.symbolic import Symbolic
from stof.verification.model_inputs import ModelInputs

_X = "float[B, P, 4] x"
# The graph, and the groups of dimensions that it makes equal.
_TIED = {
    "MatMul": (
        f"({_X}, float[C, 4, Q] z, float[D, R, 6] w) => (float y) {{ s = MatMul (x, z) y = MatMul (s, w) }}",
        "QR",
    ),
    "MatMul of a vector": ("(float[B, P] x, float[Q] z) => (float y) { y = MatMul (x, z) }", "PQ"),
    "Gemm": ("(float[P, Q] x, float[S, R] z, float[T] c) => (float y) { y = Gemm <transA = 1> (x, z, c) }", "PS RT"),
    "Einsum": (
        '(float[B, P, 4] x, float[C, Q, 4] z) => (float y) { y = Einsum <equation = "bpd, bpe -> bde"> (x, z) }',
        "PQ BC",
    ),
    "Concat along another axis": (f"({_X}, float[B, Q, 3] z) => (float y) {{ y = Concat <axis = 2> (x, z) }}", "PQ"),
    "sums with a shared part": (
        """(float[B, P, 4] k, float[B, Q, 4] v, float[B, S, 4] n) => (float y) {
        a = Concat <axis = 1> (k, n) b = Concat <axis = 1> (v, n) t = Transpose <perm = [0, 2, 1]> (a)
        s = MatMul (n, t) w = Softmax <axis = -1> (s) y = MatMul (w, b) }""",
        "PQ",
    ),
    "Add, by way of three names": (
        "(float[B, P] x, float[B, Q] z, float[B, R] w) => (float y) { s = Add (x, z) y = Mul (s, w) }",
        "PQR",
    ),
    "Where": ("(bool[B, P] c, float[B, Q] x, float[B, R] z) => (float y) { y = Where (c, x, z) }", "PQR"),
    "Max of several": ("(float[B, P] x, float[B, Q] z, float[B, R] w) => (float y) { y = Max (x, z, w) }", "PQR"),
    "Mean": ("(float[B, P] x, float[B, Q] z) => (float y) { y = Mean (x, z) }", "PQ"),
    "Expand to another shape": (
        "(float[B, P, 1] x, float[B, Q, 4] z) => (float y) { s = Shape (z) y = Expand (x, s) }",
        "PQ",
    ),
    "Reshape to the sizes of another tensor": (
        """(float[B, P, 4] x, float[C, Q, 2] z) => (float y) <int64[1] two = {2}> {
        b = Shape <start = 0, end = 1> (x) q = Shape <start = 1, end = 2> (z) s = Concat <axis = 0> (b, q, two, two)
        y = Reshape (x, s) }""",
        "PQ",
    ),
    "Reshape of a sum of lengths": (
        """(float[B, P, 4] k, float[B, Q, 4] v, float[B, S, 4] n) => (float y) {
        a = Concat <axis = 1> (k, n) b = Concat <axis = 1> (v, n) s = Shape (b) y = Reshape (a, s) }""",
        "PQ",
    ),
    "the stored rows of a sample": (
        "(float[B, P] x, float[C, Q] z) => (float y) { s = Add (x, z) y = Relu (s) }",
        "PQ BC",
    ),
    "FusedMatMul": (
        "(float[B, P, 4] x, float[B, Q, 6] z) => (float y) { y = com.microsoft.FusedMatMul <transA = 1> (x, z) }",
        "PQ",
    ),
    "MultiHeadAttention": (
        """(float[B, S, 8] q, float[C, P, 8] k, float[D, Q, 8] v) => (float y) {
        y = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, v) }""",
        "PQ BCD",
    ),
}


def maker_of(graph: str) -> InputMaker:
    model = with_tables(parse(graph))
    return InputMaker(model, Symbolic(model), frozenset())


def sizes_run(maker: InputMaker, cases: tuple[Case, ...] = CASES) -> list[dict[str, int]]:
    """The sizes of cases, at which ONNX Runtime runs the model."""
    for seed, case in enumerate(cases):
        run(maker.model, maker.draw(case, np.random.default_rng(seed)))
    return [maker.sizes(case) for case in cases]


@pytest.mark.parametrize("name", _TIED)
def test_tied_dimensions_are_drawn_as_one(name: str) -> None:
    graph, groups = _TIED[name]
    for sizes in sizes_run(maker_of(graph)):
        for group in groups.split():
            assert len({sizes[n] for n in group}) == 1


def test_what_no_node_ties_differs() -> None:
    """A mask's length is that of past and new keys, which differ, as do queries and the keys of an encoder."""
    maker = maker_of("""(float[B, S, 4] q, float[B, P, 4] k, float[B, M] m, float[B, E, 4] e) => (float y, float z) {
        a = Concat <axis = 1> (k, q) t = Transpose <perm = [0, 2, 1]> (a) s = MatMul (q, t) one = Constant <value_ints = [1]> ()
        u = Unsqueeze (m, one) v = Add (s, u) y = Softmax <axis = -1> (v)
        r = Transpose <perm = [0, 2, 1]> (e) x = MatMul (q, r) z = Softmax <axis = -1> (x) }""")
    for sizes in sizes_run(maker):
        assert sizes["M"] == sizes["P"] + sizes["S"]
        assert sizes["P"] != sizes["S"] or sizes["S"] < 4


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"P": 6}, {"P": 6, "Q": 6, "M": 6 + 53}),
        ({"Q": 6}, {"P": 6, "Q": 6, "M": 6 + 53}),
        ({"M": 20}, {"M": 20}),
        ({"M": 20, "S": 20}, {"P": 0, "Q": 0}),
        ({"M": 20, "S": 3}, {"P": 17, "Q": 17}),
        ({"M": 20, "Q": 3}, {"P": 3, "S": 17}),
    ],
)
def test_what_is_stated_decides_the_others(stated: dict[str, int], expected: dict[str, int]) -> None:
    maker = maker_of("""(float[B, S, 4] n, float[B, P, 4] k, float[B, Q, 4] v, float[B, M] m) => (float y) {
        a = Concat <axis = 1> (k, n) b = Concat <axis = 1> (v, n) t = Transpose <perm = [0, 2, 1]> (a) s = MatMul (n, t)
        one = Constant <value_ints = [1]> () u = Unsqueeze (m, one) x = Add (s, u) w = Softmax <axis = -1> (x)
        y = MatMul (w, b) }""")
    (sizes,) = sizes_run(maker, (Case(2, 53, Padding.NONE, tuple(stated.items())),))
    assert {n: sizes[n] for n in expected} == expected
    assert sizes["P"] == sizes["Q"] == sizes["M"] - sizes["S"]


def test_a_row_that_an_exporter_has_stored() -> None:
    """A Reshape of the mask to [1, 1, 1, S] runs with one row alone."""
    maker = maker_of("""(float[B, S] x, float[B, S] m) => (float y) <int64[3] ones = {1, 1, 1}> {
        s = Shape <start = 1> (x) t = Concat <axis = 0> (ones, s) r = Reshape (m, t) y = Add (x, r) }""")
    assert {(z["B"], z["S"]) for z in sizes_run(maker)} == {(1, c.length) for c in CASES}


# One condition and the lengths that each branch ties: P + S in one, S alone in the other.
_BRANCHES = """({inputs}float[B, S, 4] n, float[B, P, 4] k, float[B, M, 4] m) => (float y) {{ {condition} y = If (c) <
    then_branch = with_past () => (float[B, T, 4] u) {{ a = Concat <axis = 1> (k, n) u = Add (a, m) }},
    else_branch = without () => (float[B, T, 4] w) {{ w = Add (n, m) }}> }}"""


def test_a_switch_decides_which_branch_ties() -> None:
    maker = maker_of(_BRANCHES.format(inputs="bool[1] use, ", condition="c = Identity (use)"))
    found = set()
    for case, sizes in zip(CASES, sizes_run(maker), strict=True):
        on = bool(maker.draw(case, np.random.default_rng(0))["use"][0])
        found.add(on)
        assert sizes["M"] == sizes["S"] + on * sizes["P"]
    assert found == {True, False}


def test_a_condition_on_sizes_decides_which_branch_ties() -> None:
    condition = """one = Constant <value_int = 1> () ten = Constant <value_int = 10> () s = Shape (n) l = Gather (s, one)
        c = Greater (l, ten)"""
    for sizes in sizes_run(maker_of(_BRANCHES.format(inputs="", condition=condition))):
        assert sizes["M"] == sizes["S"] + (sizes["S"] > 10) * sizes["P"]


@pytest.mark.parametrize(
    ("inputs", "body"),
    [
        (
            "float[1, S, 4] n, float[1, P, 4] k, float[1, Q, 4] v",
            """trips = Constant <value_int = 3> () y = Loop (trips, , n) <body = step (int64 i, bool c, float[1, S, 4] x)
            => (bool d, float[1, S, 4] u) { d = Identity (c) a = Concat <axis = 2> (k, v) b = ReduceSum (a) u = Add (x, b) }>""",
        ),
        (
            "float[1, 4] n, float[S, P, 4] k, float[Q, 4] v",
            """y = Scan (n, k) <num_scan_inputs = 1, body = step (float[1, 4] x, float[P, 4] p) => (float[1, 4] u) {
            a = Concat <axis = 1> (p, v) b = ReduceSum (a) u = Add (x, b) }>""",
        ),
    ],
    ids=["Loop", "Scan"],
)
def test_bodies_tie_the_sizes_of_outer_tensors(inputs: str, body: str) -> None:
    for sizes in sizes_run(maker_of(f"({inputs}) => (float y) {{ {body} }}")):
        assert sizes["P"] == sizes["Q"]


# Positions behind a past, P to P + S: a case of 53 tokens behind a past is beyond 64.
_PLACES = """zero = Constant <value_int = 0> () one = Constant <value_int = 1> () last = Constant <value_ints = [1]> ()
    first = Constant <value_ints = [0]> () ps = Shape <start = 1, end = 2> (k) ns = Shape <start = 1, end = 2> (n)
    es = Add (ps, ns) p = Squeeze (ps) e = Squeeze (es) r = Range (p, e, one)"""
_LOOKUPS = {
    "Gather": "y = Gather (t, r)",
    "GatherND": "i = Unsqueeze (r, last) y = GatherND (t, i)",
    "GatherElements": "y = GatherElements (u, r)",
    "Slice": "v = Slice (t, ps, es, first) y = Add (n, v)",
    "a square buffer": "v = Slice (q, ps, es, first) w = Slice (v, first, es, last) c = Concat <axis = 1> (k, n) "
    "d = Transpose <perm = [0, 2, 1]> (c) s = MatMul (n, d) y = Add (s, w)",
    "distances before the last position": "f = Sub (r, sixty) y = Gather (t, f)",
    "a running sum of a mask": "a = Concat <axis = 1> (k, n) o = CumSum (m, one) d = Sub (o, one) b = Gather (t, d) "
    "y = Add (a, b)",
}


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("name", _LOOKUPS)
def test_lengths_stay_inside_tables(name: str, is_inside: bool) -> None:
    """A merged decoder with a table of 64 positions: the drawn past overruns it."""
    tables = """float[64, 4] t, float[64] u, float[64, 64] q, int64 sixty = {63}"""
    body = f"{_PLACES} {_LOOKUPS[name]}"
    if is_inside:
        output = (
            f"then_branch = yes () => (float y) {{ {body} }}, else_branch = no () => (float z) {{ z = Identity (n) }}"
        )
        body = f"y = If (use) <{output}>"
    inputs = f"({'bool[1] use, ' if is_inside else ''}float[1, S, 4] n, float[1, P, 4] k, int64[1, M] m)"
    graph = f"{inputs} => (float y) <{tables}> {{ {body} }}"
    model = with_tables(parse(graph))
    symbolic = Symbolic(model)
    maker = InputMaker(model, symbolic, frozenset())
    found = runs_after_redrawing(model, ModelInputs(model, symbolic, maker, lambda _: [*CASES[:2], _LONG]))
    longest = max(n["n"].shape[1] + n["k"].shape[1] for n in found)
    most = 127 if name.startswith("distances") else 64  # positions below 0 count from the end
    assert most - 14 <= longest <= most


_LONG = Case(1, 200, Padding.LEFT)


def runs_after_redrawing(model: onnx.ModelProto, inputs: ModelInputs) -> list[dict[str, np.ndarray]]:
    """The inputs of all cases, drawn otherwise as long as ONNX Runtime refuses them, and their labels are true."""
    cases = inputs.select_cases(1e6)
    for _ in range(8):
        drawn = inputs.draw(cases)
        refused = [(c, d, e) for c, d in zip(cases, drawn, strict=True) if (e := refusal(model, d)) is not None]
        if not refused:
            break
        case, feed, message = refused[0]
        assert inputs.narrow(model, message, case, feed)
        cases = [inputs.restate(c) for c in cases]
    assert not refused
    for case, feed in zip(cases, drawn, strict=True):
        assert case.length in {size for name in "nk" for size in feed[name].shape}
    return drawn


def refusal(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> str | None:
    try:
        run(model, feed)
    except Exception as error:  # whatever the runtime raises
        return str(error)
    return None


@pytest.mark.parametrize("name", ["Gather", "Slice"])
def test_tables_of_their_own_size_are_long_enough(name: str) -> None:
    """A rotary cache that is an input [M, 4] gets as many rows as positions are looked up, whatever the case says."""
    maker = maker_of(
        f"(float[1, S, 4] n, float[1, P, 4] k, float[M, 4] t) => (float y) {{ {_PLACES} {_LOOKUPS[name]} }}"
    )
    for case, sizes in zip(CASES, sizes_run(maker), strict=True):
        assert sizes["S"] == case.length
        assert sizes["M"] >= sizes["P"] + sizes["S"]


def test_a_slice_beyond_its_axis_may_be_meant() -> None:
    """The last 64 of P positions, or all: no reason to draw fewer."""
    maker = maker_of("""(float[1, S, 4] n, float[64, 4] t) => (float y) <int64[1] zero = {0}> {
        s = Shape <start = 1, end = 2> (n) y = Slice (t, zero, s, zero) }""")
    assert [z["S"] for z in sizes_run(maker, (_LONG,))] == [200]


def test_names_of_many_layers_are_one() -> None:
    """Each layer's caches have names of their own, tied by a sum that no two of them share."""
    layers = 100
    names = [f"p{i}" for i in range(2 * layers)]
    inputs = ", ".join(f"float[B, {n}, 4] {n}" for n in names)
    layer = "a{0} = Concat <axis = 1> (p{0}, n) b{0} = Concat <axis = 1> (p{1}, n) c{0} = Add (a{0}, b{0})"
    body = " ".join(layer.format(2 * i, 2 * i + 1) for i in range(layers))
    sums = " ".join(f"d{i} = Add (c{2 * i}, c{2 * i + 2})" for i in range(layers - 1))
    model = with_tables(parse(f"(float[B, S, 4] n, {inputs}) => (float d0) {{ {body} {sums} }}"))
    sizes = InputMaker(model, Symbolic(model), frozenset()).sizes(CASES[0])
    assert len({sizes[n] for n in names}) == 1
