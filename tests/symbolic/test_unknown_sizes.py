# SPDX-License-Identifier: Apache-2.0
"""Sizes that no rule knows at first: values that can be computed while the model is read, and operators that force a size."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from attention_forms import model, only_site, reason, rewrite, run

from stof.symbolic import Symbolic, integer


def repeat_interleave(size: int) -> onnx.ModelProto:
    """Interleaved rotary as torch's tracer writes it: cos by Range < repeats -> NonZero -> Transpose -> GatherND."""
    half = size // 2
    body = f"""
        count = Constant <value = int64[2] {{{half}, 1}}> ()
        repeats = ConstantOfShape <value = int64[1] {{2}}> (count)
        start = Constant <value = int64 {{0}}> ()
        step = Constant <value = int64 {{1}}> ()
        limit = Constant <value = int64 {{2}}> ()
        one = Constant <value = int64[1] {{1}}> ()
        wide = Constant <value = int64[4] {{1, 2, 1, 1}}> ()
        turned = Transpose <perm = [2, 0, 1]> (angle)
        single = Unsqueeze (turned, one)
        both = Expand (single, wide)
        range = Range (start, limit, step)
        less = Less (range, repeats)
        found = NonZero (less)
        places = Transpose <perm = [1, 0]> (found)
        taken = GatherND (both, places)
        angles = Transpose <perm = [1, 2, 0]> (taken)
        cosine = Cos (angles)
        cos = Unsqueeze (cosine, one)
        q = Mul (x, cos)
        k = Mul (y, cos)
        %kt
        s1 = MatMul (q, kt)
        p = Softmax <axis = -1> (s1)
        out = MatMul (p, z)
        """
    heads = f"float[B,4,S,{size}]"
    return model(f"float[B,S,{half}] angle, {heads} x, {heads} y, {heads} z", "float[a,b,c,d] out", body)


@pytest.mark.parametrize("size", [8, 64, 128])
def test_indices_of_a_value_that_can_be_computed(size: int) -> None:
    graph = repeat_interleave(size)
    symbolic = Symbolic(graph)
    assert symbolic.shape("found") == (integer(2), integer(size))
    expected = np.stack([np.repeat(np.arange(size // 2), 2), np.tile([0, 1], size // 2)])
    np.testing.assert_array_equal(symbolic.constant("found"), expected)
    assert only_site(graph).head_size == size
    optimized, _ = rewrite(graph)
    rng = np.random.default_rng(size)
    shapes = {"angle": (2, 5, size // 2), **dict.fromkeys("xyz", (2, 4, 5, size))}
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    cos = np.cos(np.repeat(given["angle"].astype(float), 2, -1))[:, None]
    scores = (given["x"] * cos) @ (given["y"] * cos).swapaxes(2, 3)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ given["z"]
    assert np.abs(run(optimized, given, library=True)[0] - wanted).max() < 2e-5


def chosen(body: str) -> onnx.ModelProto:
    """Elements of the last axis that flags of a run choose: how many, nothing says but what follows."""
    constants = "axis0 = Constant <value = int64[1] {0}> ()\nkept = NonZero (flags)\nflat = Squeeze (kept, axis0)\n"
    tail = "p = Softmax <axis = -1> (s1)\nout = MatMul (p, v)"
    inputs = "bool[F] flags, float[B,4,S,16] x, float[B,4,T,8] k, float[B,4,T,8] v, float[8] w"
    return model(inputs, "float[a,b,c,d] out", constants + body + tail)


FORCED = {
    "a MatMul": "q = Gather <axis = 3> (x, flat)\n%kt\ns1 = MatMul (q, kt)\n",
    "a broadcast": "q1 = Gather <axis = 3> (x, flat)\nq = Mul (q1, w)\n%kt\ns1 = MatMul (q, kt)\n",
}


@pytest.mark.parametrize("name", FORCED)
def test_a_size_that_a_later_operator_forces(name: str) -> None:
    graph = chosen(FORCED[name])
    assert only_site(graph).head_size == 8
    optimized, _ = rewrite(graph)
    rng = np.random.default_rng(3)
    shapes = {"x": (2, 4, 5, 16), "k": (2, 4, 7, 8), "v": (2, 4, 7, 8), "w": (8,)}
    given = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in shapes.items()}
    given["flags"] = np.isin(np.arange(16), rng.choice(16, 8, replace=False))
    q = given["x"][..., given["flags"]].astype(float) * (given["w"] if name == "a broadcast" else 1)
    scores = q @ given["k"].swapaxes(2, 3)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = weights / weights.sum(-1, keepdims=True) @ given["v"]
    for library in (False, True):
        assert np.abs(run(optimized, given, library=library)[0] - wanted).max() < 1e-5


def test_sizes_of_inputs_are_not_forced() -> None:
    """What a caller chooses stays what the model declares; and a size beside a broadcast may be 1."""
    graph = model("float[B,?] x, float[8,4] w", "float[a,b] out", "y = Identity (x)\nout = MatMul (y, w)")
    assert Symbolic(graph).shape("y") == Symbolic(graph).shape("x")
    assert Symbolic(graph).shape("x") != (Symbolic(graph).shape("x") or ())[:1] + (integer(8),)
    body = "kept = NonZero (flags)\nbias = Cast <to = 1> (kept)\nout = Add (bias, x)"
    symbolic = Symbolic(model("bool[F] flags, float[1,8] x", "float[a,b] out", body))
    shape = symbolic.shape("bias")
    assert shape is not None
    assert shape[1].constant is None


def test_an_unknown_shape_names_the_node_where_knowledge_ends() -> None:
    body = "q = com.microsoft.Mystery (x)\nkt = Transpose <perm = [0, 1, 3, 2]> (y)\ns1 = MatMul (q, kt)\np = Softmax (s1)\n"
    graph = model("float[B,4,S,8] x, float[B,4,S,8] y", "float[a,b,c,d] out", body + "out = MatMul (p, y)")
    words = reason(graph)
    assert "the shape of the scores is unknown, as that of 'q' is" in words
    assert "com.microsoft::Mystery node that writes 'q'" in words
