# SPDX-License-Identifier: Apache-2.0
"""Models whose function bodies round as kernels with 8-bit operands do, against the fp64 model of these kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import stof
from helpers.int8_attention import relative_rms
from stof.arguments.precisions import INT8, INT8_FP8, EightBits
from stof.attention.checks.eight_bit_model import FULL_PRECISION, SCORES_ALONE, KeyValueHead, Scheme
from stof.attention_precision.eight_bit_emulation import emulate_eight_bits
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
