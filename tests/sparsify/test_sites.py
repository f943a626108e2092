# SPDX-License-Identifier: Apache-2.0
"""Declared patterns on causal attention without a cache, through the whole optimizer, against fp64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import masks
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from test_patterns import KINDS, SIZE

import stof
from stof import pipeline
from stof.options import Options
from stof.report import Report
from stof.sparsify.spec import Clause, SparsitySpec

H, D = 8, 16


def primitive(*, mask: str = "causal", layers: int = 1) -> onnx.ModelProto:
    """Attention as primitive nodes; ``mask``: causal, padded (causal and a vector of real keys, or of padding), window, none."""
    infos = [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["B", H, "S", D]) for x in ("q", "k", "v")]
    if mask == "padded by numbers":
        infos.append(helper.make_tensor_value_info("real", TensorProto.FLOAT, ["B", 1, 1, "S"]))
    elif mask.startswith("padded"):
        infos.append(helper.make_tensor_value_info("real", TensorProto.BOOL, ["B", "S"]))
    make = helper.make_node
    nodes = [
        make("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        make("Shape", ["q"], ["size"], start=2, end=3),
        make("Squeeze", ["size"], ["n"]),
        make("Range", ["zero", "n", "one"], ["columns"]),
        make("Unsqueeze", ["columns", "axis"], ["rows"]),
        make("LessOrEqual", ["columns", "rows"], ["causal"]),
    ]
    condition = "causal"
    if mask.startswith("padded"):
        way = {"padded by numbers": [make("Cast", ["real"], ["real4"], to=TensorProto.BOOL)]}
        way["padded by a forbidding mask"] = [
            make("Not", ["real"], ["ok"]),
            make("Unsqueeze", ["ok", "axes"], ["real4"]),
        ]
        nodes += way.get(mask, [make("Unsqueeze", ["real", "axes"], ["real4"])])
        nodes.append(make("And", ["causal", "real4"], ["both"]))
        condition = "both"
    if mask == "window":
        nodes += [make("Sub", ["rows", "columns"], ["away"]), make("Less", ["away", "nine"], ["near"])]
        nodes.append(make("And", ["causal", "near"], ["both"]))
        condition = "both"
    nodes.append(make("Where", [condition, "nought", "low"], ["added"]))
    query = "q"
    for i in range(layers):
        nodes += [
            make("MatMul", [query, "kt"], [f"product{i}"]),
            make("Mul", [f"product{i}", "scale"], [f"scaled{i}"]),
            make("Add", [f"scaled{i}", "added"], [f"scores{i}"]),
            make("Softmax", [f"scaled{i}" if mask == "none" else f"scores{i}"], [f"w{i}"], name=f"softmax{i}", axis=-1),
            make("MatMul", [f"w{i}", "v"], [f"y{i}"]),
        ]
        query = f"y{i}"
    constants: dict[str, Any] = {
        "scale": np.float32(0.25),
        "zero": np.int64(0),
        "one": np.int64(1),
        "nine": np.int64(9),
    }
    constants |= {"axis": np.array([1]), "axes": np.array([1, 2]), "nought": np.float32(0), "low": np.float32(-1e30)}
    weights = [numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items()]
    output = helper.make_tensor_value_info(query, TensorProto.FLOAT, ["B", H, "S", D])
    graph = helper.make_graph(nodes, "g", infos, [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def fused(*, groups: int = H) -> onnx.ModelProto:
    """ONNX's Attention."""
    shapes = {"q": H, "k": groups, "v": groups}
    infos = [helper.make_tensor_value_info(x, TensorProto.FLOAT, ["B", n, "S", D]) for x, n in shapes.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", H, "S", D])
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="softmax0", is_causal=1)
    graph = helper.make_graph([node], "g", infos, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)


def optimized(model: onnx.ModelProto, folder: Path, spec: str, **options: Any) -> tuple[Report, onnx.ModelProto]:
    onnx.save(model, folder / "model.onnx")
    report = stof.optimize(folder / "model.onnx", folder / "out.onnx", Options(sparsify=spec, **options))
    return report, onnx.load(folder / "out.onnx")


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *, library: bool) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if library:
        stof.register(options)
    made = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.asarray(made.run(None, feeds)[0])


def draw(groups: int = H, batch: int = 2, size: int = SIZE) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    shapes = {"q": H, "k": groups, "v": groups}
    return {x: rng.standard_normal((batch, n, size, D)).astype(np.float32) for x, n in shapes.items()}


