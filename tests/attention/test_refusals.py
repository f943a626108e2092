# SPDX-License-Identifier: Apache-2.0
"""Graphs that resemble attention but compute something else are left alone, with a reason."""

from __future__ import annotations

import pytest
from attention_forms import PLAIN, feeds, model, only_site, reason, rewrite, run, sites
from onnx import helper

from stof.attention.expand.expanders import make_working_copy
from stof.attention.subgraphs import find_scopes
from stof.errors import UnsupportedError

BEGIN = "%kt\ns1 = MatMul (q, kt)\n"

# name: (inputs, outputs, body, words of the reason)
REFUSED = {
    "softmax over queries": (
        PLAIN,
        "float[a,b,c,d] out",
        BEGIN + "p = Softmax <axis = 2> (s1)\nout = MatMul (p, v)",
        "along axis 2, expected the last",
    ),
    "weights are an output": (
        PLAIN,
        "float[a,b,c,d] out, float[e,f,g,h] p",
        BEGIN + "p = Softmax (s1)\nout = MatMul (p, v)",
        "'p' are a graph output",
    ),
    "weights have another reader": (
        PLAIN,
        "float[a,b,c,d] out, float[e,f,g,h] other",
        BEGIN + "p = Softmax (s1)\nout = MatMul (p, v)\nother = Neg (p)",
        "go to the MatMul node that writes 'out', the Neg node that writes 'other'",
    ),
    "fill that is no mask": (
        PLAIN,
        "float[a,b,c,d] out",
        BEGIN + "%window\nfill = Constant <value = float {0.0}> ()\ns2 = Where (w, s1, fill)\np = Softmax (s2)\n"
        "out = MatMul (p, v)",
        "fills masked scores with 0.0",
    ),
    "a scale that turns the fill round": (
        PLAIN,
        "float[a,b,c,d] out",
        BEGIN + "%window\nfill = Constant <value = float {-1e9}> ()\nminus = Constant <value = float {-1.0}> ()\n"
        "s2 = Where (w, s1, fill)\ns3 = Mul (s2, minus)\np = Softmax (s3)\nout = MatMul (p, v)",
        "fills masked scores with 1000000000.0",
    ),
    "mask below the tanh": (
        PLAIN,
        "float[a,b,c,d] out",
        BEGIN + "%window\n%added\ns2 = Add (s1, added)\ns3 = Tanh (s2)\ncap = Constant <value = float {5.0}> ()\n"
        "s4 = Mul (s3, cap)\np = Softmax (s4)\nout = MatMul (p, v)",
        "a mask is applied below the Tanh node",
    ),
    "scaled values": (
        PLAIN,
        "float[a,b,c,d] out",
        BEGIN + "p = Softmax (s1)\nhalf = Constant <value = float {0.5}> ()\nv2 = Mul (v, half)\nv3 = Identity (v2)\n"
        "out = MatMul (p, v3)",
        "the values are scaled by 0.5",
    ),
    "fp64": (
        PLAIN.replace("float", "double"),
        "double[a,b,c,d] out",
        BEGIN + "p = Softmax (s1)\nout = MatMul (p, v)",
        "element types 11, 11, 11",
    ),
    "keys shared by the batch": (
        "float[B,4,S,8] q, float[1,4,S,8] k, float[1,4,S,8] v",
        "float[a,b,c,d] out",
        BEGIN + "p = Softmax (s1)\nout = MatMul (p, v)",
        "the key has batch size 1",
    ),
    "other tensors for the heads of a group": (
        "float[B,4,S,8] q, float[B,2,S,8] k0, float[B,2,S,8] v0",
        "float[a,b,c,d] out",
        "k = Concat <axis = 1> (k0, k0)\nv = Concat <axis = 1> (v0, v0)\n"
        + BEGIN
        + "p = Softmax (s1)\nout = MatMul (p, v)",
        "",
    ),
    "too wide a head": (
        PLAIN.replace("8]", "257]"),
        "float[a,b,c,d] out",
        BEGIN + "p = Softmax (s1)\nout = MatMul (p, v)",
        "head size 257",
    ),
    "unknown heads": (
        PLAIN.replace("4", "H"),
        "float[a,b,c,d] out",
        BEGIN + "p = Softmax (s1)\nout = MatMul (p, v)",
        "no layout [batch, heads, length, size] of known heads",
    ),
    "a classifier": (
        "float[B,7] x",
        "float[B,7] out",
        "out = Softmax (x)",
        "no attention but a classifier: the scores are rows of one matrix",
    ),
    "a gate over experts": (
        "float[B,S,7] x, float[7,8] w",
        "float[a,b,c] out",
        "p = Softmax (x)\nout = MatMul (p, w)",
        "met 'x'",
    ),
    "linear attention": (
        PLAIN,
        "float[a,b,c,d] out",
        "p = Softmax (q)\n%kt\nkv = MatMul (kt, v)\nout = MatMul (p, kv)",
        "met 'q'",
    ),
    "keys without a batch": (
        "float[B,4,S,8] q, float[4,T,8] k, float[B,4,T,8] v",
        "float[a,b,c,d] out",
        "kt = Transpose <perm = [0, 2, 1]> (k)\ns1 = MatMul (q, kt)\np = Softmax (s1)\nout = MatMul (p, v)",
        "the key has 3 axes where the other operand has 4",
    ),
    "values without a batch": (
        "float[B,4,S,8] q, float[B,4,T,8] k, float[4,T,8] v",
        "float[a,b,c,d] out",
        BEGIN + "p = Softmax (s1)\nout = MatMul (p, v)",
        "the value has 3 axes where the other operand has 4",
    ),
    "a guard that fills with ones": (
        PLAIN,
        "float[a,b,c,d] out",
        BEGIN + "p = Softmax (s1)\nnan = IsNaN (p)\nfill = Constant <value = float {1.0}> ()\n"
        "p2 = Where (nan, fill, p)\nout = MatMul (p2, v)",
        "is no NaN guard",
    ),
    "weights that are dropped": (
        PLAIN,
        "float[a,b,c,d] out",
        BEGIN + "ratio = Constant <value = float {0.5}> ()\non = Constant <value = int32 {1}> ()\n"
        "training = Cast <to = 9> (on)\np0 = Softmax (s1)\np = Dropout (p0, ratio, training)\nout = MatMul (p, v)",
        "the Dropout node that writes 'p' may drop elements",
    ),
    "weights that a caller may have dropped": (
        PLAIN + ", bool training",
        "float[a,b,c,d] out",
        BEGIN + "p0 = Softmax (s1)\np = Dropout (p0, , training)\nout = MatMul (p, v)",
        "the Dropout node that writes 'p' may drop elements",
    ),
    "scores that are dropped": (
        PLAIN + ", bool training, float ratio",
        "float[a,b,c,d] out",
        BEGIN + "s2 = Dropout (s1, ratio, training)\np = Softmax (s2)\nout = MatMul (p, v)",
        "the Dropout node that writes 's2' may drop elements",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    inputs, outputs, body, words = REFUSED[name]
    graph = model(inputs, outputs, body)
    if not words:  # concatenated heads are heads of their own: read as they are, which is right
        assert only_site(graph).kv_num_heads == 4
        return
    assert words in reason(graph)


def test_a_mask_that_spreads_the_scores_is_refused() -> None:
    graph = model(
        "float[1,4,S,8] q, float[1,4,S,8] k, float[1,4,S,8] v, float[2,1,1,S] added",
        "float[a,b,c,d] out",
        BEGIN + "s2 = Add (s1, added)\np = Softmax (s2)\nout = MatMul (p, v)",
    )
    assert "broadcasts a size of 1 of the scores to 2" in reason(graph)


def test_a_mask_of_fixed_size_on_scores_of_any_size_is_refused() -> None:
    graph = model(
        PLAIN + ", float[1,1,19,19] added",
        "float[a,b,c,d] out",
        BEGIN + "s2 = Add (s1, added)\np = Softmax (s2)\nout = MatMul (p, v)",
    )
    assert "fixed size 19 where query and key give S" in reason(graph)


def test_an_opaque_mask_is_refused_by_the_lifter_and_other_sites_are_not_held_up() -> None:
    graph = model(
        PLAIN + ", float[B,1,S,S] noise",
        "float[a,b,c,d] out, float[e,f,g,h] second",
        BEGIN + "nan = IsNaN (noise)\nlow = Constant <value = float {-1e9}> ()\nrounded = Round (noise)\n"
        "least = Constant <value = float {0.0}> ()\nb = Greater (rounded, least)\ns2 = Where (b, s1, low)\n%window\n%added\n"
        "s3 = Add (s2, added)\np = Softmax (s3)\n"
        "out = MatMul (p, v)\np9 = Softmax (s1)\nsecond = MatMul (p9, v)",
    )
    found, findings = sites(graph)
    assert len(found) == 2
    assert not findings
    with pytest.raises(UnsupportedError):
        rewrite(graph)


def test_a_softmax_in_a_subgraph_is_told() -> None:
    graph = model(PLAIN + ", bool flag", "float[a,b,c,d] out", "out = Neg (q)")
    branches = [
        helper.make_graph(
            [helper.make_node("Softmax", ["q"], [name], name=f"in {name}")],
            name,
            [],
            [helper.make_tensor_value_info(name, 1, None)],
        )
        for name in ("yes", "no")
    ]
    graph.graph.node.append(
        helper.make_node("If", ["flag"], ["chosen"], name="choice", then_branch=branches[0], else_branch=branches[1])
    )
    scopes = find_scopes(make_working_copy(graph))
    assert {s.description for s in scopes[1:]} == {"then_branch of If node 'choice'", "else_branch of If node 'choice'"}
    assert not any(s.sites for s in scopes)
    reasons = {f.site: f.reason for s in scopes for f in s.findings}
    assert set(reasons) == {"in yes", "in no"}
    assert all("no MatMul of a query and a key" in r for r in reasons.values())


ROW_GUARD = (
    BEGIN
    + """%window
    least = Constant <value = float {-3.4028234663852886e38}> ()
    nothing = Constant <value = float {0.0}> ()
    axes12 = Constant <value = int64[2] {1, 2}> ()
    am4 = Unsqueeze (am, axes12)
    amb = Cast <to = 9> (am4)
    both = And (amb, w)
    added = Where (both, nothing, least)
    s2 = Add (s1, added)
    p = Softmax (s2)
    o1 = MatMul (p, v)
    %guard
    """
)
COUNTED = """counted = Cast <to = 6> (%mask)
    end = Constant <value = int64[1] {-1}> ()
    count = %reduce <keepdims = 1> (counted, end)
    limit = Constant <value = int32 {%limit}> ()
    %empty
    out = Where (empty, nothing, o1)"""


def counted(reduce: str, empty: str, mask: str = "both", limit: int = 1) -> str:
    words = {"%mask": mask, "%reduce": reduce, "%limit": str(limit), "%empty": empty}
    text = COUNTED
    for word, value in words.items():
        text = text.replace(word, value)
    return text


GUARDS = {
    "no key counted": (counted("ReduceSum", "empty = Less (count, limit)"), True),
    "not one or more": (counted("ReduceSum", "some = GreaterOrEqual (count, limit)\nempty = Not (some)"), True),
    "count is zero": (counted("ReduceSum", "empty = Equal (count, limit)", limit=0), True),
    "none is the largest": (counted("ReduceMax", "some = Cast <to = 9> (count)\nempty = Not (some)"), True),
    "all are dropped": ("drop = Not (both)\n" + counted("ReduceMin", "empty = Cast <to = 9> (count)", "drop"), True),
    "rows with one key, too": (counted("ReduceSum", "empty = Less (count, limit)", limit=2), False),
    "rows with one key": (counted("ReduceSum", "empty = Equal (count, limit)"), False),
    "rows with a key": (counted("ReduceSum", "empty = GreaterOrEqual (count, limit)"), False),
    "not every key": (counted("ReduceMin", "some = Cast <to = 9> (count)\nempty = Not (some)"), False),
    "by the window": (counted("ReduceSum", "empty = Less (count, limit)", "w"), False),
    "by the padding": (counted("ReduceSum", "empty = Less (count, limit)", "amb"), False),
}


@pytest.mark.parametrize("name", GUARDS)
def test_row_guard_is_folded_when_it_is_one_and_stays_otherwise(name: str) -> None:
    guard, folded = GUARDS[name]
    graph = model(PLAIN + ", int64[B,S] am", "float[a,b,c,d] out", ROW_GUARD.replace("%guard", guard))
    assert only_site(graph).row_guard == "empty"
    optimized, _ = rewrite(graph)
    kinds = [n.op_type for n in optimized.graph.node]
    assert "Softmax" not in kinds
    assert ("Where" not in kinds) == folded
    for padded in ((0, 9), (3, 17), (0, 16), (0, 17)):  # rows of one key, and of none
        given = feeds(graph, {"B": 2, "S": 17})
        given["am"][0, slice(*padded)] = 0
        (wanted,), (found,), (plain,) = run(graph, given), run(optimized, given, library=True), run(optimized, given)
        assert abs(found - wanted).max() < 2e-6
        assert abs(plain - wanted).max() < 2e-6
        if folded and padded == (0, 9):
            assert not wanted[0, :, :8].any()


SINK = """s2 = Identity (s1)
logits = Constant <value = float[1,4,1,1] {0.5, -1.0, 2.0, 0.0}> ()
four = Shape <start = 0, end = 3> (s2)
ones = Constant <value = int64[1] {1}> ()
wide = Concat <axis = 0> (four, ones)
column = Expand (logits, wide)
s3 = Concat <axis = -1> (s2, column)
axes = Constant <value = int64[1] {-1}> ()
p1 = Softmax <axis = -1> (s3)
zeros = Constant <value = int64[1] {0}> ()
end = Constant <value = int64[1] {-1}> ()
p = Slice (p1, zeros, end, axes)
out = MatMul (p, v)"""


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("", "", ""),
        # The sink comes first: what is dropped is its weight only if the first column is.
        ("Concat <axis = -1> (s2, column)", "Concat <axis = -1> (column, s2)", "Slice"),
        ("Slice (p1, zeros, end, axes)", "Slice (p1, ones, rest, axes)", "Slice"),
        # A logit per query is no sink of the head.
        ("column = Expand (logits, wide)", "column = ReduceMax <keepdims = 1> (s2, axes0)", "Concat"),
    ],
    ids=["as it is", "first", "the wrong column", "per query"],
)
def test_only_a_logit_per_head_is_a_sink(before: str, after: str, words: str) -> None:
    body = SINK.replace(before, after) if before else SINK
    more = "axes0 = Constant <value = int64[1] {-1}> ()\nrest = Constant <value = int64[1] {9999}> ()\n"
    graph = model(PLAIN, "float[a,b,c,d] out", BEGIN + more + body)
    if words:
        assert words in reason(graph)
    else:
        assert only_site(graph).sink == "logits"
