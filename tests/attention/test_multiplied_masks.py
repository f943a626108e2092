# SPDX-License-Identifier: Apache-2.0
"""Scores times a mask of ones and zeros plus its logarithm, ``scores * m + log(m)``: a mask that fills with -inf."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_forms import PLAIN, UnsupportedError, feeds, model, reason, rewrite, run

import stof
from stof.mask.site import EmptyRows

OUT = "float[a,b,c,d] out"
PADDED = PLAIN + ", int64[B,S] am"
# m: float [B, 1, S, S], 1 in a causal window of 5 at keys that are no padding; wf: the window alone
MASK = """
    %kt
    %window
    axes = Constant <value = int64[2] {1, 2}> ()
    am4 = Unsqueeze (am, axes)
    real = Cast <to = 9> (am4)
    both = And (real, w)
    m = Cast <to = 1> (both)
    wf = Cast <to = 1> (w)
    unit = Constant <value = float {1.0}> ()
    null = Constant <value = float {0.0}> ()
    half = Constant <value = float {0.5}> ()
    eps = Constant <value = float {1e-9}> ()
    s1 = MatMul (q, kt)
"""
TAIL = "\np = Softmax (s3)\nout = MatMul (p, v)"
SIZES = ({"B": 2, "S": 19}, {"B": 1, "S": 7})

SPELLINGS = {
    "scores * m + log(m)": "s2 = Mul (s1, m)\nl = Log (m)\ns3 = Add (s2, l)",
    "log(m) + m * scores": "s2 = Mul (m, s1)\nl = Log (m)\ns3 = Add (l, s2)",
    "scores * m - -log(m)": "s2 = Mul (s1, m)\nl = Log (m)\nn = Neg (l)\ns3 = Sub (s2, n)",
    "each by a cast of its own": "s2 = Mul (s1, m)\nother = Cast <to = 1> (both)\nl = Log (other)\ns3 = Add (s2, l)",
    "log of a bounded mask": "s2 = Mul (s1, m)\nbound = Clip (m, null, unit)\nl = Log (bound)\ns3 = Add (s2, l)",
    "log written as a Where": "s2 = Mul (s1, m)\nlow = Log (null)\nl = Where (both, null, low)\ns3 = Add (s2, l)",
    "scaled between": "s2 = Mul (s1, m)\nscaled = Mul (s2, half)\nl = Log (m)\ns3 = Add (scaled, l)",
    "scaled after": "s2 = Mul (s1, m)\nl = Log (m)\nsum = Add (s2, l)\ns3 = Mul (sum, half)",
    "less than the log forbids": "s2 = Mul (s1, wf)\nl = Log (m)\ns3 = Add (s2, l)",
}


def attend(given: dict[str, np.ndarray], allowed: np.ndarray, scale: float) -> np.ndarray:
    """Attention in fp64; NaN in rows without a key."""
    q, k, v = (given[n].astype(np.float64) for n in "qkv")
    scores = np.where(allowed, q @ k.swapaxes(-1, -2) * scale, -np.inf)
    with np.errstate(invalid="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def allowed_pairs(padding: np.ndarray) -> np.ndarray:
    """The mask of ``MASK`` [B, 1, S, S]."""
    d = np.arange(padding.shape[1])[:, None] - np.arange(padding.shape[1])
    return np.asarray((d >= 0) & (d < 5) & (padding[:, None, None, :] != 0))


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_mask_and_its_logarithm_are_one_mask(name: str) -> None:
    graph = model(PADDED, OUT, MASK + SPELLINGS[name] + TAIL)
    optimized, (one,) = rewrite(graph)
    assert one.mask.expression.text == "k <= q and q - k <= 4 and pad[b, k]"
    assert (one.mask.empty_rows, one.mask.bias) == (EmptyRows.NAN, ())
    for seed, sizes in enumerate(SIZES):
        given = feeds(graph, sizes, seed)
        given["am"][0, : sizes["S"] // 2] = 0  # the first rows have no key
        wanted = attend(given, allowed_pairs(given["am"]), 0.5 if "scaled" in name else 1.0)
        assert np.isnan(wanted).any()
        before = run(graph, given)[0]
        for found in (before, run(optimized, given, library=True)[0], run(optimized, given)[0]):
            assert np.array_equal(np.isnan(found), np.isnan(wanted))
            np.testing.assert_allclose(np.nan_to_num(found), np.nan_to_num(wanted), atol=5e-6, rtol=0)


@pytest.mark.parametrize("kind", ["bool", "int64"])
def test_padding_of_a_caller(kind: str, tmp_path: Path) -> None:
    """Numbers that the graph computes with are taken to be 0 and 1, and the report says so; bool needs no such note."""
    body = """%kt
        axes = Constant <value = int64[2] {1, 2}> ()
        am4 = Unsqueeze (am, axes)
        m = Cast <to = 1> (am4)
        s1 = MatMul (q, kt)
        s2 = Mul (s1, m)
        l = Log (m)
        s3 = Add (s2, l)"""
    graph = model(f"{PLAIN}, {kind}[B,S] am", "float[B,4,S,8] out", body + TAIL)
    onnx.save(graph, tmp_path / "m.onnx")
    report = stof.optimize(tmp_path / "m.onnx", tmp_path / "o.onnx", stof.Options(verify_budget=5))
    (site,) = report.sites
    assert (site.replaced, site.mask, site.empty_rows) == (True, "pad[b, k]", "nan")
    assert any("taken to hold 0 and 1 only" in n for n in site.notes) == (kind == "int64")
    assert report.verification is not None
    assert all(c.ok for c in report.verification.comparisons)


def test_a_stored_mask_of_ones_and_zeros() -> None:
    body = """%kt
        m = Constant <value = float[4] {1.0, 1.0, 0.0, 1.0}> ()
        s1 = MatMul (q, kt)
        s2 = Mul (s1, m)
        l = Log (m)
        s3 = Add (s2, l)"""
    graph = model(PLAIN.replace("S", "4"), OUT, body + TAIL)
    optimized, (one,) = rewrite(graph)
    assert one.mask.expression.text == "table0[k]"
    given = feeds(graph, {"B": 2})
    wanted = attend(given, np.array([True, True, False, True]), 1.0)
    for library in (False, True):
        np.testing.assert_allclose(run(optimized, given, library=library)[0], wanted, atol=5e-6, rtol=0)


def test_a_mask_of_conditions_that_only_look_different() -> None:
    """The padding and a table by Min: that m is 0 and that it is 1 exclude each other, which no simplification shows."""
    body = """%kt
        table = Constant <value = bool[3,3] {1,0,0, 1,1,0, 0,1,1}> ()
        ints = Cast <to = 7> (table)
        axes = Constant <value = int64[2] {1, 2}> ()
        am4 = Unsqueeze (am, axes)
        least = Min (am4, ints)
        none = Constant <value = int64 {0}> ()
        drop = Equal (least, none)
        keep = Not (drop)
        m = Cast <to = 1> (keep)
        s1 = MatMul (q, kt)
        s2 = Mul (s1, m)
        l = Log (m)
        s3 = Add (s2, l)"""
    graph = model(PLAIN.replace("S", "3") + ", int64[B,3] am", OUT, body + TAIL)
    optimized, (one,) = rewrite(graph)
    assert not one.mask.bias
    given = feeds(graph, {"B": 3})
    table = np.array([[1, 0, 0], [1, 1, 0], [0, 1, 1]], bool)
    wanted = attend(given, table & (given["am"][:, None, None, :] != 0), 1.0)
    for library in (False, True):
        found = run(optimized, given, library=library)[0]
        np.testing.assert_allclose(found, wanted, atol=5e-6, rtol=0)


REFUSED = {
    # 0.5 where the mask is 0: the score is halved and ln 2 lower, not forbidden
    "0.5 instead of 0": ("h = Max (m, half)\ns2 = Mul (s1, h)\nl = Log (h)\ns3 = Add (s2, l)", "the walk met the Mul"),
    "0.5 instead of 1": ("h = Mul (m, half)\ns2 = Mul (s1, h)\nl = Log (h)\ns3 = Add (s2, l)", "the walk met the Mul"),
    # a finite fill of -20.7, above which other scores may be
    "log(m + eps)": ("e = Add (m, eps)\ns2 = Mul (s1, m)\nl = Log (e)\ns3 = Add (s2, l)", "nothing forbids"),
    "log(max(m, eps))": ("e = Max (m, eps)\ns2 = Mul (s1, m)\nl = Log (e)\ns3 = Add (s2, l)", "nothing forbids"),
    "more than the log forbids": ("s2 = Mul (s1, m)\nl = Log (wf)\ns3 = Add (s2, l)", "nothing forbids"),
    "the log subtracted": ("s2 = Mul (s1, m)\nl = Log (m)\ns3 = Sub (s2, l)", "the walk met the Mul|nothing forbids"),
    "the log below a tanh": (
        "s2 = Mul (s1, m)\nl = Log (m)\nsum = Add (s2, l)\nt0 = Tanh (sum)\ns3 = Mul (t0, half)",
        "a mask is applied below",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_mask_is_refused(name: str) -> None:
    nodes, words = REFUSED[name]
    graph = model(PADDED, OUT, MASK + nodes + TAIL)
    with pytest.raises((AssertionError, UnsupportedError), match=words):
        rewrite(graph)


def test_factors_of_a_caller_are_no_mask() -> None:
    """A float input may hold any number."""
    body = "%kt\ns1 = MatMul (q, kt)\ns2 = Mul (s1, m)\nl = Log (m)\ns3 = Add (s2, l)"
    graph = model(f"{PLAIN}, float[B,1,1,S] m", OUT, body + TAIL)
    assert "the walk met the Mul node" in reason(graph)


def test_stored_factors_other_than_0_and_1_are_no_mask() -> None:
    body = "%kt\nm = Constant <value = float[4] {1.0, 1.0, 0.5, 0.0}> ()\ns1 = MatMul (q, kt)\n"
    body += "s2 = Mul (s1, m)\nl = Log (m)\ns3 = Add (s2, l)"
    assert "the walk met the Mul node" in reason(model(PLAIN.replace("S", "4"), OUT, body + TAIL))
