# SPDX-License-Identifier: Apache-2.0
"""Relative terms of queries, or keys, that are 0 under a condition: they are no products with the attention's own vectors."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import numpy_helper, parser

from stof.attention.describe import site_describer
from stof.attention.describe.site_describer import DescribedSite, SiteDescriber
from stof.attention.emit import Rewrite, emit
from stof.attention.expand.expanders import make_working_copy
from stof.attention.subgraphs import Scope, find_scopes
from stof.mask.site import NoteReason
from stof.options import Options
from stof.symbolic.algebra.domain import Domain

_HEADS, _SIZE, _REACH, _TOKEN = 3, 8, 4, 103
_WIDTH = _HEADS * _SIZE
_ROLES = frozenset({"relative_key", "relative_query", "relative_value"})

_HEAD = """
    Ss = Shape <start = 1, end = 2> (x)  S = Squeeze (Ss)
    q0 = MatMul (x, wq)  k0 = MatMul (x, wk)  v0 = MatMul (x, wv)
    q1 = Reshape (q0, heads)  k1 = Reshape (k0, heads)  v1 = Reshape (v0, heads)
    q = Transpose <perm = [0, 2, 1, 3]> (q1)  k = Transpose <perm = [0, 2, 1, 3]> (k1)
    value = Transpose <perm = [0, 2, 1, 3]> (v1)
    j = Range (zero, S, one)  i = Unsqueeze (j, ones)  distance = Sub (j, i)
    low = Max (distance, least)  high = Min (low, most)  rows = Add (high, reach)  pairs = Gather (table, rows)
    is_token = Equal (ids, token)  is_masked = Unsqueeze (is_token, around)
    is_loud = Greater (noise, nothing)  is_opaque = Unsqueeze (is_loud, around)
    is_late = GreaterOrEqual (j, late)  is_behind = Unsqueeze (is_late, last)
    is_far = Greater (distance, ones)
"""
_BY_QUERIES = ' bd = Einsum <equation = "bhqd,qkd->bhqk"> (qr, pairs) '
_BY_KEYS = ' bd = Einsum <equation = "bhkd,qkd->bhqk"> (kr, pairs) '
_TAIL = """
    kt = Transpose <perm = [0, 1, 3, 2]> (KEYS)  ac = MatMul (QUERIES, kt)
    sum = Add (ac, TERM)  scores = Mul (sum, scale)  weights = Softmax <axis = -1> (scores)
    o = MatMul (weights, value)  o1 = Transpose <perm = [0, 2, 1, 3]> (o)  out = Reshape (o1, flat)
"""
_MASKED_QUERIES = " qr = Where (is_masked, nothing, q) "


def _tail(queries: str = "q", keys: str = "k", term: str = "bd") -> str:
    return _TAIL.replace("QUERIES", queries).replace("KEYS", keys).replace("TERM", term)


STAY = {
    "queries of a token": _MASKED_QUERIES + _BY_QUERIES + _tail(),
    "queries of other tokens": " qr = Where (is_masked, q, nothing) " + _BY_QUERIES + _tail(),
    "queries where a float input is positive": " qr = Where (is_opaque, nothing, q) " + _BY_QUERIES + _tail(),
    "queries behind all lengths that run": " qr = Where (is_behind, nothing, q) " + _BY_QUERIES + _tail(),
    "keys of a token": " kr = Where (is_masked, nothing, k) " + _BY_KEYS + _tail(),
    "the attention's queries alone": " qr = Identity (q) qa = Where (is_masked, nothing, q) "
    + _BY_QUERIES
    + _tail("qa"),
    "the attention's keys alone": " kr = Identity (k) ka = Where (is_masked, nothing, k) "
    + _BY_KEYS
    + _tail("q", "ka"),
    "the product of a token": " qr = Identity (q) "
    + _BY_QUERIES
    + " bm = Where (is_masked, nothing, bd) "
    + _tail(term="bm"),
    "the product behind all lengths that run": " qr = Identity (q) "
    + _BY_QUERIES
    + " bm = Where (is_behind, nothing, bd) "
    + _tail(term="bm"),
    "the product of far keys": " qr = Identity (q) "
    + _BY_QUERIES
    + " bm = Where (is_far, nothing, bd) "
    + _tail(term="bm"),
}
BECOME = {
    "queries": (" qr = Identity (q) " + _BY_QUERIES + _tail(), "relative_key"),
    "keys": (" kr = Identity (k) " + _BY_KEYS + _tail(), "relative_query"),
    "queries under the condition of the attention's": (_MASKED_QUERIES + _BY_QUERIES + _tail("qr"), "relative_key"),
}


def model_of(body: str) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[B,S,{_WIDTH}] x, int64[B,S] ids, float[B,S] noise) => (float[B,S,{_WIDTH}] out) {{ {_HEAD} {body} }}"""
    model: onnx.ModelProto = parser.parse_model(text)
    rng = np.random.default_rng(8)
    constants: dict[str, np.ndarray] = {
        **{n: rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32) * 0.3 for n in ("wq", "wk", "wv")},
        "table": rng.standard_normal((2 * _REACH + 1, _SIZE)).astype(np.float32),
        "scale": np.float32(_SIZE**-0.5),
        "nothing": np.float32(0),
        "heads": np.array([0, 0, _HEADS, _SIZE]),
        "flat": np.array([0, 0, _WIDTH]),
        "around": np.array([1, 3]),
        "last": np.array([1]),
        "late": np.array(100_000),
        "token": np.array(_TOKEN),
        "ones": np.array([1]),
        **{n: np.array(i) for n, i in {"zero": 0, "one": 1, "reach": _REACH, "most": _REACH, "least": -_REACH}.items()},
    }
    read = {i for n in model.graph.node for i in n.input}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items() if n in read)
    return model


