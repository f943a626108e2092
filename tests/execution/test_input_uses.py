# SPDX-License-Identifier: Apache-2.0
"""Integer inputs are drawn by the nodes that read them: ONNX Runtime runs each model on every set of inputs."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.symbolic import Symbolic

CASES = (Case(2, 23, Padding.LEFT), Case(1, 5, Padding.NONE), Case(4, 9, Padding.RIGHT), Case(2, 14, Padding.NONE))


def parse(graph: str, opset: int = 18) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\ng {graph}'
    )  # fmt: skip


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[np.ndarray] = session.run(None, feed)
    return found


def draw(model: onnx.ModelProto) -> list[dict[str, np.ndarray]]:
    maker = InputMaker(model, Symbolic(model), frozenset())
    return [maker.draw(case, np.random.default_rng(seed)) for seed, case in enumerate(CASES)]


# The input's graph, its least and its largest number over all cases; None where they depend on sizes.
_INDICES = {
    "Gather": ("(int64[B, S] i) => (float y) <float[3, 2] t = {1, 2, 3, 4, 5, 6}> { y = Gather (t, i) }", 0, 2),
    "Gather along the last axis": (
        "(int32[B, S] i) => (float y) <float[2, 3] t = {1, 2, 3, 4, 5, 6}> { y = Gather <axis = -1> (t, i) }",
        0,
        2,
    ),
    "Gather through a reshape, a cast and an offset": (
        """(int32[B, S] i) => (float y) <float[9, 1] t = {1, 2, 3, 4, 5, 6, 7, 8, 9}, int64[1] flat = {-1}, int64 two = {2}> {
        r = Reshape (i, flat) c = Cast <to = 7> (r) s = Add (two, c) y = Gather (t, s) }""",
        0,
        6,
    ),
    "Gather behind a difference from a constant": (
        "(int64[B, S] i) => (float y) <float[4] t = {1, 2, 3, 4}, int64 most = {5}> { d = Sub (most, i) y = Gather (t, d) }",
        2,
        5,
    ),
    "Gather behind a product": (
        "(int64[B, S] i) => (float y) <float[7] t = {1, 2, 3, 4, 5, 6, 7}, int64 two = {2}> {"
        "d = Mul (i, two) y = Gather (t, d) }",
        0,
        3,
    ),
    "Gather behind Where": (
        """(int64[B, S] i, bool[B, S] m) => (float y) <float[3] t = {1, 2, 3}, int64 zero = {0}> {
        d = Where (m, i, zero) y = Gather (t, d) }""",
        0,
        2,
    ),
    "Gather of positions that an offset moves": (
        """(int64 i, float[1, S] x) => (float y) <int64 one = {1}, int64 zero = {0}, float[64, 1] t> {
        s = Shape <start = 1, end = 2> (x) n = Squeeze (s) r = Range (zero, n, one) p = Add (r, i) y = Gather (t, p) }""",
        0,
        None,
    ),
    "GatherElements": (
        "(int64[2, S] i) => (float y) <float[2, 3] t = {1, 2, 3, 4, 5, 6}> { y = GatherElements <axis = 1> (t, i) }",
        0,
        2,
    ),
    "GatherND": (
        "(int64[S, 2] i) => (float y) <float[4, 3] t = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> { y = GatherND (t, i) }",
        0,
        2,
    ),
    "GatherND in each row of a batch": (
        "(float[B, S, 2] x, int64[B, 1] i) => (float y) { y = GatherND <batch_dims = 1> (x, i) }",
        0,
        None,
    ),
    "Gather of the last token": (
        "(float[B, S, 2] x, int64 n) => (float y) <int64 one = {1}> { i = Sub (n, one) y = Gather <axis = 1> (x, i) }",
        1,
        None,
    ),
    "word table of EmbedLayerNormalization": (
        """(int32[B, S] i) => (float y, int32 m) <float[7, 4] w, float[64, 4] p, float[4] g, float[4] b> {
        y, m = com.microsoft.EmbedLayerNormalization (i, , w, p, , g, b) }""",
        0,
        6,
    ),
    "segment table of EmbedLayerNormalization": (
        """(int32[B, S] w_ids, int32[B, S] i) => (float y, int32 m)
        <float[7, 4] w, float[64, 4] p, float[2, 4] s, float[4] g, float[4] b> {
        y, m = com.microsoft.EmbedLayerNormalization (w_ids, i, w, p, s, g, b) }""",
        0,
        1,
    ),
    "positions of RotaryEmbedding": (
        """(float[B, S, 8] x, int64[B, S] i) => (float y) <float[64, 4] c, float[64, 4] s> {
        y = com.microsoft.RotaryEmbedding <num_heads = 1> (x, i, c, s) }""",
        0,
        63,
    ),
    "first position of RotaryEmbedding": (
        """(float[B, S, 8] x, int64[1] i) => (float y) <float[64, 4] c, float[64, 4] s> {
        y = com.microsoft.RotaryEmbedding <num_heads = 1> (x, i, c, s) }""",
        0,
        None,
    ),
    "in a branch": (
        """(int64[B, S] i, bool c) => (float y) <float[3] t = {1, 2, 3}> {
        y = If (c) <then_branch = f () => (float u) { u = Gather (t, i) },
        else_branch = h () => (float v) { v = Gather (t, i) }> }""",
        0,
        2,
    ),
}
_SLOTS = {
    "ScatterND": "(float[P, 4] x, int64[S, 1] i, float[S, 4] u) => (float y) { y = ScatterND (x, i, u) }",
    "ScatterND of pages": """(float[P, 4, 2] x, int64[S] i, float[S, 2] u) => (float y)
        <int64[2] flat = {-1, 2}, int64[1] last = {1}> {
        f = Reshape (x, flat) j = Unsqueeze (i, last) y = ScatterND (f, j, u) }""",
    "ScatterElements": "(float[P, 1] x, int64[S, 1] i, float[S, 1] u) => (float y) { y = ScatterElements <axis = 0> (x, i, u) }",
}
_LENGTHS = {
    "LSTM": """(float[S, B, 2] x, int32[B] n) => (float y) <float[1, 12, 2] w, float[1, 12, 3] r> {
        y = LSTM <hidden_size = 3> (x, w, r, , n) }""",
    "GRU": """(float[S, B, 2] x, int32[B] n) => (float y) <float[1, 9, 2] w, float[1, 9, 3] r> {
        y = GRU <hidden_size = 3> (x, w, r, , n) }""",
    "RNN": """(float[S, B, 2] x, int32[B] n) => (float y) <float[1, 3, 2] w, float[1, 3, 3] r> {
        y = RNN <hidden_size = 3> (x, w, r, , n) }""",
    "LSTM behind a transpose and a cast": """(float[B, S, 2] x, int64[B] n) => (float y) <float[1, 12, 2] w, float[1, 12, 3] r> {
        t = Transpose <perm = [1, 0, 2]> (x) c = Cast <to = 6> (n) y = LSTM <hidden_size = 3> (t, w, r, , c) }""",
    "ReverseSequence": """(float[S, B, 2] x, int64[B] n) => (float y) {
        y = ReverseSequence <time_axis = 0, batch_axis = 1> (x, n) }""",
    "ReverseSequence in rows": """(float[B, S] x, int64[B] n) => (float y) {
        y = ReverseSequence <time_axis = 1, batch_axis = 0> (x, n) }""",
    "a mask that is as long as the longest row": """(float[B, S] x, int64[B] n) => (float y)
        <int64 zero = {0}, int64 one = {1}, int64[1] last = {1}, float none = {0}> {
        m = ReduceMax <keepdims = 0> (n) r = Range (zero, m, one) c = Unsqueeze (n, last)
        k = Less (r, c) y = Where (k, x, none) }""",
    "a mask of positions of the data": """(float[B, S] x, int32[B] n) => (float y)
        <int64 zero = {0}, int64 one = {1}, int64[1] last = {1}, float none = {0}> {
        s = Shape <start = 1, end = 2> (x) t = Squeeze (s) r = Range (zero, t, one) c = Unsqueeze (n, last)
        d = Cast <to = 7> (c) k = Greater (d, r) y = Where (k, x, none) }""",
}
# Inputs that become sizes, axes or counts: whatever is drawn has to run.
_OTHERS = {
    "the shape of Reshape": "(float[B, S, 4] x, int64[3] n) => (float y) { y = Reshape (x, n) }",
    "a size within a shape": """(float[1, 8, 4] x, int64 n) => (float y)
        <int64[1] two = {2}, int64[1] rest = {-1}, int64[1] axis = {0}> {
        m = Unsqueeze (n, axis) s = Concat <axis = 0> (m, rest, two, two) y = Reshape (x, s) }""",
    "the shape of Expand": "(float[B, S] x, int64[2] n) => (float y) { y = Expand (x, n) }",
    "the shape of ConstantOfShape": "(int64[2] n) => (float y) { y = ConstantOfShape (n) }",
    "repeats of Tile": "(float[B, S] x, int64[2] n) => (float y) { y = Tile (x, n) }",
    "k of TopK": "(float[B, 3] x, int64[1] n) => (float y, int64 z) { y, z = TopK (x, n) }",
    "the end of Slice": """(float[B, S] x, int64[1] n) => (float y) <int64[1] zero = {0}, int64[1] axis = {1}> {
        s = Slice (x, zero, n, axis) y = ReduceMax <keepdims = 0> (s) }""",
    "the start of Slice": """(float[B, S] x, int64[1] n) => (float y) <int64[1] end = {1000}, int64[1] axis = {1}> {
        s = Slice (x, n, end, axis) y = ReduceMax <keepdims = 0> (s) }""",
    "the number of rounds of Loop": """(int64 n, float[2] x) => (float y) <bool go = {1}> {
        y = Loop (n, go, x) <body = b (int64 i, bool c, float[2] u) => (bool d, float[2] v) {
        d = Identity (c) v = Add (u, u) }> }""",
    "the axis of CumSum": "(float[B, S] x, int64 n) => (float y) { y = CumSum (x, n) }",
    "a divisor": "(int64[B, S] x, int64[B, S] n) => (int64 y) { y = Div (x, n) }",
    "the step of Range": "(int64 n) => (int64 y) <int64 zero = {0}, int64 end = {9}> { y = Range (zero, end, n) }",
    "clipped indices": """(int64[B, S] n) => (float y) <float[3] t = {1, 2, 3}, int64 zero = {0}, int64 two = {2}> {
        c = Clip (n, zero, two) y = Gather (t, c) }""",
    "indices below a least one": """(int64[B, S] n) => (float y) <float[3] t = {1, 2, 3}, int64 two = {2}> {
        c = Min (n, two) y = Gather (t, c) }""",
    "indices modulo the table": """(int64[B, S] n) => (float y) <float[3] t = {1, 2, 3}, int64 three = {3}> {
        c = Mod (n, three) y = Gather (t, c) }""",
}


def with_tables(model: onnx.ModelProto) -> onnx.ModelProto:
    """Random numbers for initializers of which the text gives the shape only."""
    graph = model.graph
    written = {t.name for t in graph.initializer}
    rng = np.random.default_rng(0)
    for value in list(graph.value_info):
        if value.name not in written and not any(value.name in n.output for n in graph.node):
            dims = [d.dim_value for d in value.type.tensor_type.shape.dim]
            graph.initializer.append(
                onnx.numpy_helper.from_array(rng.standard_normal(dims).astype(np.float32), value.name)
            )
            graph.value_info.remove(value)
    return model


@pytest.mark.parametrize("name", _INDICES)
def test_indices_are_in_their_tables(name: str) -> None:
    graph, least, most = _INDICES[name]
    model = with_tables(parse(graph))
    feeds = draw(model)
    for feed in feeds:
        run(model, feed)
    values = np.concatenate([feed[next(n for n in ("i", "n") if n in feed)].reshape(-1) for feed in feeds])
    assert values.min() >= least
    if most is not None:
        assert (values.min(), values.max()) == (least, most)
    assert len(set(values.tolist())) > 1


# Of later opsets.
_LATER = {
    "positions of the standard's RotaryEmbedding": (
        """(float[B, 2, S, 8] x, int64[B, S] i) => (float y) <float[64, 4] c, float[64, 4] s> {
        y = RotaryEmbedding (x, c, s, i) }""",
        23,
        63,
    ),
    "where TensorScatter writes": (
        "(float[B, 2, P, 4] x, float[B, 2, 3, 4] u, int64[B] i) => (float y) { y = TensorScatter (x, u, i) }",
        24,
        None,
    ),
    "where TensorScatter writes along another axis": (
        "(float[B, 2, 4, P] x, float[B, 2, 4, 2] u, int64[B] i) => (float y) { y = TensorScatter <axis = -1> (x, u, i) }",
        24,
        None,
    ),
}


@pytest.mark.parametrize("name", _LATER)
def test_indices_of_later_operators(name: str) -> None:
    graph, opset, most = _LATER[name]
    model = with_tables(parse(graph, opset))
    feeds = draw(model)
    for feed in feeds:
        run(model, feed)
    values = np.concatenate([feed["i"].reshape(-1) for feed in feeds])
    assert values.min() >= 0
    assert len(set(values.tolist())) > 1
    assert most is None or values.max() == most


def test_the_total_length_of_grouped_queries_counts_past_and_new_keys() -> None:
    model = parse("""(float[B, S, 16] q, float[B, S, 8] k, float[B, S, 8] v, float[B, 1, P, 8] pk, float[B, 1, P, 8] pv,
        int32[B] seqlens, int32 total) => (float y, float nk, float nv) {
        y, nk, nv = com.microsoft.GroupQueryAttention <num_heads = 2, kv_num_heads = 1> (q, k, v, pk, pv, seqlens, total) }""")
    for feed in draw(model):
        assert feed["total"] == feed["pk"].shape[2] + feed["k"].shape[1]


@pytest.mark.parametrize("name", _SLOTS)
def test_slots_are_in_range_and_differ(name: str) -> None:
    model = parse(_SLOTS[name])
    for feed in draw(model):
        run(model, feed)
        slots = feed["i"].reshape(-1)
        assert len(set(slots.tolist())) == len(slots)
    assert any(np.any(np.diff(feed["i"].reshape(-1)) < 0) for feed in draw(model))


@pytest.mark.parametrize("name", _LENGTHS)
def test_lengths_are_those_of_rows(name: str) -> None:
    model = with_tables(parse(_LENGTHS[name]))
    for feed, case in zip(draw(model), CASES, strict=True):
        run(model, feed)
        lengths = feed["n"]
        assert lengths[0] == lengths.max() == case.length
        assert lengths.min() >= 1
        if case.padding is Padding.NONE:
            assert np.all(lengths == case.length)
    assert any(feed["n"].min() < feed["n"].max() for feed in draw(model))


@pytest.mark.parametrize("name", _OTHERS)
def test_sizes_axes_and_counts_run(name: str) -> None:
    model = parse(_OTHERS[name])
    for feed in draw(model):
        run(model, feed)


@pytest.mark.parametrize("op", ["GreedySearch", "Sampling"])
def test_prompts_of_generation_are_words(op: str) -> None:
    decoder = parse("""(int64[B, S] ids, int64[B, S] p) => (float y) <float[11, 2] t, float[64, 2] u> {
        a = Gather (t, ids) b = Gather (u, p) y = Add (a, b) }""")
    inputs = ["prompt", "longest", "shortest", "penalty", "", "", "mask"]
    node = onnx.helper.make_node(op, inputs, ["y"], domain="com.microsoft", decoder=with_tables(decoder).graph)
    model = parse(
        "(int32[B, S] prompt, int32[1] longest, int32[1] shortest, float[1] penalty, int32[B, S] mask) => (int32 y) {}"
    )
    model.graph.node.append(node)
    for feed, case in zip(draw(model), CASES, strict=True):
        assert feed["prompt"].min() >= 0
        assert feed["prompt"].max() <= 10
        assert feed["longest"][0] > case.length >= feed["shortest"][0]
        assert feed["penalty"][0] > 0
        assert set(feed["mask"].reshape(-1).tolist()) <= {0, 1}
    assert max(feed["prompt"].max() for feed in draw(model)) == 10
    assert any(np.any(feed["mask"] == 0) for feed in draw(model))


def test_positions_without_a_table_count_on() -> None:
    model = parse("(float[B, S] x, int64[B, S] p) => (float y) { f = Cast <to = 1> (p) y = Mul (x, f) }")
    for feed in draw(model):
        assert np.array_equal(feed["p"], np.broadcast_to(np.arange(feed["p"].shape[1]), feed["p"].shape))


def test_positions_that_are_compared_are_no_lengths() -> None:
    model = parse("""(float[1, S, S] x, int64[S] p) => (float y) <int64[1] last = {1}, float none = {0}> {
        c = Unsqueeze (p, last) k = LessOrEqual (p, c) y = Where (k, x, none) }""")
    for feed in draw(model):
        assert np.array_equal(feed["p"], np.arange(len(feed["p"])))


@pytest.mark.parametrize("declared", ["float", "float[1]", "float[3]", "float16[1]"])
def test_single_numbers_are_positive_and_near_one(declared: str) -> None:
    model = parse(f"({declared} t, {declared.split('[')[0]}[B, S] x) => (float y) {{ y = Div (x, t) }}")
    values = np.concatenate([feed["t"].astype(np.float64).reshape(-1) for feed in draw(model)])
    assert np.all((values >= 0.79) & (values <= 1.26))
    assert np.ptp(values) > 0
    assert any(feed["x"].min() < 0 for feed in draw(model))
