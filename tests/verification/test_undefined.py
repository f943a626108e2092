# SPDX-License-Identifier: Apache-2.0
"""NaN that queries without a key carry into the next layer of the original: what verification compares then, and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import stof
from stof import cli
from stof.attention.checks.site_comparison import OperatorCall, compare_site, site_exactly
from stof.execution.case import Case, Padding
from stof.mask.site import AttentionSite, Layout, MaskTerm, Operand, TermKind
from stof.options import Options
from stof.verification.compare import compare_outputs, find_undefined_outputs
from stof.verification.verifier import Verifier

_WINDOW = 6
# Each layer writes to the next one's queries, keys and values; ``pad`` is true where a key is padding.
_MASK = """sizes = Shape(x)
    length = Gather(sizes, one)
    at = Range(zero, length, one)
    column = Unsqueeze(at, first)
    row = Unsqueeze(at, second)
    after = Greater(column, row)
    distance = Sub(row, column)
    outside = Greater(distance, window)
    none = Or(after, outside)
    static = Where(none, lowest, null)
    padded = Unsqueeze(pad, middle)
    dynamic = Where(padded, lowest, null)
    mask = Add(static, dynamic)"""
_LAYER = """heads{i} = Reshape(x{i}, split)
    q{i} = Transpose<perm=[0, 2, 1, 3]>(heads{i})
    kt{i} = Transpose<perm=[0, 2, 3, 1]>(heads{i})
    products{i} = MatMul(q{i}, kt{i})
    scaled{i} = Mul(products{i}, scale)
    scores{i} = Add(scaled{i}, mask)
    weights{i} = Softmax<axis=-1>(scores{i})
    mixed{i} = MatMul(weights{i}, q{i})
    turned{i} = Transpose<perm=[0, 2, 1, 3]>(mixed{i})
    joined{i} = Reshape(turned{i}, join)
    x{j} = Add(joined{i}, x{i})"""


def layers(count: int) -> onnx.ModelProto:
    """So many layers of causal attention in a window beside padding, both of -inf."""
    rest = "\n    ".join(_LAYER.format(i=i, j=i + 1) for i in range(count))
    text = f"""<ir_version: 9, opset_import: ["" : 18]>
    g (float[B, S, 32] x, bool[B, S] pad) => (float[B, S, 32] x{count}) {{
    x0 = Identity(x)
    {_MASK}
    {rest}
    }}"""
    model = onnx.parser.parse_model(text)
    constants: dict[str, Any] = {"zero": np.int64(0), "one": np.int64(1), "window": np.int64(_WINDOW)}
    constants |= {"first": np.array([0]), "second": np.array([1]), "middle": np.array([1, 2])}
    constants |= {"lowest": np.float32(-np.inf), "null": np.float32(0), "scale": np.float32(0.3)}
    constants |= {"split": np.array([0, 0, 4, 8]), "join": np.array([0, 0, 32])}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items())
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "model.onnx"
    onnx.save(layers(2), str(found))
    return found


def test_what_the_original_alone_has_as_nan_is_accepted(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = path.with_name("report.json")
    assert cli.main([str(path), "--json", str(report)]) == 0
    text = capsys.readouterr().out
    assert "are NaN in the original alone in batch row 1" in text
    comparisons = json.loads(report.read_text())["verification"]["comparisons"]
    outputs = {c["what"]: c["coverage"] for c in comparisons if not c["site"]}
    hidden = {what: c for what, c in outputs.items() if c["undefined"]}
    assert hidden
    assert all("padded left" in what or "padded right" in what for what in hidden)
    assert all(0 not in c["rows"] for c in hidden.values())  # the first row of a batch is not padded
    (least,) = (c for what, c in outputs.items() if "padded by one key" in what)
    assert least["compared"] > 0
    assert least["nonfinite"] == least["undefined"] == 0
    # At sites the same elements are compared: with fp64 without forbidden keys.
    sites = [c["coverage"] for c in comparisons if c["site"]]
    assert len(sites) == 2
    assert all(c["undefined"] == c["ignored"] == 0 < c["compared"] for c in sites)


def test_every_finite_element_of_the_original_stays(path: Path) -> None:
    written = path.with_name("out.onnx")
    stof.optimize(path, written)
    options = ort.SessionOptions()
    stof.register(options)
    pad = np.zeros((3, 41), bool)
    pad[1, :13] = pad[2, 25:] = True
    feed = {"x": np.random.default_rng(4).standard_normal((3, 41, 32)).astype(np.float32), "pad": pad}
    providers = ["CPUExecutionProvider"]
    (wanted,) = ort.InferenceSession(str(path), providers=providers).run(None, feed)
    (found,) = ort.InferenceSession(str(written), options, providers=providers).run(None, feed)
    assert np.isnan(wanted).sum() > np.isnan(found).sum() > 0
    assert not np.isnan(found[np.isfinite(wanted)]).any()
    assert np.abs(found - wanted)[np.isfinite(wanted)].max() < 1e-5


def _add(model: onnx.ModelProto, nodes: list[onnx.NodeProto], **constants: np.ndarray) -> None:
    """Nodes behind the graph's output, which they read as ``right``."""
    output = model.graph.output[0].name
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name == output:
                node.output[i] = "right"
        for i, name in enumerate(node.input):
            if name == output:
                node.input[i] = "right"
    nodes[-1].output[0] = output
    model.graph.node.extend(nodes)
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items())


