# SPDX-License-Identifier: Apache-2.0
"""Attention in layouts and spellings that need a transposition, an Einsum or merged axes, optimized and run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import stof
from stof.options import Options

_HEAD = '<ir_version: 9, opset_import: ["" : 18]>\n'
# torch's nn.MultiheadAttention: [length, batch, width], heads taken out of the middle axis.
_LENGTH_FIRST = """g (float[S, B, 32] q, float[T, B, 32] k, float[T, B, 32] v) => (float[S, B, 32] y) {
    sizes = Shape(q)  keys = Shape(k)
    s = Slice<>(sizes, zero, one)  b = Slice(sizes, one, two)  t = Slice(keys, zero, one)
    bh = Mul(b, four)
    qs = Concat<axis=0>(s, bh, eight)  ks = Concat<axis=0>(t, bh, eight)
    q3 = Reshape(q, qs)  k3 = Reshape(k, ks)  v3 = Reshape(v, ks)
    qh = Transpose<perm=[1, 0, 2]>(q3)  kh = Transpose<perm=[1, 2, 0]>(k3)  vh = Transpose<perm=[1, 0, 2]>(v3)
    scaled = Mul(qh, scale)
    scores = MatMul(scaled, kh)
    p = Softmax<axis=-1>(scores)
    o = MatMul(p, vh)
    os = Transpose<perm=[1, 0, 2]>(o)
    y = Reshape(os, sizes)
}"""
_EINSUM = """g (float[B, S, 4, 8] q, float[B, T, 4, 8] k, float[B, T, 4, 8] v, int64[B, T] m) => (float[B, S, 4, 8] y) {
    scores = Einsum<equation="bqhd,bkhd->bhqk">(q, k)
    scaled = Mul(scores, scale)
    kept = Cast<to=9>(m)
    kept4 = Unsqueeze(kept, middle)
    masked = Where(kept4, scaled, lowest)
    p = Softmax<axis=-1>(masked)
    y = Einsum<equation="bhqk,bkhd->bqhd">(p, v)
}"""
# Scores [B*H, S, T] with a slope per head: ALiBi as BLOOM has it.
_MERGED = """g (float[B, 4, S, 8] q, float[B, 4, T, 8] k, float[B, 4, T, 8] v, float[B, 4, T] a) => (float[B, 4, S, 8] y) {
    qs = Shape(q)  ks = Shape(k)
    s = Slice(qs, two, three)  t = Slice(ks, two, three)
    qm = Concat<axis=0>(minus, s, eight)  km = Concat<axis=0>(minus, t, eight)  am = Concat<axis=0>(minus, one, t)
    q3 = Reshape(q, qm)  k3 = Reshape(k, km)  v3 = Reshape(v, km)  a3 = Reshape(a, am)
    kt = Transpose<perm=[0, 2, 1]>(k3)
    scores = MatMul(q3, kt)
    scaled = Mul(scores, scale)
    biased = Add(scaled, a3)
    p = Softmax<axis=-1>(biased)
    o = MatMul(p, v3)
    y = Reshape(o, qs)
}"""
CASES = {"length first": _LENGTH_FIRST, "einsum": _EINSUM, "merged": _MERGED}


def parsed(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_HEAD + text.replace("Slice<>", "Slice"))
    numbers = {"zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "eight": 8, "minus": -1}
    constants = {n: np.array([v], np.int64) for n, v in numbers.items()}
    constants |= {"scale": np.float32(8**-0.5), "lowest": np.float32(-3e38), "middle": np.array([1, 2], np.int64)}
    read = {i for n in model.graph.node for i in n.input}
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items() if n in read
    )
    onnx.checker.check_model(model)
    return model


def run(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


@pytest.mark.parametrize("name", CASES)
def test_one_operator_gives_the_same(name: str, tmp_path: Path) -> None:
    model = parsed(CASES[name])
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(path))
    report = stof.optimize(path, written, Options(verify_budget=5))
    assert [s.reason for s in report.sites] == ["replaced"]
    assert not any(n.op_type in ("Softmax", "Einsum", "MatMul") for n in onnx.load(str(written)).graph.node)
    rng = np.random.default_rng(5)
    sizes = {"B": 3, "S": 11, "T": 23}
    feeds = {}
    for value in model.graph.input:
        shape = [d.dim_value or sizes[d.dim_param] for d in value.type.tensor_type.shape.dim]
        feeds[value.name] = rng.standard_normal(shape).astype(np.float32)
        if value.name == "m":
            feeds["m"] = (rng.random(shape) < 0.7).astype(np.int64)
            feeds["m"][1] = 0  # a batch without any key
    expected, found = run(path, feeds), run(written, feeds)
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 5e-6


def test_attention_that_reads_the_result_of_another(tmp_path: Path) -> None:
    """Nothing but views and scales between them: the second reads what replaces the first, which stays needed."""
    model = parsed("""g (float[B, S, 32] x) => (float[B, S, 32] y) {
        heads = Constant<value_ints=[0, 0, 4, 8]>()  flat = Constant<value_ints=[0, 0, 32]>()
        x4 = Reshape(x, heads)  h = Transpose<perm=[0, 2, 1, 3]>(x4)
        ht = Transpose<perm=[0, 1, 3, 2]>(h)
        s1 = MatMul(h, ht)  p1 = Softmax<axis=-1>(s1)  o1 = MatMul(p1, h)
        m4 = Transpose<perm=[0, 2, 1, 3]>(o1)  m = Reshape(m4, flat)
        a = Mul(m, scale)  a4 = Reshape(a, heads)  q = Transpose<perm=[0, 2, 1, 3]>(a4)
        b4 = Reshape(m, heads)  v = Transpose<perm=[0, 2, 1, 3]>(b4)
        kt = Transpose<perm=[0, 1, 3, 2]>(v)
        s2 = MatMul(q, kt)  p2 = Softmax<axis=-1>(s2)  o2 = MatMul(p2, v)
        n4 = Transpose<perm=[0, 2, 1, 3]>(o2)  y = Reshape(n4, flat)
    }""")
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, str(path))
    report = stof.optimize(path, written, Options(verify_budget=5))
    assert [s.reason for s in report.sites] == ["replaced", "replaced"]
    assert not any(n.op_type == "Softmax" for n in onnx.load(str(written)).graph.node)
    feeds = {"x": np.random.default_rng(6).standard_normal((2, 9, 32)).astype(np.float32)}
    np.testing.assert_allclose(run(written, feeds), run(path, feeds), atol=5e-6)
