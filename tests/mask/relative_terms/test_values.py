# SPDX-License-Identifier: Apache-2.0
"""Weights times rows by relative position beside the values, in the ways in which models spell it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper, parser
from zoo_graphs import fill_graph

from stof.attention.describe import site_describer
from stof.attention.describe.site_describer import DescribedSite, SiteDescriber
from stof.attention.emit import Rewrite, emit
from stof.attention.expand.expanders import make_working_copy
from stof.attention.subgraphs import Scope, find_scopes
from stof.mask.expression import MaskExpression
from stof.mask.relative_terms.narrow import narrow_tables
from stof.mask.site import EmptyRows, RowRange
from stof.options import Options

_HEADS, _SIZE, _REACH = 3, 8, 4
_WIDTH = _HEADS * _SIZE

_HEAD = """
    y = Concat <axis = 1> (mem, x)
    S = Shape <start = 1, end = 2> (x)  T = Shape <start = 1, end = 2> (y)
    q0 = MatMul (x, wq)  k0 = MatMul (y, wk)  v0 = MatMul (y, wv)
    q1 = Reshape (q0, heads)  k1 = Reshape (k0, heads)  v1 = Reshape (v0, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)  k = Transpose <perm = [0, 2, 3, 1]> (k1)
    value = Transpose <perm = [0, 2, 1, 3]> (v1)
    ac = MatMul (q, k)  scores = Mul (ac, scale)  weights = Softmax <axis = -1> (scores)  o = MatMul (weights, value)
    s = Squeeze (S)  t = Squeeze (T)  past = Sub (t, s)
    i0 = Range (zero, s, one)  i1 = Add (i0, past)  i = Unsqueeze (i1, ones)  j = Range (zero, t, one)
    distance = Sub (j, i)
"""
_TAIL = " sum = Add (o, added) o1 = Transpose <perm = [0, 2, 1, 3]> (sum) out = Reshape (o1, flat) "
_PAIRS = """
    low = Max (distance, least)  high = Min (low, most)  rows = Add (high, reach)  pairs = Gather (table, rows)
"""
SPELLINGS = {
    # Rows for each pair, a product for each query.
    "gather": _PAIRS + """
    w1 = Transpose <perm = [2, 0, 1, 3]> (weights)  shape1 = Concat <axis = 0> (S, minus_one, T)
    w2 = Reshape (w1, shape1)  p = MatMul (w2, pairs)  p1 = Reshape (p, split)
    added = Transpose <perm = [1, 2, 0, 3]> (p1)
    """,
    "Einsum": _PAIRS + """
    added = Einsum <equation = "bhqk,qkd->bhqd"> (weights, pairs)
    """,
    "half of them": _PAIRS + """
    p = Einsum <equation = "bhqk,qkd->bhqd"> (weights, pairs)  added = Mul (p, half)
    """,
}  # fmt: skip


def model_of(spelling: str) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[2,S,{_WIDTH}] x, float[2,P,{_WIDTH}] mem) => (float[2,S,{_WIDTH}] out) {{ {_HEAD} {spelling} {_TAIL} }}"""
    model: onnx.ModelProto = parser.parse_model(text)
    rng = np.random.default_rng(8)
    constants: dict[str, np.ndarray] = {
        **{n: rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32) * 0.3 for n in ("wq", "wk", "wv")},
        "table": rng.standard_normal((2 * _REACH + 1, _SIZE)).astype(np.float32),
        "scale": np.float32(_SIZE**-0.5),
        "half": np.float32(0.5),
        "heads": np.array([0, 0, _HEADS, _SIZE]),
        "flat": np.array([0, 0, _WIDTH]),
        "split": np.array([0, 2, _HEADS, _SIZE]),
        "minus_one": np.array([2 * _HEADS]),
        **{n: np.array(i) for n, i in {"zero": 0, "one": 1, "least": -_REACH, "most": _REACH, "reach": _REACH}.items()},
        "ones": np.array([1]),
    }
    read = {i for n in model.graph.node for i in n.input}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items() if n in read)
    return model


