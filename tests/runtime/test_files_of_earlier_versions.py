# SPDX-License-Identifier: Apache-2.0
"""Files that an earlier version optimized load and run as they did: with the library, and without it.

tests/data/version-0.1.0 has one file for the CPU and one for CUDA, whose nodes carry the hints ``kernel`` and ``tile``. Both
are of two layers of attention with a window and key padding, each followed by a residual and a LayerNormalization.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import stof

FILES = sorted((Path(__file__).resolve().parents[1] / "data").glob("version-*/*.onnx"))


def run(path: Path, with_library: bool, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    if with_library:
        stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, feeds)
    return np.asarray(found)


def expected(path: Path, x: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The model in fp64, from the weights of the file: nothing of stof is used."""
    weights = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in onnx.load(path).graph.initializer}
    index = np.arange(x.shape[1])
    allowed = (np.abs(index[:, None] - index) <= 5) & keys[:, None, None, :].astype(bool)
    y = x.astype(np.float64)
    for layer in "01":
        q, k, v = ((y @ weights[f"w{name}{layer}"]).reshape(*x.shape[:2], 4, 8).transpose(0, 2, 1, 3) for name in "qkv")
        scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(8)
        scores = np.where(allowed, scores, np.finfo(np.float32).min)
        exponentials = np.exp(scores - scores.max(-1, keepdims=True))
        attended = exponentials / exponentials.sum(-1, keepdims=True) @ v
        total = attended.transpose(0, 2, 1, 3).reshape(x.shape) @ weights[f"wo{layer}"] + y
        centered = total - total.mean(-1, keepdims=True)
        y = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
        y = y * weights[f"g{layer}"] + weights[f"b{layer}"]
    return y


def test_there_is_a_file_for_each_provider() -> None:
    assert {path.stem for path in FILES} == {"cpu", "cuda"}
    hints = {
        path.stem: [
            (a.name, a.s.decode())
            for n in onnx.load(path).graph.node
            for a in n.attribute
            if a.name in ("kernel", "tile")
        ]
        for path in FILES
    }
    assert hints == {"cpu": [], "cuda": [("kernel", "sm90-128x64x2"), ("kernel", "sm80"), ("tile", "48x64")]}
    for path in FILES:
        assert {n.op_type for n in onnx.load(path).graph.node} >= {"StofAttention", "StofChain"}


@pytest.mark.parametrize("with_library", [True, False])
@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_it_computes_what_it_did(path: Path, with_library: bool) -> None:
    rng = np.random.default_rng(3)
    for batch, length, padded in ((1, 1, 0), (2, 13, 4), (3, 40, 9)):
        x = rng.standard_normal((batch, length, 32)).astype(np.float32)
        keys = np.ones((batch, length), np.int64)
        if padded:
            keys[0, :padded] = 0
            keys[-1, -padded:] = 0
        found = run(path, with_library, {"x": x, "attention_mask": keys})
        np.testing.assert_allclose(found, expected(path, x, keys), atol=2e-5, rtol=1e-4)