def describe(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> tuple[Scope, DescribedSite]:
    monkeypatch.setattr(site_describer, "relative_roles", lambda: _ROLES)
    scope = next(iter(find_scopes(make_working_copy(model))))
    (described,) = (SiteDescriber(scope.working.model, scope.symbolic, Options()).describe(s) for s in scope.sites)
    return scope, described


def run(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> np.ndarray:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    output: np.ndarray = session.run(["out"], feed)[0]
    return output


def compare(model: onnx.ModelProto, scope: Scope, described: DescribedSite) -> None:
    """Compares results of the emitted graph with the model's, for texts with the token and without."""
    assert described.mask is not None, described.reason
    emitted = emit(scope.working.model, scope.symbolic, [Rewrite(described.site, described.mask)])
    rng = np.random.default_rng(5)
    for batch, length in ((1, 1), (2, 5), (3, 17)):
        feed = {
            "x": rng.standard_normal((batch, length, _WIDTH)).astype(np.float32),
            "ids": rng.choice([_TOKEN, 7], (batch, length)),
            "noise": rng.standard_normal((batch, length)).astype(np.float32),
        }
        wanted = run(model, feed)
        np.testing.assert_allclose(run(emitted, feed), wanted, atol=2e-5 * float(np.abs(wanted).max()))


@pytest.mark.parametrize("name", STAY)
def test_terms_of_other_vectors_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(STAY[name])
    scope, described = describe(model, monkeypatch)
    assert described.mask is not None, described.reason
    assert described.mask.relative_terms == ()
    (bias,) = described.mask.bias
    notes = [n for n in described.mask.notes if n.reason is NoteReason.RELATIVE_TERM and n.tensor == bias.tensor]
    assert len(notes) == 1
    assert "is no product with rows by relative position: " in notes[0].text
    compare(model, scope, described)


@pytest.mark.parametrize("name", BECOME)
def test_terms_of_the_attention_s_vectors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    body, role = BECOME[name]
    model = model_of(body)
    scope, described = describe(model, monkeypatch)
    assert described.mask is not None, described.reason
    assert [t.role for t in described.mask.relative_terms] == [role]
    assert described.mask.bias == ()
    compare(model, scope, described)


_VALUES = """
    kt = Transpose <perm = [0, 1, 3, 2]> (k)  ac = MatMul (q, kt)  scores = Mul (ac, scale)
    weights = Softmax <axis = -1> (scores)  o = MatMul (weights, value)  MOVED
    added = Einsum <equation = "bhqk,qkd->bhqd"> (moved, pairs)  RESULT
    sum = Add (o, result)  o1 = Transpose <perm = [0, 2, 1, 3]> (sum)  out = Reshape (o1, flat)
"""


@pytest.mark.parametrize(
    ("moved", "result", "is_replaced"),
    [
        ("moved = Identity (weights)", "result = Identity (added)", True),
        ("moved = Where (is_masked, nothing, weights)", "result = Identity (added)", False),
        ("moved = Identity (weights)", "result = Where (is_masked, nothing, added)", False),
        ("moved = Identity (weights)", "result = Where (is_opaque, nothing, added)", False),
    ],
)
def test_values_of_a_token(moved: str, result: str, is_replaced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, described = describe(model_of(_VALUES.replace("MOVED", moved).replace("RESULT", result)), monkeypatch)
    found = () if described.mask is None else described.mask.relative_terms
    assert [t.role for t in found] == (["relative_value"] if is_replaced else [])


def _doubled(operator: str) -> str:
    chain = "".join(f" t{i + 1} = {operator} (t{i}, t{i})" for i in range(40))
    return " qr = Identity (q) " + _BY_QUERIES + " t0 = Identity (bd) " + chain + _tail(term="t40")


@pytest.mark.parametrize("operator", ["Add", "Mul", "Max"])
def test_shared_parts_are_read_once(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """2^40 paths lead to the product."""
    steps = 0
    integer = Domain.integer

    def count(domain: Domain, value: object) -> object:
        nonlocal steps
        steps += 1
        assert steps < 20_000
        return integer(domain, value)  # type: ignore[arg-type]

    monkeypatch.setattr(Domain, "integer", count)
    _, described = describe(model_of(_doubled(operator)), monkeypatch)
    assert described.mask is not None, described.reason
    if operator == "Add":
        (term,) = described.mask.relative_terms
        np.testing.assert_allclose(term.table.factor, 2.0**40, rtol=1e-6)
    else:
        assert described.mask.relative_terms == ()
        assert len(described.mask.bias) == 1
