# SPDX-License-Identifier: Apache-2.0
"""Models whose function bodies round as kernels with 8-bit operands do, against the fp64 model of these kernels."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cached_attention"))
import gqa_models
from gqa_models import Shape

# isort: split

import stof
from helpers.int8_attention import relative_rms
from stof.arguments.precisions import INT8, INT8_FP8, EightBits
from stof.attention.checks.eight_bit_model import FULL_PRECISION, SCORES_ALONE, KeyValueHead, Scheme
from stof.attention_precision.eight_bit_emulation import emulate_eight_bits
from stof.cached_attention.checks.oracle import CacheStep, append_to_cache, compute_step, find_allowed
from stof.errors import VerifyError
from stof.thresholds.layers import nodes_by_layer

B, H, D = 2, 2, 64


def attention(folder: Path, *, is_causal: bool) -> onnx.ModelProto:
    """StofAttention on the model's inputs [B, H, S, D] in fp32."""
    info = helper.make_tensor_value_info
    make = helper.make_node
    nodes = [
        make("Transpose", ["k"], ["turned"], perm=[0, 1, 3, 2]),
        make("MatMul", ["q", "turned"], ["products"]),
        make("Mul", ["products", "scale"], ["scores"]),
        *([make("Add", ["scores", "mask"], ["masked"])] if is_causal else []),
        make("Softmax", ["masked" if is_causal else "scores"], ["weights"], axis=-1, name="Softmax"),
        make("MatMul", ["weights", "v"], ["y"]),
    ]
    size = 300
    mask = np.triu(np.full((size, size), -np.inf, np.float32), 1)
    stored = [onnx.numpy_helper.from_array(np.float32(D**-0.5), "scale"), onnx.numpy_helper.from_array(mask, "mask")]
    inputs = [info(n, TensorProto.FLOAT, [B, H, size, D]) for n in "qkv"]
    graph = helper.make_graph(
        nodes, "g", inputs, [info("y", TensorProto.FLOAT, [B, H, size, D])], stored[: 1 + is_causal]
    )
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return stof.optimize(onnx.load(path), target="cuda", verify=False, chains="off")


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feed)[0], np.float64)


def draw() -> dict[str, np.ndarray]:
    """With channels of the keys that have an offset, an outlier among the first keys, and values of different tiles far apart."""
    rng = np.random.default_rng(3)
    feed = {n: rng.standard_normal((B, H, 300, D)).astype(np.float32) for n in "qkv"}
    feed["k"][..., :3] += 20
    feed["k"][:, :, 1] *= 5
    feed["v"][:, :, 128:256] *= 8
    return feed


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("precision", "scheme"), [(INT8, SCORES_ALONE), (INT8_FP8, Scheme())])
def test_bodies_round_as_the_kernels(precision: EightBits, scheme: Scheme, is_causal: bool, tmp_path: Path) -> None:
    """Scores agree but for fp32; weights may have another binade, so that errors agree in size alone."""
    model = attention(tmp_path, is_causal=is_causal)
    (name,) = nodes_by_layer(model)
    feed = draw()
    found = run(emulate_eight_bits(model, {name: precision}), feed)
    exact, modelled = np.empty(found.shape), np.empty(found.shape)
    allowed = np.tri(300, dtype=bool) if is_causal else None
    for b in range(B):
        for h in range(H):
            q, k, v = (feed[n][b, h].astype(np.float64) for n in "qkv")
            exact[b, h] = KeyValueHead.of(k, v, FULL_PRECISION).attend(q, allowed=allowed)
            modelled[b, h] = KeyValueHead.of(k, v, scheme).attend(q, allowed=allowed)
    error, wanted = relative_rms(found, exact), relative_rms(modelled, exact)
    assert wanted > 0.004
    assert error == pytest.approx(wanted, rel=0.1)
    assert relative_rms(found, modelled) < (0.2 if precision is INT8 else 0.9) * wanted
    plain = run(emulate_eight_bits(model, {}), feed)
    assert relative_rms(plain, exact) < 1e-5


