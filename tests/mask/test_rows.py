# SPDX-License-Identifier: Apache-2.0
"""Rows without a key where two masks are added, and masks that read what the graph computes from its inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import stof
from stof.options import Options

_LOWEST = np.float32(np.finfo(np.float32).min)
_HEAD = '<ir_version: 9, opset_import: ["" : 18]>\n'
_OPERANDS = "float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v"
# A stored window selects scores, and padding is added: a key that both forbid stands below one that one of them forbids.
_TWO_LEVELS = f"""g ({_OPERANDS}, int64[B, S] mask) => (float[B, 4, S, 8] y) {{
    sizes = Shape(q)  length = Slice(sizes, two, three)  last = Concat<axis=0>(length, length)
    kept = Slice(stored, origin, last, ends)
    kt = Transpose<perm=[0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    windowed = Where(kept, scores, lowest)
    m = Cast<to=1>(mask)  m4 = Unsqueeze(m, middle)
    padded = Sub(unit, m4)  added = Mul(padded, lowest)
    masked = Add(windowed, added)
    p = Softmax<axis=-1>(masked)
    y = MatMul(p, v)
}}"""
# Documents are numbered by counting where positions begin again.
_DOCUMENTS = f"""g ({_OPERANDS}, int64[B, S] position_ids) => (float[B, 4, S, 8] y) {{
    begins = Equal(position_ids, none)
    begin = Cast<to=7>(begins)
    document = CumSum(begin, axis)
    rows = Unsqueeze(document, rowaxes)  columns = Unsqueeze(document, middle)
    same = Equal(rows, columns)
    added = Where(same, null, lowest)
    kt = Transpose<perm=[0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    masked = Add(scores, added)
    p = Softmax<axis=-1>(masked)
    y = MatMul(p, v)
}}"""


def parsed(text: str) -> onnx.ModelProto:
    model = onnx.parser.parse_model(_HEAD + text)
    d = np.arange(64)[:, None] - np.arange(64)
    constants = {
        "two": np.array([2]),
        "three": np.array([3]),
        "origin": np.array([0, 0]),
        "ends": np.array([2, 3]),
        "middle": np.array([1, 2]),
        "rowaxes": np.array([1, 3]),
        "axis": np.array(1),
        "none": np.array(0),
        "stored": ((d >= 0) & (d < 9))[None, None],
        "lowest": _LOWEST,
        "null": np.float32(0),
        "unit": np.float32(1),
        "infinite": np.float32(-np.inf),
        "soft": np.float32(-10000),
        "lastaxis": np.array([-1]),
    }
    read = {i for n in model.graph.node for i in n.input}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items() if n in read)
    onnx.checker.check_model(model)
    return model


def run(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def operands(length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(length)
    return {n: rng.standard_normal((2, 4, length, 8)).astype(np.float32) for n in "qkv"}


def test_levels_that_a_stored_window_and_padding_make(tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(parsed(_TWO_LEVELS), str(path))
    (site,) = stof.optimize(path, written).sites
    assert site.mask == "k <= q and q - k <= 8 and pad[b, k]"
    mask = np.ones((2, 40), np.int64)
    mask[0, :12] = 0
    mask[1, -12:] = 0
    feeds = {**operands(40), "mask": mask}
    np.testing.assert_allclose(run(written, feeds), run(path, feeds), atol=5e-6)


def test_rows_without_a_key_may_differ_where_they_are_ignored(tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(parsed(_TWO_LEVELS), str(path))
    (site,) = stof.optimize(path, written, Options(ignore_empty_rows=True)).sites
    assert site.mask == "k <= q and q - k <= 8 and pad[b, k]"  # a band, no table
    mask = np.ones((2, 40), np.int64)
    mask[1, -12:] = 0
    feeds = {**operands(40), "mask": mask}
    kept = np.ones((2, 40), bool)
    kept[1, -4:] = False  # their windows are padding alone
    difference = np.abs(run(path, feeds) - run(written, feeds)).max(axis=(1, 3))
    assert difference[kept].max() < 5e-6


def test_documents_that_the_graph_counts(tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    onnx.save(parsed(_DOCUMENTS), str(path))
    (site,) = stof.optimize(path, written).sites
    assert site.mask == "segment_k[b, k] == segment_q[b, q]"
    positions = np.array([[*range(5), *range(20), *range(12)], [*range(30), *range(7)]])
    feeds = {**operands(37), "position_ids": positions}
    assert np.abs(run(path, feeds) - run(written, feeds)).max() < 5e-6
    # The documents matter: with one document the answer is another.
    other = run(written, {**feeds, "position_ids": np.arange(37)[None].repeat(2, 0)})
    assert np.abs(other - run(written, feeds)).max() > 1e-2


# One mask for padding, and what follows from a row of it without any key.
_PADDED = f"""g ({_OPERANDS}, int64[B, S] mask) => (float[B, 4, S, 8] y) {{
    m = Cast<to=9>(mask)  m4 = Unsqueeze(m, middle)
    f = Cast<to=1>(m4)
    kt = Transpose<perm=[0, 1, 3, 2]>(k)
    scores = MatMul(q, kt)
    %s
    y = MatMul(weights, v)
}}"""
_SOFTMAX = "  weights = Softmax<axis=-1>(masked)"
NO_KEYS = {
    "lowest": ("added = Where(m4, null, lowest)  masked = Add(scores, added)" + _SOFTMAX, "mean"),
    "selected": ("masked = Where(m4, scores, lowest)" + _SOFTMAX, "mean"),
    "-inf": ("masked = Where(m4, scores, infinite)" + _SOFTMAX, "nan"),
    "-inf, guarded": (
        "masked = Where(m4, scores, infinite)  p = Softmax<axis=-1>(masked)  bad = IsNaN(p)  weights = Where(bad, null, p)",
        "zero",
    ),
    "-10000": ("n = Sub(unit, f)  added = Mul(n, soft)  masked = Add(scores, added)" + _SOFTMAX, "all"),
}


@pytest.mark.parametrize("form", NO_KEYS)
def test_a_row_of_the_batch_without_any_key(form: str, tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    body, policy = NO_KEYS[form]
    onnx.save(parsed(_PADDED % body), str(path))
    report = stof.optimize(path, written)
    (site,) = report.sites
    assert (site.mask, site.empty_rows) == ("pad[b, k]", policy)
    assert report.verification is not None
    assert any("B 4" in c.what for c in report.verification.comparisons) == (policy != "all")
    feeds = {**operands(21), "mask": np.ones((2, 21), np.int64)}
    feeds["mask"][1] = 0
    wanted, found = run(path, feeds), run(written, feeds)
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    assert np.isnan(wanted[1]).all() == (policy == "nan")
    # -10000 leaves three digits of the scores that it is added to.
    np.testing.assert_allclose(found, wanted, atol=5e-3 if policy == "all" else 5e-6, rtol=0)


def test_a_graph_that_divides_by_the_number_of_keys_is_given_one(tmp_path: Path) -> None:
    path, written = tmp_path / "model.onnx", tmp_path / "out.onnx"
    text = (_PADDED % NO_KEYS["lowest"][0]).replace("(float[B, 4, S, 8] y)", "(float[B, 4, S, 8] y, int64[B, S] share)")
    text = text.replace(
        "y = MatMul", "count = ReduceSum<keepdims=1>(mask, lastaxis)  share = Div(mask, count)\n y = MatMul"
    )
    onnx.save(parsed(text), str(path))
    report = stof.optimize(path, written)  # a quotient by 0 ends the process
    assert report.replaced == 1
    assert report.verification is not None
    assert not report.verification.failures
