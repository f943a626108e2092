# SPDX-License-Identifier: Apache-2.0
"""Rows without a key under two masks, one of which forbids more strongly: they attend to what the weaker one forbids."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import stof

_HEAD = """<ir_version: 9, opset_import: ["" : 18]>
g (float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v, int64[B, S] mask) => (float[B, 4, S, 8] y) {
    size = Shape (mask)
    n = Gather (size, one)
    i = Range (zero, n, one)
    rows = Unsqueeze (i, ones)
    causal = LessOrEqual (i, rows)
    kept = Cast <to = 9> (mask)
    real = Unsqueeze (kept, middle)
    distance = Sub (rows, i)
    near = Less (distance, five)
    window = And (causal, near)
    block = Div (i, four)
    row_block = Div (rows, four)
    blocks = Equal (block, row_block)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    scores = MatMul (q, kt)
"""
_TAIL = """
    p = Softmax <axis = -1> (masked)
    y = MatMul (p, v)
}"""
_BOTH = "    both = And (causal, real)\n    added = Where (both, null, lowest)\n"
_PADDING = "    added = Where (real, null, lowest)\n    masked = Add (first, added)"
_LOWEST = float(np.finfo(np.float32).min)
_NEAR = "k <= q and q - k <= 4 and pad[b, k]"


@dataclass(frozen=True)
class Form:
    """How a graph masks its scores.

    ``weaker``: the masks of rows without a key, in order. ``fills``: the number that replaces scores, or is added to them, where
    the first mask forbids, and where the second one does. ``masks``: both, from causal, window, real and blocks.
    """

    nodes: str
    mask: str
    weaker: tuple[str, ...]
    masks: Callable[..., tuple[np.ndarray, np.ndarray]]
    fills: tuple[float, float] = (_LOWEST, _LOWEST)
    adds: bool = False  # both are added
    tolerance: float = 3e-6


def _low(nodes: str) -> str:
    return nodes.replace("lowest", "low")


FORMS = {
    "causal twice, as GPT-Neo": Form(
        "    first = Where (causal, scores, lowest)\n" + _BOTH + "    masked = Add (first, added)",
        "k <= q and pad[b, k]",
        ("k <= q",),
        lambda causal, window, real, blocks: (causal, causal & real),
    ),
    "the sum written the other way round": Form(
        "    first = Where (causal, scores, lowest)\n" + _BOTH + "    masked = Add (added, first)",
        "k <= q and pad[b, k]",
        ("k <= q",),
        lambda causal, window, real, blocks: (causal, causal & real),
    ),
    "a low number whose double is finite": Form(
        _low("    first = Where (causal, scores, lowest)\n" + _BOTH + "    masked = Add (first, added)"),
        "k <= q and pad[b, k]",
        ("k <= q",),
        lambda causal, window, real, blocks: (causal, causal & real),
        (-1e30, -1e30),
    ),
    "a window beside a causal mask, as GPT-Neo": Form(
        "    first = Where (window, scores, lowest)\n" + _BOTH + "    masked = Add (first, added)",
        _NEAR,
        ("k <= q and q - k <= 4 or k <= q and pad[b, k]",),
        lambda causal, window, real, blocks: (window, causal & real),
    ),
    "a window of low numbers beside a causal mask": Form(
        _low("    first = Where (window, scores, lowest)\n" + _BOTH + "    masked = Add (first, added)"),
        _NEAR,
        ("k <= q and q - k <= 4 or k <= q and pad[b, k]",),
        lambda causal, window, real, blocks: (window, causal & real),
        (-1e30, -1e30),
    ),
    "a causal mask beside padding": Form(
        "    first = Where (causal, scores, lowest)\n" + _PADDING,
        "k <= q and pad[b, k]",
        ("k <= q or pad[b, k]",),
        lambda causal, window, real, blocks: (causal, real),
    ),
    "blocks beside padding": Form(
        "    first = Where (blocks, scores, lowest)\n" + _PADDING,
        "k // 4 == q // 4 and pad[b, k]",
        ("k // 4 == q // 4 or pad[b, k]",),
        lambda causal, window, real, blocks: (blocks, real),
    ),
    "-10000 beside padding, as OpenAI-GPT": Form(
        "    first = Where (causal, scores, soft)\n" + _PADDING,
        "k <= q and pad[b, k]",
        ("pad[b, k]", "True"),
        lambda causal, window, real, blocks: (causal, real),
        (-1e4, _LOWEST),
    ),
    "-10000 outside of blocks beside padding": Form(
        "    first = Where (blocks, scores, soft)\n" + _PADDING,
        "k // 4 == q // 4 and pad[b, k]",
        ("pad[b, k]", "True"),
        lambda causal, window, real, blocks: (blocks, real),
        (-1e4, _LOWEST),
    ),
    "-10000 twice, which keeps the scores": Form(
        "    early = Where (causal, null, soft)\n    first = Add (scores, early)\n"
        + _PADDING.replace("lowest", "soft"),
        "k <= q and pad[b, k]",
        ("k <= q or pad[b, k]",),
        lambda causal, window, real, blocks: (causal, real),
        (-1e4, -1e4),
        adds=True,
        tolerance=5e-3,  # the original loses three digits of the scores
    ),
}


def _model(nodes: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_HEAD + nodes + _TAIL)
    lowest = np.float32(np.finfo(np.float32).min)
    constants = {
        "zero": np.array(0),
        "one": np.array(1),
        "four": np.array(4),
        "five": np.array(5),
        "ones": np.array([1]),
        "middle": np.array([1, 2]),
        "null": np.float32(0),
        "lowest": lowest,
        "low": np.float32(-1e30),
        "soft": np.float32(-1e4),
    }
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items())
    return model


def _run(path: Path, feeds: dict[str, np.ndarray], library: bool) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library:
        stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def _attend(form: Form, feeds: dict[str, np.ndarray]) -> np.ndarray:
    """The attention in fp64, with the masks' numbers in fp32, where twice the lowest is -inf."""
    q, k, v = (feeds[n].astype(np.float64) for n in ("q", "k", "v"))
    at = np.arange(q.shape[2])
    causal = (at <= at[:, None])[None, None]
    window = causal & (at[:, None] - at < 5)
    real = feeds["mask"].astype(bool)[:, None, None]
    blocks = (at // 4 == at[:, None] // 4)[None, None]
    first, second = form.masks(causal, window, real, blocks)
    scores = q @ k.swapaxes(2, 3)
    scores = np.where(first, scores, scores + form.fills[0] if form.adds else form.fills[0])
    scores = scores + np.where(second, 0, form.fills[1])
    scores[scores < 1.5 * _LOWEST] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    found: np.ndarray = weights / weights.sum(-1, keepdims=True) @ v
    return found


@pytest.mark.parametrize("name", FORMS)
def test_rows_without_a_key_get_what_the_graph_gives(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(_model(form.nodes), path)
    (site,) = stof.optimize(path, out).sites
    assert site.replaced, site.reason
    assert site.mask == form.mask
    assert any(note.endswith(" else ".join(f"'{w}'" for w in form.weaker)) for note in site.notes), site.notes
    rng = np.random.default_rng(0)
    for length in (1, 9, 40):
        feeds: dict[str, np.ndarray] = {
            n: rng.standard_normal((4, 4, length, 8)).astype(np.float32) for n in ("q", "k", "v")
        }
        mask = np.ones((4, length), np.int64)
        mask[1, : length // 2] = 0  # the first rows have no key
        mask[2, length // 2 :] = 0
        mask[3] = 0
        feeds["mask"] = mask
        want = _attend(form, feeds)
        assert np.isfinite(want).all()
        np.testing.assert_allclose(_run(path, feeds, False), want, atol=form.tolerance)
        for library in (True, False):
            np.testing.assert_allclose(_run(out, feeds, library), want, atol=form.tolerance)
    for size in ((4, 4, 0, 8), (0, 4, 9, 8)):
        feeds = {n: np.zeros(size, np.float32) for n in ("q", "k", "v")}
        feeds["mask"] = np.zeros((size[0], size[2]), np.int64)
        assert _run(out, feeds, True).shape == size