CACHE = Shape(H=4, G=2, D=64)
STEPS = [
    (CACHE, [150], 150),
    (replace(CACHE, packed=True, rotary=64, sink=True, scale=0.2), [300], 100),
    (replace(CACHE, window=60, rotary=32, interleaved=True), [300], 100),
    (replace(CACHE, rotary=64, positions=True), [300, 120], 100),
    (replace(CACHE, packed=True, rotary=64), [90, 33], 90),
]


def steps_of(shape: Shape) -> onnx.ModelProto:
    """A StofCachedAttention in place of a GroupQueryAttention."""
    return stof.optimize(gqa_models.model_of(shape), target="cuda", verify=False)


def run_step(model: onnx.ModelProto, shape: Shape, step: CacheStep) -> list[np.ndarray]:
    """Output and caches."""
    return list(gqa_models.session(model, library=True).run(None, gqa_models.feeds_of(shape, step)))


@pytest.mark.parametrize(("shape", "lengths", "queries"), STEPS)
@pytest.mark.parametrize(("precision", "scheme"), [(INT8, SCORES_ALONE), (INT8_FP8, Scheme())])
def test_steps_over_caches_round_as_the_kernels(
    precision: EightBits, scheme: Scheme, shape: Shape, lengths: list[int], queries: int
) -> None:
    """Caches stay as they are. The mean of a sequence is over other keys where lengths differ: errors agree in size."""
    model = steps_of(shape)
    (name,) = nodes_by_layer(model)
    step = gqa_models.draw_step(shape, lengths, queries, max(lengths) + 7, seed=2)
    emulated, plain = (run_step(m, shape, step) for m in (emulate_eight_bits(model, {name: precision}), model))
    for b, length in enumerate(lengths):
        for cache, kept in zip(emulated[1:], plain[1:], strict=True):
            np.testing.assert_array_equal(cache[b, :, :length], kept[b, :, :length])
    sequences, _ = append_to_cache(step)
    exact = compute_step(step).output
    found, wanted, modelled = [], [], []
    for b, sequence in enumerate(sequences):
        for h in range(shape.H):
            keys, values = (x[h // 2].astype(np.float64) for x in (sequence.keys, sequence.values))
            rows = np.arange(sequence.tokens)
            allowed = find_allowed(step, sequence, h, rows)
            sink = None if step.sink is None else float(step.sink[h])
            head = KeyValueHead.of(keys, values, scheme)
            modelled.append(head.attend(sequence.query[h, rows], step.scale or None, allowed, sink))
            found.append(emulated[0][b, rows, 64 * h : 64 * h + 64].astype(np.float64))
            wanted.append(exact[b, rows, 64 * h : 64 * h + 64])
    joined = [np.concatenate(x) for x in (found, wanted, modelled)]
    error, expected = relative_rms(joined[0], joined[1]), relative_rms(joined[2], joined[1])
    assert expected > 0.003
    assert error == pytest.approx(expected, rel=0.1)
    if len(lengths) == 1:
        assert relative_rms(joined[0], joined[2]) < (0.2 if precision is INT8 else 0.9) * expected


def test_steps_of_few_tokens_do_not_round() -> None:
    model = steps_of(CACHE)
    (name,) = nodes_by_layer(model)
    for queries in (1, 16):
        step = gqa_models.draw_step(CACHE, [100, 40], queries, 110)
        emulated, plain = (run_step(m, CACHE, step) for m in (emulate_eight_bits(model, {name: INT8_FP8}), model))
        np.testing.assert_array_equal(emulated[0], plain[0])


def test_sliding_window_caches_are_refused() -> None:
    """Rows that the first tokens attend are gone behind the step."""
    shape = replace(CACHE, window=32, sliding=True)
    model = steps_of(shape)
    (name,) = nodes_by_layer(model)
    with pytest.raises(VerifyError, match="keeps a window of its cache"):
        emulate_eight_bits(model, {name: INT8})