def exact(feeds: dict[str, np.ndarray], mask: np.ndarray) -> np.ndarray:
    """Attention [B, H, S, D] under a mask that broadcasts to [B, H, S, T]; rows without a key are left 0."""
    q, k, v = (feeds[x].astype(np.float64) for x in "qkv")
    k, v = (np.repeat(x, H // x.shape[1], axis=1) for x in (k, v))
    scores = np.where(mask, q @ k.swapaxes(2, 3) * 0.25, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
    return np.asarray(weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300) @ v)


@pytest.mark.parametrize(
    ("kind", "made"),
    [(k, f) for k, (_, m) in KINDS.items() for f in (primitive, fused) if len(m) == 1 or (len(m) == 4 and f is fused)],
)
def test_sites_against_fp64(
    kind: str, made: Callable[[], onnx.ModelProto], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator takes the pattern, or a bias applies it; either way it is the pattern, with the library and without."""
    pattern, mask = KINDS[kind]
    groups = 4
    model = primitive() if made is primitive else fused(groups=groups)
    monkeypatch.setattr(pipeline, "parse_spec", lambda text: SparsitySpec("test", (Clause(pattern),)))
    report, found = optimized(model, tmp_path, "test", verify=False)
    assert report.sparsity is not None
    assert report.sparsity.sparsified == bool(report.replaced)
    expected = masks.dense(H, SIZE)
    if report.replaced:
        expected = masks.to_query_heads(mask & np.tri(SIZE, dtype=bool), H)
    feeds = draw(H if made is primitive else groups)
    for library in (True, False):
        np.testing.assert_allclose(run(found, feeds, library=library), exact(feeds, expected), atol=3e-5, rtol=1e-4)


TAKEN = {
    "s2:local=3,stride=4,block=16": masks.s2(H, SIZE, 3, 4, 16),
    "s2:local=1,stride=3,block=64,homogeneous=1": masks.s2(H, SIZE, 1, 3, 64, homogeneous=True),
    "s2:local=2,stride=3,block=16,relative=1": masks.s2(H, SIZE, 2, 3, 16, relative=True),
    "s2:local=2,stride=16,block=16,dense_heads=2": masks.s2(H, SIZE, 2, 16, 16, dense_heads=2),
    "window=40,sink=7": masks.window(H, SIZE, 40, 7),
    'mask="q - k < 9 or k % 5 == 0"': (masks.window(H, SIZE, 9) | (np.arange(SIZE) % 5 == 0))
    & np.tri(SIZE, dtype=bool),
}


@pytest.mark.parametrize("spec", TAKEN)
@pytest.mark.parametrize("made", [primitive, fused])
def test_an_operator_takes_inline_patterns(spec: str, made: Callable[[], onnx.ModelProto], tmp_path: Path) -> None:
    """Verified, and right with the library and without."""
    report, found = optimized(made(), tmp_path, spec)
    assert [(r.replaced, r.reason) for r in report.sites] == [(True, "replaced")]
    assert report.sparsity is not None
    assert [(r.sparsified, r.is_by_bias) for r in report.sparsity.rows] == [(True, False)]
    assert "OUTPUTS CHANGE" in report.to_text().splitlines()[0]
    assert "StofAttention" in {n.op_type for n in found.graph.node}
    feeds = draw()
    for library in (True, False):
        np.testing.assert_allclose(run(found, feeds, library=library), exact(feeds, TAKEN[spec]), atol=3e-5, rtol=1e-4)


_S2, _SINKS = "s2:local=3,stride=4,block=16", "window=40,sink=7"


@pytest.mark.parametrize(
    ("made", "spec"),
    [
        ("padded", _SINKS),
        ("padded", "s2:local=2,stride=3,block=16,relative=1"),
        ("padded by numbers", _S2),
        ("padded by a forbidding mask", _S2),
    ],
)
def test_positions_count_from_the_first_token(made: str, spec: str, tmp_path: Path) -> None:
    """Each sequence of a padded batch gets what it gets alone: padding to the left, to the right, on both sides, none."""
    report, found = optimized(primitive(mask=made), tmp_path, spec)
    assert report.replaced == 1
    assert "pad sequences to the right" not in report.to_text()
    assert report.verification is not None
    assert report.verification.complete
    feeds = draw(batch=4)
    spans = [(0, SIZE), (131, SIZE), (0, 170), (17, 203)]
    real = np.stack([(np.arange(SIZE) >= a) & (np.arange(SIZE) < b) for a, b in spans])
    given = {"padded": real, "padded by numbers": real.astype(np.float32)[:, None, None]}.get(made, ~real)
    for library in (True, False):
        mine = run(found, {**feeds, "real": given}, library=library)
        for i, (a, b) in enumerate(spans):
            alone = {n: x[i : i + 1, :, a:b] for n, x in feeds.items()}
            mask = TAKEN[spec][..., : b - a, : b - a] & np.tri(b - a, dtype=bool)
            np.testing.assert_allclose(mine[i, :, a:b], exact(alone, mask)[0], atol=3e-5, rtol=1e-4)


def test_tables_count_from_the_first_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of blocks, and one of columns and diagonals, whose indices begin at the first token, too."""
    for kind in ("blocks of all heads", "columns"):
        pattern, mask = KINDS[kind]
        monkeypatch.setattr(pipeline, "parse_spec", lambda text, p=pattern: SparsitySpec("test", (Clause(p),)))
        report, found = optimized(primitive(mask="padded"), tmp_path, "test")
        assert report.sparsity is not None
        assert report.sparsity.sparsified == bool(report.replaced)
        assert "pad sequences to the right" not in report.to_text()
        feeds = draw()
        real = np.arange(SIZE)[None] >= np.array([0, 131])[:, None]
        for library in (True, False):
            mine = run(found, {**feeds, "real": real}, library=library)
            for i, a in enumerate((0, 131)):
                alone = {n: x[i : i + 1, :, a:] for n, x in feeds.items()}
                whole = masks.to_query_heads(mask, H) if report.replaced else masks.dense(H, SIZE)
                expected = exact(alone, whole[:, : SIZE - a, : SIZE - a] & np.tri(SIZE - a, dtype=bool))
                np.testing.assert_allclose(mine[i, :, a:], expected[0], atol=3e-5, rtol=1e-4)


def test_windows_do_not_depend_on_where_padding_is(tmp_path: Path) -> None:
    """Left padding moves queries and keys alike."""
    report, found = optimized(primitive(mask="padded"), tmp_path, "window=40")
    assert "pad sequences to the right" not in report.to_text()
    feeds = draw()
    real = np.arange(SIZE)[None] >= np.array([0, 130])[:, None]
    mask = masks.window(H, SIZE, 40) & real[:, None, None]
    rows = real[:, None, :, None] & np.ones((1, H, 1, D), bool)
    for library in (True, False):
        mine = run(found, {**feeds, "real": real}, library=library)
        np.testing.assert_allclose(mine[rows], exact(feeds, mask)[rows], atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("mask", ["window", "none"])
def test_other_masks_stay(mask: str, tmp_path: Path) -> None:
    report, _ = optimized(primitive(mask=mask), tmp_path, "window=4", verify=False)
    assert report.sparsity is not None
    (row,) = report.sparsity.rows
    assert not row.sparsified
    assert row.reason.startswith("its mask is no plain causal one")


def test_layers(tmp_path: Path) -> None:
    report, found = optimized(primitive(layers=3), tmp_path, "window=40,layers=1")
    assert report.sparsity is not None
    assert [r.sparsified for r in report.sparsity.rows] == [False, True, False]
    feeds = draw()
    wanted = dict(feeds)
    for mask in (masks.dense(H, SIZE), masks.window(H, SIZE, 40), masks.dense(H, SIZE)):
        wanted["q"] = exact(wanted, mask)
    np.testing.assert_allclose(run(found, feeds, library=True), wanted["q"], atol=5e-5, rtol=1e-4)


def test_what_is_skipped_stays_dense(tmp_path: Path) -> None:
    report, found = optimized(primitive(layers=2), tmp_path, "window=40", skip=("softmax1",), verify=False)
    assert report.sparsity is not None
    assert [(r.sparsified, r.reason) for r in report.sparsity.rows] == [(True, ""), (False, "left out by --skip")]
    feeds = draw()
    first = exact(feeds, masks.window(H, SIZE, 40))
    wanted = exact({**feeds, "q": first}, masks.dense(H, SIZE))
    np.testing.assert_allclose(run(found, feeds, library=True), wanted, atol=5e-5, rtol=1e-4)


def test_only_padded_patterns_may_change_rows_of_padding(tmp_path: Path) -> None:
    """A dense site beside one with a pattern keeps what its fully masked rows give."""
    report, found = optimized(primitive(mask="padded", layers=2), tmp_path, "window=40,layers=1")
    first, second = report.sites
    assert (first.replaced, second.replaced) == (True, True)
    assert (first.empty_rows, second.empty_rows) == ("mean", "zero")
    nodes = [n for n in found.graph.node if n.op_type == "StofAttention"]
    policies = [helper.get_node_attr_value(n, "empty_rows") for n in nodes]
    assert policies == [b"mean", b"zero"]
    everywhere, _ = optimized(
        primitive(mask="padded", layers=2), tmp_path, "window=40,layers=1", ignore_empty_rows=True
    )
    assert [s.empty_rows for s in everywhere.sites] == ["zero", "zero"]