def _nan_in_the_first_row(model: onnx.ModelProto) -> None:
    """NaN in one element of every row of the batch, where the original is finite."""
    off = np.zeros((1, 1, 32), np.float32)
    off[..., 5] = np.nan
    _add(model, [helper.make_node("Add", ["right", "off"], ["y"])], off=off)


def _off(model: onnx.ModelProto) -> None:
    _add(model, [helper.make_node("Add", ["right", "off"], ["y"])], off=np.float32(1e-2))


def _off_in_padded_rows(model: onnx.ModelProto) -> None:
    """Rows of the batch that hold padding, of which the original has NaN alone in most inputs."""
    cast = helper.make_node("Cast", ["pad"], ["padding"], to=TensorProto.FLOAT)
    most = helper.make_node("ReduceMax", ["padding", "second"], ["any"], keepdims=1)
    wide = helper.make_node("Unsqueeze", ["any", "last"], ["wide"])
    scaled = helper.make_node("Mul", ["wide", "off"], ["added"])
    _add(
        model,
        [cast, most, wide, scaled, helper.make_node("Add", ["right", "added"], ["y"])],
        off=np.float32(1e-2),
        last=np.array([2]),
        second=np.array([1]),
    )


@pytest.mark.parametrize("spoil", [_nan_in_the_first_row, _off, _off_in_padded_rows])
def test_faults_are_not_hidden_by_it(
    spoil: Callable[[onnx.ModelProto], None],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = Verifier.run

    def spoiled(self: Verifier, original: Path, emitted: onnx.ModelProto, *rest: Any) -> Any:
        other = onnx.ModelProto()
        other.CopyFrom(emitted)
        spoil(other)
        return run(self, original, other, *rest)

    monkeypatch.setattr(Verifier, "run", spoiled)
    assert cli.main([str(path)]) == 2
    assert "verification failed" in capsys.readouterr().err
    assert not path.with_suffix(".stof.onnx").exists()


_PADDED = Case(2, 9, Padding.RIGHT)


def _compared(original: np.ndarray, found: np.ndarray, undefined: bool) -> Any:
    return compare_outputs(_PADDED, 1e-6, "y", original, [original], found, undefined=undefined)


def test_elements_of_an_output() -> None:
    original = np.random.default_rng(0).standard_normal((2, 9, 16)).astype(np.float32)
    found = original.copy()
    original[1, 3:] = np.nan
    found[1, 5] = np.nan
    assert not _compared(original, found, False).ok
    accepted = _compared(original, found, True)
    assert accepted.ok
    assert (accepted.coverage.compared, accepted.coverage.nonfinite, accepted.coverage.undefined) == (192, 16, 80)
    assert accepted.coverage.elements == original.size
    assert accepted.coverage.rows == (1,)
    for value in (np.nan, np.inf):
        other = found.copy()
        other[0, 2, 7] = value
        refused = _compared(original, other, True)
        assert not refused.ok
        assert "in 1 of 288 elements, first at (0, 2, 7)" in refused.detail
    infinite = original.copy()
    infinite[1, 4] = np.inf  # says something, where NaN does not
    assert not _compared(infinite, found, True).ok


def test_an_output_of_which_no_case_compares_most() -> None:
    original = np.random.default_rng(0).standard_normal((2, 9, 16)).astype(np.float32)
    found, half = original.copy(), original.copy()
    half[1] = np.nan
    hidden, seen = _compared(half, found, True), _compared(original, found, True)
    assert hidden.ok
    (failure,) = find_undefined_outputs([[hidden, seen], [hidden, seen]], ["y", "z"])
    assert failure.what == "output 'y'"
    assert not failure.ok
    assert find_undefined_outputs([[hidden], [seen]], ["y"]) == []


def _site(mask: np.ndarray, fill: float, odd: str = "kv") -> tuple[AttentionSite, dict[str, np.ndarray]]:
    """A site of two heads over 12 keys, of which the last three hold NaN and padding forbids them."""
    rng = np.random.default_rng(8)
    q, k, v = (rng.standard_normal((2, 2, 12, 8)).astype(np.float32) for _ in range(3))
    for name, array in (("k", k), ("v", v)):
        if name in odd:
            array[1, :, 9:] = np.nan
    added = np.where(mask, np.float32(0), np.float32(fill))
    operands = [Operand(n, Layout.BHSD) for n in "qkv"]
    term = MaskTerm(TermKind.ADD, "mask")
    site = AttentionSite(
        name="s",
        index=0,
        softmax="softmax",
        query=operands[0],
        key=operands[1],
        value=operands[2],
        output="y",
        output_layout=Layout.BHSD,
        num_heads=2,
        kv_num_heads=2,
        head_size=8,
        value_head_size=8,
        scale=0.35,
        dtype=TensorProto.FLOAT,
        terms=(term,),
    )
    scores = np.einsum("bhsd,bhtd->bhst", q, k) * np.float32(0.35) + added
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    return site, {"q": q, "k": k, "v": v, "mask": added, "y": np.einsum("bhst,bhtd->bhsd", weights, v)}


def _keys() -> tuple[np.ndarray, np.ndarray]:
    pad = np.ones((2, 12), bool)
    pad[1, 9:] = False
    at = np.arange(12)
    return pad, ((at[None] <= at[:, None]) & pad[:, None, :])[:, None]


@pytest.mark.parametrize("odd", ["k", "v", "kv"])
@pytest.mark.parametrize("fill", [-np.inf, float(np.finfo(np.float32).min), -10000.0])
def test_a_site_whose_forbidden_keys_hold_nan(fill: float, odd: str) -> None:
    pad, mask = _keys()
    site, known = _site(mask, fill, odd)
    assert np.isnan(known["y"][1]).all()
    assert np.isfinite(known["y"][0]).all()
    exact = site_exactly(site, known)
    assert np.isfinite(exact.output).all()
    assert exact.leaks[1].all()
    assert not exact.leaks[0].any()
    plain = {**known, **{n: np.nan_to_num(known[n]) for n in odd}}
    np.testing.assert_allclose(exact.output, site_exactly(site, plain).output, rtol=1e-12)

    def compared(expression: str) -> Any:
        attributes = {"mask": expression, "operands": "pad", "scale": 0.35, "empty_rows": "nan"}
        node = helper.make_node("StofAttention", ["q", "k", "v", "pad"], ["y"], domain="stof", **attributes)
        return compare_site(
            site, [OperatorCall(node, ["q", "k", "v", "pad"])], {**known, "pad": pad}, known["y"], False
        )

    right = compared("k <= q and pad[b, k]")
    assert right.ok, right
    # Values of one tile are all multiplied with their weights, also with 0.
    assert right.coverage.compared == known["y"].size // (1 if odd == "k" else 2)
    if odd != "k":
        return
    wrong = compared("k <= q and q - k <= 5 and pad[b, k]")  # in the rows that are NaN in the original, too
    assert not wrong.ok
    assert not compared("k <= q").ok  # reads the keys that padding forbids


def test_nan_of_an_allowed_key_is_none_of_it() -> None:
    _, mask = _keys()
    site, known = _site(mask, -np.inf)
    known["k"][0, 0, 2] = np.nan
    exact = site_exactly(site, known)
    assert np.isnan(exact.output[0, 0, 2:]).all()
    assert np.isfinite(exact.output[0, 0, :2]).all()
    assert np.isfinite(exact.output[0, 1]).all()


def test_one_layer_has_nothing_of_it(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(layers(1), str(path))
    report = stof.optimize(path, tmp_path / "out.onnx", Options(verify_budget=5))
    assert report.verification is not None
    assert not any(c.coverage.undefined for c in report.verification.comparisons)
    assert any(c.coverage.nonfinite for c in report.verification.comparisons)
