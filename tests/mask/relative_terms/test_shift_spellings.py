# SPDX-License-Identifier: Apache-2.0
"""Queries times a row for each distance, shifted into place as models spell it, with a past and biases u and v."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from stof.mask.site import RowRange
from stof.options import Options

_HEADS, _SIZE = 4, 8
_WIDTH = _HEADS * _SIZE

# Scores [B, H, S, T] of queries and keys, ac, and those of queries and rows, bd [B, H, S, L], in the order of distances.
_HEAD = """
    y = Concat <axis = 1> (mem, x)
    Bs = Shape <start = 0, end = 1> (x)  Ss = Shape <start = 1, end = 2> (x)  Ts = Shape <start = 1, end = 2> (y)
    S = Squeeze (Ss)  T = Squeeze (Ts)  Bn = Squeeze (Bs)
    q0 = MatMul (x, wq)  k0 = MatMul (y, wk)  v0 = MatMul (y, wv)
    q1 = Reshape (q0, heads)  k1 = Reshape (k0, heads)  v1 = Reshape (v0, heads)
    qu = Add (q1, u)  qv = Add (q1, v)
    q = Transpose <perm = [0, 2, 1, 3]> (qu)  qr = Transpose <perm = [0, 2, 1, 3]> (qv)
    k = Transpose <perm = [0, 2, 3, 1]> (k1)  value = Transpose <perm = [0, 2, 1, 3]> (v1)
    ac = MatMul (q, k)
    first = Sub (T, one)  minus = Neg (S)
"""
_ROWS = """
    positions = Range (first, LAST, step)  p1 = Cast <to = 1> (positions)  p2 = Unsqueeze (p1, ones)
    angles = Mul (p2, inverse)  sine = Sin (angles)  cosine = Cos (angles)
    e = Concat <axis = 1> (sine, cosine)  r0 = MatMul (e, wr)  r1 = Reshape (r0, rows)
    r = Transpose <perm = [1, 2, 0]> (r1)  bd = MatMul (qr, r)
    sizes = Shape (bd)  Ls = Gather (sizes, threes)
"""
_TAIL = """
    sum = Add (ac, shifted)  scores = Mul (sum, scale)  MASK  weights = Softmax <axis = -1> (masked)
    o = MatMul (weights, value)  o1 = Transpose <perm = [0, 2, 1, 3]> (o)  out = Reshape (o1, flat)
"""
_UNMASKED = "masked = Identity (scores)"
_CAUSAL = """
    qs = Range (zero, S, one)  qt = Unsqueeze (qs, ones)  past = Sub (T, S)  at = Add (qt, past)
    ks = Range (zero, T, one)  later = Greater (ks, at)  masked = Where (later, lowest, scores)
"""
_NEAR = """
    qs = Range (zero, S, one)  qt = Unsqueeze (qs, ones)  past = Sub (T, S)  at = Add (qt, past)
    ks = Range (zero, T, one)  later = Greater (ks, at)  back = Sub (at, ks)  is_far = Greater (back, reach)
    forbidden = Or (later, is_far)  masked = Where (forbidden, lowest, scores)
"""
_PAD_AND_VIEW = """
    padded = Pad (bd, pads)
    L1s = Add (Ls, ones)  tall = Concat <axis = 0> (Bs, four, L1s, Ss)  turned = Reshape (padded, tall)
    cut = Slice (turned, ones, most, twos)  wide = Concat <axis = 0> (Bs, four, Ss, Ls)  whole = Reshape (cut, wide)
    shifted = Slice (whole, zeros, Ts, threes)
"""
_GATHER = """
    i = Range (zero, S, one)  i1 = Unsqueeze (i, ones)  j = Range (zero, T, one)  less = Sub (S, one)
    from = Sub (less, i1)  index = Add (from, j)  whole = Shape (ac)  indices = Expand (index, whole)
    shifted = GatherElements <axis = 3> (bd, indices)
