# SPDX-License-Identifier: Apache-2.0
"""Inputs of a step over static caches agree: the cache has room, lengths end behind the new positions."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.symbolic import Symbolic

CASES = (
    Case(2, 39, Padding.LEFT),
    Case(4, 45, Padding.RIGHT),
    Case(1, 3, Padding.NONE),
    Case(1, 50, Padding.NONE),
    Case(4, 9, Padding.RIGHT),
)
CACHE = "float[B, S, 16] k, float[B, C, 16] ck, int64[B] w"
WRITE = "uk = TensorScatter <axis = 1> (ck, k, w)"
ATTEND = "y = Attention <q_num_heads = 4, kv_num_heads = 2, is_causal = 1> (q, uk, uk, , , , n)"


def parse(inputs: str, body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 11, opset_import: ["" : 24]> g ({inputs}) => (float[B, S, 32] y, float uk) {{ {body} }}'
    )


def draw(model: onnx.ModelProto, **roles: dict[str, str]) -> list[dict[str, np.ndarray]]:
    """Inputs of all cases, on which the model runs; ``roles``: tensors that masks read, with what they are as long as."""
    symbolic = Symbolic(model)
    limits = {n: symbolic.shape(t)[1] for n, t in roles.get("limits", {}).items()}  # type: ignore[index]
    maker = InputMaker(model, symbolic, frozenset(), limits, fused=model.graph)
    feeds = [maker.draw(case, np.random.default_rng(seed)) for seed, case in enumerate(CASES)]
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for feed in feeds:
        session.run(None, feed)
    return feeds


@pytest.mark.parametrize("read", [False, True], ids=["lengths unknown", "lengths read by a mask"])
@pytest.mark.parametrize("capacity", ["C", "64"])
def test_lengths_end_behind_the_new_positions(capacity: str, read: bool) -> None:
    model = parse(f"float[B, S, 32] q, {CACHE}, int64[B] n".replace("C", capacity), f"{WRITE} {ATTEND}")
    feeds = draw(model, limits={"n": "ck"} if read else {})
    for feed in feeds:
        assert np.array_equal(feed["n"], feed["w"] + feed["k"].shape[1])
        assert feed["n"].max() <= feed["ck"].shape[1] > feed["k"].shape[1]
    assert {1} < {f["k"].shape[1] for f in feeds}
    assert len({n for f in feeds for n in f["w"].tolist()}) > 3


def test_lengths_that_the_graph_adds_up() -> None:
    """Where a cache is written is a position, not padding."""
    length = "s = Shape <start = 1, end = 2> (k) n = Add (w, s)"
    feeds = draw(parse(f"float[B, S, 32] q, {CACHE}", f"{WRITE} {length} {ATTEND}"), limits={"n": "ck"})
    assert max(f["w"].max() for f in feeds) > 1


def test_a_circular_cache_wraps() -> None:
    write = WRITE.replace("axis = 1", 'axis = 1, mode = "circular"')
    feeds = draw(parse(f"float[B, S, 32] q, {CACHE}, int64[B] n", f"{write} {ATTEND}"))
    for feed in feeds:
        ends = feed["w"] + feed["k"].shape[1]
        assert np.array_equal(feed["n"], np.minimum(ends, feed["ck"].shape[1]))
    assert any((f["w"] + f["k"].shape[1] > f["ck"].shape[1]).any() for f in feeds)


def test_a_prompt_begins_at_the_first_position() -> None:
    write = "uk = TensorScatter <axis = 1> (ck, k)"
    inputs = f"float[B, S, 32] q, {CACHE.rpartition(',')[0]}, int64[B] n"
    for feed in draw(parse(inputs, f"{write} {ATTEND}")):
        assert (feed["n"] == feed["k"].shape[1]).all()


_SPELLINGS = {
    "ScatterND of rows": """(float[B, 2, S, 8] k, float[B, 2, C, 8] ck, int64[S] p) => (float uk) {
        a = Constant <value_ints = [-1]> () i = Unsqueeze (p, a)
        t = Transpose <perm = [2, 0, 1, 3]> (ck) u = Transpose <perm = [2, 0, 1, 3]> (k)
        w = ScatterND (t, i, u) uk = Transpose <perm = [1, 2, 0, 3]> (w) }""",
    "ScatterElements": """(float[B, 2, S, 8] k, float[B, 2, C, 8] ck, int64[S] p) => (float uk) {
        a = Constant <value_ints = [1]> () i = Unsqueeze (p, a) s = Shape (k) e = Expand (i, s)
        uk = ScatterElements <axis = 2> (ck, e, k) }""",
    "from the first position on": """(float[B, 2, S, 8] k, float[B, 2, C, 8] ck, int64[S] p) => (float uk) {
        zero = Constant <value_int = 0> () one = Constant <value_int = 1> () a = Constant <value_ints = [-1]> ()
        first = Gather (p, zero) s = Shape <start = 2, end = 3> (k) n = Squeeze (s) r = Range (zero, n, one)
        rows = Add (r, first) i = Unsqueeze (rows, a)
        t = Transpose <perm = [2, 0, 1, 3]> (ck) u = Transpose <perm = [2, 0, 1, 3]> (k)
        w = ScatterND (t, i, u) uk = Transpose <perm = [1, 2, 0, 3]> (w) }""",
}


@pytest.mark.parametrize("read", [False, True], ids=["unknown", "read by a mask"])
@pytest.mark.parametrize("name", _SPELLINGS)
def test_new_positions_follow_each_other(name: str, read: bool) -> None:
    """The positions of a static cache's new keys, as exporters take them, begin anywhere in the cache."""
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]> g {_SPELLINGS[name]}')
    symbolic = Symbolic(model)
    capacity = symbolic.shape("ck")[2]  # type: ignore[index]
    maker = InputMaker(model, symbolic, frozenset(), {"p": capacity} if read else {})
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    starts = set()
    for seed, case in enumerate(CASES):
        feed = maker.draw(case, np.random.default_rng(seed))
        session.run(None, feed)
        assert (np.diff(feed["p"]) == 1).all()
        assert feed["k"].shape[2] < feed["ck"].shape[2]
        starts.add(int(feed["p"][0]))
    assert len(starts) > 2


def test_caches_that_nothing_needs_are_not_drawn() -> None:
    model = parse(f"float[B, S, 32] q, {CACHE}, int64[B] n", f"{WRITE} {ATTEND}")
    maker = InputMaker(model, Symbolic(model), frozenset())
    assert set(maker.draw(CASES[0], np.random.default_rng(0), {"q"})) == {"q", "w", "n"}