def describe(
    model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch, roles: frozenset[str] = frozenset({"relative_value"})
) -> tuple[Scope, DescribedSite]:
    monkeypatch.setattr(site_describer, "relative_roles", lambda: roles)
    scope = next(iter(find_scopes(make_working_copy(model))))
    (described,) = (SiteDescriber(scope.working.model, scope.symbolic, Options()).describe(s) for s in scope.sites)
    return scope, described


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    output: np.ndarray = session.run(["out"], feed)[0]
    return output


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(SPELLINGS[name])
    scope, described = describe(model, monkeypatch)
    assert described.mask is not None, described.reason
    (term,) = described.mask.relative_terms
    assert (term.role, term.heads) == ("relative_value", 1)
    assert term.table.factor == (0.5 if "half" in name else 1.0)
    for distance in range(-9, 10):  # the operator clamps
        row = term.index.evaluate({"k": 20 + distance, "q": 20, "S": 40, "T": 40, "P": 0})
        assert min(max(row, 0), 2 * _REACH) == min(max(distance, -_REACH), _REACH) + _REACH
    emitted = emit(scope.working.model, scope.symbolic, [Rewrite(described.site, described.mask)])
    assert not {"Softmax", "Einsum", "Range"} & {n.op_type for n in emitted.graph.node}
    rng = np.random.default_rng(5)
    for length, past in ((1, 0), (5, 3), (17, 0), (7, 40), (1, 9)):
        feed = {n: rng.standard_normal((2, s, _WIDTH)).astype(np.float32) for n, s in (("x", length), ("mem", past))}
        wanted = run(model, feed)
        np.testing.assert_allclose(run(emitted, feed), wanted, atol=2e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("added = Einsum", "extra = Sqrt (weights) e = Einsum"), "expected one MatMul with the values"),
        (("(weights, pairs)", "(weights, other)"), "no product with rows by relative position"),
        (("(weights, pairs)", "(squares, pairs)"), "no product with rows by relative position"),
    ],
    ids=["read elsewhere", "rows of the batch", "squared weights"],
)
def test_others_are_kept(change: tuple[str, str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to the result stays what it is, so the site stays as well."""
    spelling = SPELLINGS["Einsum"].replace(*change)
    if "other" in change[1]:
        of_batch = "f = Gather (x, zero) m = ReduceMax <keepdims = 0> (f) other = Mul (pairs, m) added ="
        spelling = spelling.replace("added =", of_batch)
    if "squares" in change[1]:
        spelling = spelling.replace("added =", "squares = Mul (weights, weights) added =")
    if "extra" in change[1]:
        spelling = spelling.replace("e = Einsum", "added = Einsum")
    model = model_of(spelling)
    if "extra" in change[1]:
        model.graph.output.append(helper.make_tensor_value_info("extra", onnx.TensorProto.FLOAT, None))
    monkeypatch.setattr(site_describer, "relative_roles", lambda: frozenset({"relative_value"}))
    scope = next(iter(find_scopes(make_working_copy(model))))
    describer = SiteDescriber(scope.working.model, scope.symbolic, Options())
    reasons = [describer.describe(site).reason for site in scope.sites] or [f.reason for f in scope.findings]
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_a_library_without_the_role_keeps_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    _, described = describe(model_of(SPELLINGS["gather"]), monkeypatch, frozenset({"relative_key"}))
    assert described.mask is None
    assert "take no relative_value" in described.reason


def test_rows_of_padded_tables_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of VITS, whose stored rows are padded with zeros: another index is refused."""
    model = fill_graph("relative/vits.torchscript.eager")
    _, described = describe(model, monkeypatch, frozenset({"relative_key", "relative_value"}))
    assert described.mask is not None, described.reason
    assert [t.table.is_padded for t in described.mask.relative_terms] == [True, True]


@pytest.mark.parametrize(
    ("policy", "is_narrowed"), [(EmptyRows.ZERO, True), (EmptyRows.NAN, True), (EmptyRows.MEAN, False)]
)
def test_fully_masked_rows_weigh_the_rows_of_all_keys(
    policy: EmptyRows, is_narrowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope, described = describe(model_of(SPELLINGS["Einsum"]), monkeypatch)
    assert described.mask is not None
    (term,) = described.mask.relative_terms
    term = replace(term, index=MaskExpression.parse_integer(f"k - q + {_REACH}"))
    window = MaskExpression.parse("abs(q - k) <= 2")
    mask = replace(described.mask, relative_terms=(term,), expression=window, empty_rows=policy)
    (narrowed,) = narrow_tables(scope.symbolic, described.site, mask).relative_terms
    assert narrowed.table.rows in ({None} if not is_narrowed else {None, RowRange(0, 0, _REACH, 2, 2)})