"""
_STRIDED = """
    all = Reshape (bd, minus_one)  L = Squeeze (Ls)
    SL = Mul (S, L)  HSL = Mul (SL, number)  narrow = Sub (L, one)  less = Sub (S, one)
    b = Range (zero, Bn, one)  b1 = Mul (b, HSL)  b2 = Unsqueeze (b1, last_three)
    h1 = Mul (counted, SL)  h2 = Unsqueeze (h1, last_two)
    i = Range (zero, S, one)  i1 = Mul (i, narrow)  i2 = Unsqueeze (i1, ones)  j = Range (zero, T, one)
    f1 = Add (less, b2)  f2 = Add (f1, h2)  f3 = Add (f2, i2)  f4 = Add (f3, j)
    shifted = Gather <axis = 0> (all, f4)
"""


@dataclass(frozen=True)
class Spelling:
    """How a graph shifts: its nodes, whether rows of keys in the future exist, and whether they are masked."""

    shift: str
    has_all_rows: bool = True
    is_causal: bool = False
    is_near: bool = False

    def model(self) -> onnx.ModelProto:
        rows = _ROWS.replace("LAST", "minus" if self.has_all_rows else "minus_1")
        body = (
            _HEAD
            + rows
            + self.shift
            + _TAIL.replace("MASK", _NEAR if self.is_near else _CAUSAL if self.is_causal else _UNMASKED)
        )
        text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[B,S,{_WIDTH}] x, float[B,P,{_WIDTH}] mem) => (float[B,S,{_WIDTH}] out) {{ {body} }}"""
        model: onnx.ModelProto = parser.parse_model(text)
        rng = np.random.default_rng(8)
        constants: dict[str, np.ndarray] = {
            **{n: rng.standard_normal((_WIDTH, _WIDTH)).astype(np.float32) * 0.3 for n in ("wq", "wk", "wv", "wr")},
            **{n: rng.standard_normal((_HEADS, _SIZE)).astype(np.float32) for n in ("u", "v")},
            "inverse": (100.0 ** -np.linspace(0, 1, _WIDTH // 2)).astype(np.float32),
            "scale": np.float32(_SIZE**-0.5),
            "lowest": np.float32(-np.inf),
            "heads": np.array([0, 0, _HEADS, _SIZE]),
            "rows": np.array([-1, _HEADS, _SIZE]),
            "flat": np.array([0, 0, _WIDTH]),
            "pads": np.array([0, 0, 0, 1, 0, 0, 0, 0]),
            "reach": np.array(6),
            "counted": np.arange(_HEADS),
            "number": np.array(_HEADS),
            "last_three": np.array([1, 2, 3]),
            "last_two": np.array([1, 2]),
            **{n: np.array(i) for n, i in {"zero": 0, "one": 1, "step": -1, "minus_1": -1}.items()},
            **{n: np.array([i]) for n, i in {"zeros": 0, "ones": 1, "twos": 2, "threes": 3, "four": _HEADS}.items()},
            "minus_one": np.array([-1]),
            "most": np.array([2**62]),
        }
        read = {i for n in model.graph.node for i in n.input}
        model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items() if n in read)
        return model


SPELLINGS = {
    "pad and view": Spelling(_PAD_AND_VIEW),
    "pad and view, causal": Spelling(_PAD_AND_VIEW, is_causal=True),
    "pad and view, rows of the past alone": Spelling(_PAD_AND_VIEW, has_all_rows=False, is_causal=True),
    "gather": Spelling(_GATHER),
    "gather, causal": Spelling(_GATHER, is_causal=True),
    "strided": Spelling(_STRIDED),
    "strided, causal": Spelling(_STRIDED, is_causal=True),
}


def describe(model: onnx.ModelProto, monkeypatch: pytest.MonkeyPatch) -> tuple[Scope, DescribedSite]:
    monkeypatch.setattr(site_describer, "relative_roles", lambda: frozenset({"relative_key"}))
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
    model = SPELLINGS[name].model()
    scope, described = describe(model, monkeypatch)
    assert described.mask is not None, described.reason
    (term,) = described.mask.relative_terms
    assert (term.role, term.index.text, term.heads) == ("relative_key", "k - q + T - 1", _HEADS)
    shift = term.table.shift_array()
    assert shift is not None
    u, v = (numpy_helper.to_array(t) for n in ("u", "v") for t in model.graph.initializer if t.name == n)
    np.testing.assert_allclose(shift, v - u, rtol=1e-6)
    assert described.mask.expression.text == ("k <= q" if SPELLINGS[name].is_causal else "")
    assert described.mask.bias == ()
    emitted = emit(scope.working.model, scope.symbolic, [Rewrite(described.site, described.mask)])
    assert not {"Softmax", "GatherElements", "Pad"} & {n.op_type for n in emitted.graph.node}
    rng = np.random.default_rng(5)
    for batch, length, past in ((1, 1, 0), (2, 5, 3), (1, 17, 0), (2, 7, 40), (1, 1, 9)):
        feed = {
            n: rng.standard_normal((batch, s, _WIDTH)).astype(np.float32) for n, s in (("x", length), ("mem", past))
        }
        wanted = run(model, feed)
        np.testing.assert_allclose(run(emitted, feed), wanted, atol=2e-5 * float(np.abs(wanted).max()))


def test_a_table_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a session with all optimizations, which ends a process where its fused matmul has no rows."""
    scope, described = describe(SPELLINGS["pad and view, rows of the past alone"].model(), monkeypatch)
    assert described.mask is not None
    assert described.mask.relative_terms[0].table.shift
    emitted = emit(scope.working.model, scope.symbolic, [Rewrite(described.site, described.mask)])
    node = next(n for n in emitted.graph.node if n.op_type == "StofAttention")
    graph = onnx.utils.Extractor(emitted).extract_model(["x", "mem"], [node.input[3 + _slot_of(node)]])
    session = ort.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    (table,) = session.run(None, {n: np.ones((2, 0, _WIDTH), np.float32) for n in ("x", "mem")})
    assert table.shape == (_HEADS, 0, _SIZE + 1)


def _slot_of(node: onnx.NodeProto) -> int:
    roles = next(a.s.decode() for a in node.attribute if a.name == "operands").split()
    return roles.index("relative_key")


@pytest.mark.parametrize("name", ["pad and view", "gather", "strided"])
def test_windows_with_a_past(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streaming: queries behind a past read the rows of a window, whatever the past's length."""
    model = replace(SPELLINGS[name], is_near=True).model()
    scope, described = describe(model, monkeypatch)
    assert described.mask is not None, described.reason
    (term,) = described.mask.relative_terms
    assert term.index.text == "k - q + min(T - 1, 6)"
    assert term.table.rows == RowRange(0, 1, -1, 6, 0)
    emitted = emit(scope.working.model, scope.symbolic, [Rewrite(described.site, described.mask)])
    floats = [v.name for v in emitted.graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    rng = np.random.default_rng(5)
    for batch, length, past in ((1, 1, 0), (2, 5, 3), (1, 17, 0), (2, 7, 40), (1, 1, 9)):
        feed = {
            n: rng.standard_normal((batch, s, _WIDTH)).astype(np.float32) for n, s in (("x", length), ("mem", past))
        }
        wanted = run(model, feed)
        np.testing.assert_allclose(run(emitted, feed), wanted, atol=2e-5 * float(np.abs(wanted).max()))
    emitted.graph.output.extend(onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, None) for n in floats)
    feed = {n: rng.standard_normal((1, s, _WIDTH)).astype(np.float32) for n, s in (("x", 30), ("mem", 21))}
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(emitted.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert not any(30 + 51 - 1 in a.shape for a in session.run(None, feed))


def test_equal_biases_are_no_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """(q + u) · k + (q + u) · R needs no row bias."""
    model = SPELLINGS["gather"].model()
    tensors = {t.name: t for t in model.graph.initializer}
    tensors["v"].CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensors["u"]), "v"))
    _, described = describe(model, monkeypatch)
    assert described.mask is not None
    assert described.mask.relative_terms[0].table.shift_array() is None


def test_rows_of_the_past_alone_need_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it pairs in the future read a row of another query."""
    _, described = describe(
        replace(SPELLINGS["pad and view, rows of the past alone"], is_causal=False).model(), monkeypatch
    )
    assert described.mask is None or not described.mask.relative_terms


@pytest.mark.parametrize("name", ["strided", "gather"])
def test_a_shift_by_one_more_is_another_index(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spelling = SPELLINGS[name]
    model = replace(
        spelling, shift=spelling.shift.replace("less = Sub (S, one)", "l0 = Sub (S, one) less = Sub (l0, one)")
    ).model()
    _, described = describe(model, monkeypatch)
    terms = () if described.mask is None else described.mask.relative_terms
    assert [t.index.text for t in terms] in ([], ["k - q + T - 2"])
