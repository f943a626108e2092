# SPDX-License-Identifier: Apache-2.0
"""Numbers of keys and flags that masks read: what they are when nobody expects them, in checks and in what is written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper

import stof
from stof.execution.case import Case, Counts, Padding
from stof.execution.inputs import InputMaker
from stof.options import Options
from stof.symbolic import Symbolic
from stof.verification.verifier import Verifier

_OPERANDS = "float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v"
_HEAD = """
    shape = Shape <start = 2, end = 3> (q)
    n = Squeeze (shape)
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    zeros = Constant <value = int64[1] {0}> ()
    ones = Constant <value = int64[1] {1}> ()
    after = Constant <value = int64[3] {1, 2, 3}> ()
    i = Range (zero, n, one)
    rows = Unsqueeze (i, ones)
    columns = Unsqueeze (i, zeros)
    distance = Sub (rows, columns)
    causal = LessOrEqual (columns, rows)
    none = Constant <value = float {0}> ()
    soft = Constant <value = float {-10000.0}> ()
    lowest = Constant <value = float {-3.4028234663852886e38}> ()
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    scores = MatMul (q, kt)
"""
_TAIL = """
    weights = Softmax <axis = -1> (masked)
    y = MatMul (weights, v)
"""
_REPLACING = "first = Where (own, scores, soft) masked = Where (causal, first, lowest)"
_ADDING = "bias = Where (own, none, soft) first = Add (scores, bias) masked = Where (causal, first, lowest)"
_ALONE = "both = And (own, causal) masked = Where (both, scores, lowest)"
# An input, what it says of a pair, and values of it that leave rows without a key.
_KINDS = {
    "a number for each batch": (
        "int64[B] x",
        "each = Unsqueeze (x, after) own = Less (columns, each)",
        [np.array([3, 0]), np.array([-2, 3]), np.array([40, 1])],
    ),
    "a window": ("int64 x", "own = Less (distance, x)", [np.array(0), np.array(-3), np.array(40)]),
    "a flag": ("bool x", "own = Identity (x)", [np.array(False), np.array(True)]),
    "a flag for each batch": (
        "bool[B] x",
        "own = Unsqueeze (x, after)",
        [np.array([False, True]), np.array([True, False])],
    ),
    "a number that is a flag": ("int32 x", "own = Cast <to = 9> (x)", [np.array(0, np.int32), np.array(-1, np.int32)]),
}


def written(text: str, path: Path, opset: int = 18) -> onnx.ModelProto:
    imports = f'"" : {opset}, "com.microsoft" : 1'
    model = onnx.parser.parse_model(f"<ir_version: 9, opset_import: [{imports}]>\n{text}")
    onnx.save(model, path)
    return model


def run(path: Path, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, feeds)[0])


def largest_difference(path: Path, other: Path, kind: str) -> float:
    found = 0.0
    rng = np.random.default_rng(0)
    for value in _KINDS[kind][2]:
        feeds = {n: rng.standard_normal((2, 4, 19, 8)).astype(np.float32) for n in "qkv"}
        first, second = (run(p, {**feeds, "x": value}) for p in (path, other))
        found = max(found, float(np.abs(first - second).max()))
    return found


@pytest.mark.parametrize("kind", _KINDS)
def test_what_rows_without_a_key_give_is_seen(kind: str, tmp_path: Path) -> None:
    declared, nodes, _ = _KINDS[kind]
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    # In a row that the weaker mask forbids whole, the stronger one still tells keys apart.
    written(f"g ({_OPERANDS}, {declared}) => (float[B, 4, S, 8] y) {{{_HEAD}{nodes} {_REPLACING}{_TAIL}}}", path)
    (site,) = stof.optimize(path, out).sites
    assert "lengths[b]" in site.mask
    assert any("attends to those of 'k <= q'" in note for note in site.notes)
    assert largest_difference(path, out, kind) < 5e-6
    # Where the weaker one is added it can stay a bias, unless it is a single number.
    written(f"g ({_OPERANDS}, {declared}) => (float[B, 4, S, 8] y) {{{_HEAD}{nodes} {_ADDING}{_TAIL}}}", path)
    (site,) = stof.optimize(path, out).sites
    assert site.replaced == ("flag" not in kind or "each" in kind)
    if site.replaced:
        assert site.mask == "k <= q"
        assert largest_difference(path, out, kind) < 2e-3  # the sum with -10000 has no more digits
    # With one fill the rows' answer is known.
    written(f"g ({_OPERANDS}, {declared}) => (float[B, 4, S, 8] y) {{{_HEAD}{nodes} {_ALONE}{_TAIL}}}", path)
    (site,) = stof.optimize(path, out).sites
    assert "lengths[b]" in site.mask
    assert site.empty_rows == "mean"
    assert largest_difference(path, out, kind) < 5e-6


def test_defaults_that_a_caller_may_override_are_drawn(tmp_path: Path) -> None:
    """With the stored window of 3 no row is without a key."""
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    for masks, words in ((_REPLACING, "a query that the mask leaves no key"), (_ALONE, "")):
        nodes = f"{_HEAD} own = Less (distance, x) {masks}{_TAIL}"
        model = written(f"g ({_OPERANDS}, int64 x) => (float[B, 4, S, 8] y) {{{nodes}}}", path)
        model.graph.initializer.append(numpy_helper.from_array(np.array(3), "x"))
        onnx.save(model, path)
        (site,) = stof.optimize(path, out).sites
        assert site.replaced
        assert not words or any(words in note for note in site.notes)
        assert largest_difference(path, out, "a window") < 5e-6


def drawn(model: onnx.ModelProto, counts: Counts, fused: bool = False) -> list[np.ndarray]:
    symbolic = Symbolic(model)
    shape = symbolic.shape("q")
    assert shape is not None
    maker = InputMaker(model, symbolic, frozenset(), {"x": shape[-2]}, fused=model.graph if fused else None)
    cases = [Case(4, 9, Padding.RIGHT, counts=counts), Case(1, 6, Padding.NONE, counts=counts)]
    return [maker.draw(c, np.random.default_rng(s))["x"] for c in cases for s in range(20)]


def test_numbers_of_keys_are_drawn(tmp_path: Path) -> None:
    model = written(f"g ({_OPERANDS}, int64[B] x) => (float[B, 4, S, 8] y) {{ y = Identity (q) }}", tmp_path / "m.onnx")
    usual = np.concatenate(drawn(model, Counts.USUAL))
    assert (usual.min(), usual.max()) == (1, 9)
    for kind, holds in (
        (Counts.NONE, lambda x, most: x == 0),
        (Counts.NEGATIVE, lambda x, most: x < 0),
        (Counts.BEYOND, lambda x, most: x > most),
    ):
        first = drawn(model, kind)
        for array in first:
            most = 9 if len(array) == 4 else 6
            assert holds(array[::-1][::2], most).all()
            assert ((array[::-1][1::2] >= 1) & (array[::-1][1::2] <= most)).all()
        assert all(np.array_equal(a, b) for a, b in zip(first, drawn(model, kind), strict=True))


def test_flags_are_drawn_both_ways(tmp_path: Path) -> None:
    model = written(f"g ({_OPERANDS}, bool[B] x) => (float[B, 4, S, 8] y) {{ y = Identity (q) }}", tmp_path / "m.onnx")
    assert all(x.all() for x in drawn(model, Counts.USUAL))
    assert all(x.tolist() in ([True, False, True, False], [False]) for x in drawn(model, Counts.NONE))


def test_indices_of_tables_are_counted_from_both_ends(tmp_path: Path) -> None:
    nodes = """
        kept = Constant <value = bool[6] {1, 0, 1, 1, 0, 1}> ()
        found = Gather (kept, x)
        middle = Constant <value = int64[2] {1, 2}> ()
        own = Unsqueeze (found, middle)"""
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    model = written(f"g ({_OPERANDS}, int64[B, S] x) => (float[B, 4, S, 8] y) {{{_HEAD}{nodes} {_ALONE}{_TAIL}}}", path)
    given = frozenset({"x"})
    maker = InputMaker(model, Symbolic(model), frozenset(), segments=given, looking=given)
    ids = maker.draw(Case(4, 19, Padding.RIGHT), np.random.default_rng(0))["x"]
    assert ids.min() < 0 <= ids.max()
    assert -6 <= ids.min() <= ids.max() < 6
    (site,) = stof.optimize(path, out).sites
    assert site.mask == "k <= q and table0[segment_k[b, k] % 6]"
    rng = np.random.default_rng(0)
    feeds = {n: rng.standard_normal((2, 4, 19, 8)).astype(np.float32) for n in "qkv"}
    feeds["x"] = rng.integers(-6, 6, (2, 19))
    assert np.abs(run(path, feeds) - run(out, feeds)).max() < 5e-6


_FUSED = {
    "GroupQueryAttention": (
        "float[B, S, 32] q, float[B, S, 32] k, float[B, S, 32] v, int32[B] x",
        """shape = Shape <start = 1, end = 2> (q)  total = Cast <to = 6> (shape)
        y, present, values = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 4> (q, k, v, , , x, total)""",
        (0, 8),
    ),
    "MultiHeadAttention": (
        "float[B, S, 32] q, float[B, S, 32] k, float[B, S, 32] v, int32[B] x",
        "y = com.microsoft.MultiHeadAttention <num_heads = 4, mask_filter_value = -1e30> (q, k, v, , x)",
        (0, 20),
    ),
    "Attention": (
        "float[B, 4, S, 8] q, float[B, 4, S, 8] k, float[B, 4, S, 8] v, int64[B] x",
        "y = Attention (q, k, v, , , , x)",
        (0, 9),
    ),
    "what computes its numbers": (
        "float[B, S, 32] q, float[B, S, 32] k, float[B, S, 32] v, int32[B] x",
        """unit = Constant <value = int32[1] {1}> ()  last = Sub (x, unit)
        shape = Shape <start = 1, end = 2> (q)  total = Cast <to = 6> (shape)
        y, present, values = com.microsoft.GroupQueryAttention <num_heads = 4, kv_num_heads = 4> (q, k, v, , , last, total)""",
        (1, 9),
    ),
}


@pytest.mark.parametrize("name", _FUSED)
def test_fused_nodes_get_numbers_that_they_take(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, nodes, (least, most) = _FUSED[name]
    path, out = tmp_path / "model.onnx", tmp_path / "out.onnx"
    rank = inputs.split("]")[0].count(",")
    result = "float[B, S, 32] y" if rank == 2 else "float[B, 4, S, 8] y"
    written(f"g ({inputs}) => ({result}) {{ {nodes} }}", path, 24 if name == "Attention" else 18)
    seen: list[np.ndarray] = []
    draw = InputMaker.draw

    def watched(self: InputMaker, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
        feeds = draw(self, case, rng)
        if self is verifiers[0].inputs.maker and case.length == 9:
            seen.append(feeds["x"])
        return feeds

    verifiers: list[Verifier] = []
    make = Verifier.__init__

    def kept(self: Verifier, *args: object, **given: object) -> None:
        verifiers.append(self)
        make(self, *args, **given)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(Verifier, "__init__", kept)
        patch.setattr(InputMaker, "draw", lambda self, *a: watched(self, *a) if verifiers else draw(self, *a))
        report = stof.optimize(path, out, Options(verify_budget=1e9))  # however long the cases take
    (site,) = report.sites
    assert "lengths[b]" in site.mask
    assert report.verification is not None
    assert report.verification.complete
    found = np.concatenate(seen)
    assert least <= found.min() <= max(least, 0)
    assert found.max() <= most
    # Every case ran: of what a node refuses there is none.
    assert not report.verification.skipped
    assert len(report.verification.cases) == len(verifiers[0].cases)
