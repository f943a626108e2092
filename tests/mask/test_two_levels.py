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
from onnxruntime.transformers.float16 import convert_float_to_float16

import stof
from stof.options import Options

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
    itself = Equal (i, rows)
    other = Not (itself)
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
    "earlier keys beside padding, where a row may have no key at all": Form(
        "    early = And (causal, other)\n    first = Where (early, scores, lowest)\n" + _PADDING,
        "k <= q - 1 and pad[b, k]",
        ("k <= q - 1 or pad[b, k]",),
        lambda causal, window, real, blocks: (causal & ~np.eye(causal.shape[-1], dtype=bool), real),
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
    return _with_constants(onnx.parser.parse_model(_HEAD + nodes + _TAIL))


def _with_constants(model: onnx.ModelProto) -> onnx.ModelProto:
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
    with np.errstate(invalid="ignore"):  # a row of -inf is NaN
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
    keys = " else ".join(f"'{w}'" for w in form.weaker)
    assert [n for n in site.notes if "no key" in n] == [
        f"a query that the mask leaves no key attends to those of {keys}"
    ]
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
        assert np.isfinite(want).all() == ("no key at all" not in name)
        np.testing.assert_allclose(_run(path, feeds, False), want, atol=form.tolerance)
        for library in (True, False):
            np.testing.assert_allclose(_run(out, feeds, library), want, atol=form.tolerance)
    for size in ((4, 4, 0, 8), (0, 4, 9, 8)):
        feeds = {n: np.zeros(size, np.float32) for n in ("q", "k", "v")}
        feeds["mask"] = np.zeros((size[0], size[2]), np.int64)
        assert _run(out, feeds, True).shape == size


# Queries behind a past: row i stands at position T - S + i.
_PAST = """<ir_version: 9, opset_import: ["" : 18]>
g (float[B, 4, S, 8] q, float[B, 4, %s, 8] k, float[B, 4, %s, 8] v, %s int64[B, T] mask) => (float[B, 4, S, 8] y) {
    %s
    size_k = Shape <start = 2, end = 3> (key)
    keys = Squeeze (size_k)
    size_q = Shape <start = 2, end = 3> (q)
    count = Squeeze (size_q)
    past = Sub (keys, count)
    i = Range (zero, keys, one)
    own = Range (past, keys, one)
    rows = Unsqueeze (own, ones)
    causal = LessOrEqual (i, rows)
    kept = Cast <to = 9> (mask)
    real = Unsqueeze (kept, middle)
    distance = Sub (rows, i)
    near = Less (distance, five)
    window = And (causal, near)
    kt = Transpose <perm = [0, 1, 3, 2]> (key)
    scores = MatMul (q, kt)
    first = Where (window, scores, soft)
    added = Where (real, null, lowest)
    masked = Add (first, added)
    p = Softmax <axis = -1> (masked)
    y = MatMul (p, value)
}"""
_CACHE = "float[B, 4, P, 8] pk, float[B, 4, P, 8] pv,"
_JOINED = "key = Concat <axis = 2> (pk, k) value = Concat <axis = 2> (pv, v)"
PASTS = {
    "keys of another length": _PAST % ("T", "T", "", "key = Identity (k) value = Identity (v)"),
    "a cache": _PAST % ("S", "S", _CACHE, _JOINED),
}


@pytest.mark.parametrize("name", PASTS)
def test_queries_behind_a_past(name: str, tmp_path: Path) -> None:
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(_with_constants(onnx.parser.parse_model(PASTS[name])), path)
    (site,) = stof.optimize(path, out).sites
    assert site.mask == (_NEAR if name == "a cache" else "S + k <= T + q and T + q <= S + k + 4 and pad[b, k]")
    rng = np.random.default_rng(1)
    for rows, keys in ((1, 30), (7, 30), (12, 12)):
        shapes = {"q": rows, "k": keys, "v": keys}
        if name == "a cache":
            shapes = {"q": rows, "k": rows, "v": rows, "pk": keys - rows, "pv": keys - rows}
        feeds = {n: rng.standard_normal((3, 4, size, 8)).astype(np.float32) for n, size in shapes.items()}
        mask = np.ones((3, keys), np.int64)
        mask[1, -6:] = 0  # the last windows are padding alone
        mask[2] = 0
        feeds["mask"] = mask
        want = _run(path, feeds, False)
        for library in (True, False):
            np.testing.assert_allclose(_run(out, feeds, library), want, atol=3e-6)


def test_a_plan_keeps_what_rows_without_a_key_attend(tmp_path: Path) -> None:
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(_model(FORMS["-10000 beside padding, as OpenAI-GPT"].nodes), path)
    plan = tmp_path / "plan.json"
    stof.optimize(path, options=Options(verify=False, dry_run=True, save_plan=plan))
    (site,) = stof.optimize(path, out, Options(plan=plan)).sites
    assert site.replaced
    nodes = [n for n in onnx.load(out).graph.node if n.op_type == "StofAttention"]
    masks = [next(a.s.decode() for a in n.attribute if a.name == "mask") for n in nodes]
    assert masks == ["k <= q and pad[b, k]", "segment_q[b, q] == 1 and pad[b, k] or segment_q[b, q] == 2"]


def test_layers_share_the_numbers_of_their_rows(tmp_path: Path) -> None:
    """And without padding the second node reads no row as its own."""
    nodes = FORMS["a window beside a causal mask, as GPT-Neo"].nodes
    model = _model(nodes)
    again = [onnx.NodeProto.FromString(n.SerializeToString()) for n in model.graph.node]
    start = next(i for i, n in enumerate(again) if n.op_type == "Transpose")
    for node in again[start:]:
        node.input[:] = ["y" if n == "q" else f"{n}_2" if n in _written(again[start:]) else n for n in node.input]
        node.output[:] = [f"{n}_2" for n in node.output]
        if node.op_type != "LessOrEqual":
            model.graph.node.append(node)
    model.graph.output[0].name = "y_2"
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(model, path)
    assert [s.replaced for s in stof.optimize(path, out, Options(verify=False)).sites] == [True, True]
    found = onnx.load(out).graph.node
    assert [n.op_type for n in found].count("StofAttention") == 4
    assert [n.op_type for n in found].count("CumSum") == 1
    assert len({n.input[3 + _roles(n).index("segment_q")] for n in found if "segment_q" in _roles(n)}) == 1


def _written(nodes: list[onnx.NodeProto]) -> set[str]:
    return {o.removesuffix("_2") for n in nodes for o in n.output}


def _roles(node: onnx.NodeProto) -> list[str]:
    return next((a.s.decode().split() for a in node.attribute if a.name == "operands"), [])


def _feeds(length: int) -> dict[str, np.ndarray]:
    """Two batch rows, of which the second is padded at both ends."""
    rng = np.random.default_rng(length)
    feeds: dict[str, np.ndarray] = {n: rng.standard_normal((2, 4, length, 8)).astype(np.float32) for n in "qkv"}
    feeds["mask"] = np.ones((2, length), np.int64)
    feeds["mask"][1, : length // 3] = 0
    feeds["mask"][1, -length // 4 :] = 0
    return feeds


def test_tensorrt_gets_no_running_sums(tmp_path: Path) -> None:
    """Its parser takes them for floats alone."""
    form = FORMS["a window beside a causal mask, as GPT-Neo"]
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(_model(form.nodes), path)
    stof.optimize(path, out, Options(target="tensorrt", verify=False))
    assert {"CumSum", "StofAttention"} & {n.op_type for n in onnx.load(out).graph.node} == {"StofAttention"}
    feeds = _feeds(30)
    for library in (True, False):
        np.testing.assert_allclose(_run(out, feeds, library), _attend(form, feeds), atol=form.tolerance)


def test_a_converter_to_half_precision_keeps_both_nodes(tmp_path: Path) -> None:
    form = FORMS["-10000 beside padding, as OpenAI-GPT"]
    path, out, half = tmp_path / "model.onnx", tmp_path / "out.onnx", tmp_path / "half.onnx"
    onnx.save(_model(form.nodes), path)
    stof.optimize(path, out, Options(verify=False))
    onnx.save(convert_float_to_float16(onnx.load(out), keep_io_types=True), half)
    feeds = _feeds(30)
    for library in (True, False):
        np.testing.assert_allclose(_run(half, feeds, library), _attend(form, feeds), atol=5e-3)


def test_half_precision_is_kept(tmp_path: Path) -> None:
    """-65504 absorbs scores in fp16 arithmetic, and not in fp32, which runtimes may use in its place."""
    path = tmp_path / "model.onnx"
    onnx.save(convert_float_to_float16(_model(FORMS["a window beside a causal mask, as GPT-Neo"].nodes)), path)
    (site,) = stof.optimize(path, tmp_path / "out.onnx").sites
    assert not site.replaced
    assert "a query without any key" in site.reason
    assert "--empty-rows ignore" in site.reason


def test_masks_that_differ_by_head_are_kept(tmp_path: Path) -> None:
    """Which rows have no key then differs by head; the second node has one number for a row of all heads."""
    nodes = """
    distances = Unsqueeze (distance, first_axis)
    heads = Range (zero, four, one)
    by_head = Unsqueeze (heads, lasts)
    far = LessOrEqual (distances, by_head)
    own = And (causal, far)
    first = Where (own, scores, lowest)
    added = Where (real, null, lowest)
    masked = Add (first, added)"""
    model = onnx.parser.parse_model(_HEAD + nodes + _TAIL)
    axes = {"lasts": np.array([1, 2]), "first_axis": np.array([0])}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in axes.items())
    path = tmp_path / "model.onnx"
    onnx.save(_with_constants(model), path)
    (site,) = stof.optimize(path, tmp_path / "out.onnx").sites
    assert not site.replaced
    assert "a query without any key" in site.reason
