# SPDX-License-Identifier: Apache-2.0
"""Scores with a floor beside a caller's mask, and weights multiplied by numbers that should be 0 and 1."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from attention_forms import PLAIN, model, run

import stof
from stof.attention.report import SiteReport
from stof.errors import VerifyError
from stof.graph.node_fields import plain_attributes_of
from stof.mask.site import EmptyRows
from stof.options import Options

LOWEST = float(np.finfo(np.float32).min)
CONSTANTS = """
    %kt
    %window
    s1 = MatMul (q, kt)
    null = Constant <value = float {0.0}> ()
    minus = Constant <value = float {-inf}> ()
    least = Constant <value = float {-3.4028234663852886e38}> ()
"""


def _optimized(graph: onnx.ModelProto, folder: Path) -> tuple[SiteReport, onnx.ModelProto]:
    onnx.save(graph, folder / "model.onnx")
    report = stof.optimize(folder / "model.onnx", folder / "new.onnx", Options(verify=False))
    (site,) = report.sites
    return site, onnx.load(folder / "new.onnx") if site.replaced else graph


@pytest.mark.parametrize("fill", [-np.inf, LOWEST, -1e9])
def test_a_floor_makes_the_window_no_lower_than_the_callers_mask(fill: float, tmp_path: Path) -> None:
    """Keys that -inf forbids are at the floor, as those are that the caller forbids: the row attends to all of them."""
    body = """
        window = Where (w, null, minus)
        both = Add (window, given)
        s2 = Add (s1, both)
        s3 = Max (s2, least)
        p = Softmax (s3)
        out = MatMul (p, v)"""
    graph = model(PLAIN + ", float[B,1,S,S] given", "float[B,4,S,8] out", CONSTANTS + body)
    site, optimized = _optimized(graph, tmp_path)
    assert site.replaced
    rng = np.random.default_rng(5)
    feeds = {n: rng.standard_normal((2, 4, 13, 8)).astype(np.float32) for n in "qkv"}
    rows, keys = np.indices((13, 13))
    window = (keys <= rows) & (rows - keys < 5)
    feeds["given"] = np.stack([np.where(window, fill, 0.0), np.zeros((13, 13))])[:, None].astype(np.float32)
    np.testing.assert_allclose(run(optimized, feeds, library=True)[0], run(graph, feeds)[0], atol=2e-6)


def test_a_floor_over_a_selection_beside_the_callers_mask(tmp_path: Path) -> None:
    body = """
        s2 = Add (s1, given)
        s3 = Where (w, s2, minus)
        s4 = Max (s3, least)
        p = Softmax (s4)
        out = MatMul (p, v)"""
    site, _ = _optimized(model(PLAIN + ", float[B,1,S,S] given", "float[B,4,S,8] out", CONSTANTS + body), tmp_path)
    assert not site.replaced
    assert "may forbid all keys" in site.reason


@pytest.mark.parametrize(("multiplied", "told"), [("am4", True), ("real", False)])
def test_weights_multiplied_by_padding_as_it_came(multiplied: str, told: bool, tmp_path: Path) -> None:
    """Where a 2 in the padding would count twice, the report says what is taken for granted."""
    body = f"""
        places = Constant <value = int64[2] {{1, 2}}> ()
        am4 = Unsqueeze (am, places)
        real = Cast <to = 9> (am4)
        s2 = Where (real, s1, minus)
        p0 = Softmax (s2)
        factor = Cast <to = 1> ({multiplied})
        p = Mul (p0, factor)
        out = MatMul (p, v)"""
    site, _ = _optimized(model(PLAIN + ", int64[B,S] am", "float[B,4,S,8] out", CONSTANTS + body), tmp_path)
    assert site.replaced
    assert any("taken to hold 0 and 1" in note for note in site.notes) == told


@pytest.mark.parametrize(("number", "raised"), [("-1e9", "1e9"), ("-inf", "inf"), ("-10000", "2e4")])
def test_a_number_that_raises_what_is_forbidden(number: str, raised: str, tmp_path: Path) -> None:
    body = f"""
        low = Constant <value = float {{{number}}}> ()
        high = Constant <value = float {{{raised}}}> ()
        window = Where (w, null, low)
        raising = Where (causal, null, high)
        s2 = Add (s1, window)
        s3 = Add (s2, raising)
        p = Softmax (s3)
        out = MatMul (p, v)"""
    site, _ = _optimized(model(PLAIN, "float[B,4,S,8] out", CONSTANTS + body), tmp_path)
    assert not site.replaced
    assert "'raising' adds up to" in site.reason


def test_a_large_number_before_a_selection_is_replaced_with_the_scores(tmp_path: Path) -> None:
    body = """
        low = Constant <value = float {-1e9}> ()
        high = Constant <value = float {1e9}> ()
        raising = Where (causal, null, high)
        s2 = Add (s1, raising)
        s3 = Where (w, s2, low)
        p = Softmax (s3)
        out = MatMul (p, v)"""
    graph = model(PLAIN, "float[B,4,S,8] out", CONSTANTS + body)
    site, optimized = _optimized(graph, tmp_path)
    assert site.replaced
    rng = np.random.default_rng(7)
    feeds = {n: rng.standard_normal((2, 4, 13, 8)).astype(np.float32) for n in "qkv"}
    np.testing.assert_allclose(run(optimized, feeds, library=True)[0], run(graph, feeds)[0], atol=2e-6)


TOO_LARGE = {
    "cast to fp16 and back": """
        h = Constant <value = float {-1e9}> ()
        a = Where (padded, h, null)
        b = Cast <to = 10> (a)
        c = Cast <to = 1> (b)
        s2 = Add (s1, c)""",
    "cast from fp64": """
        h = Constant <value = double {-1e300}> ()
        nothing = Constant <value = double {0.0}> ()
        a = Where (padded, h, nothing)
        c = Cast <to = 1> (a)
        s2 = Add (s1, c)""",
    "the lowest number twice": """
        a = Where (padded, least, null)
        c = Add (a, a)
        s2 = Add (s1, c)""",
    "scaled after it was added": """
        double = Constant <value = float {2.0}> ()
        a = Where (padded, least, null)
        b = Add (s1, a)
        s2 = Mul (b, double)""",
    "scaled after a selection": """
        double = Constant <value = float {2.0}> ()
        b = Where (padded, least, s1)
        s2 = Mul (b, double)""",
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_numbers_that_their_type_does_not_hold_are_infinite(name: str, tmp_path: Path) -> None:
    """A row without a key is NaN then, and no mean of the values."""
    body = (
        """
        axes = Constant <value_ints = [1, 2]> ()
        told = Cast <to = 9> (am)
        real = Unsqueeze (told, axes)
        padded = Not (real)"""
        + TOO_LARGE[name]
        + """
        p = Softmax (s2)
        out = MatMul (p, v)"""
    )
    graph = model(PLAIN + ", int64[B,S] am", "float[B,4,S,8] out", CONSTANTS + body)
    site, optimized = _optimized(graph, tmp_path)
    assert (site.replaced, site.mask, site.empty_rows) == (True, "pad[b, k]", "nan"), site.reason
    rng = np.random.default_rng(6)
    feeds = {n: rng.standard_normal((2, 4, 9, 8)).astype(np.float32) for n in "qkv"}
    feeds["am"] = np.stack([np.zeros(9, np.int64), rng.integers(0, 2, 9)])
    wanted = run(graph, feeds)[0]
    assert np.isnan(wanted[0]).all()
    np.testing.assert_allclose(run(optimized, feeds, library=True)[0], wanted, atol=1e-5)


_FILLS = [-1e4, -3e4, -65504.0, -1e6]


@pytest.mark.parametrize("fill", _FILLS)
def test_digits_that_a_fill_takes_are_no_difference(fill: float, tmp_path: Path) -> None:
    """Rows whose keys are all padding keep few digits of their scores in the graph; verification runs such rows."""
    body = f"""
        axes = Constant <value_ints = [1, 2]> ()
        told = Cast <to = 9> (am)
        real = Unsqueeze (told, axes)
        both = And (w, real)
        fill = Constant <value = float {{{fill!r}}}> ()
        mask = Where (both, null, fill)
        s2 = Add (s1, mask)
        p = Softmax (s2)
        out = MatMul (p, v)"""
    graph = model(PLAIN + ", int64[B,S] am", "float[B,4,S,8] out", CONSTANTS + body)
    onnx.save(graph, tmp_path / "model.onnx")
    report = stof.optimize(tmp_path / "model.onnx", tmp_path / "new.onnx", Options(verify_budget=5))
    (site,) = report.sites
    assert (site.replaced, site.empty_rows) == (True, "all"), site.reason


def test_digits_that_are_all_of_a_score_are_a_difference(tmp_path: Path) -> None:
    """-1e7 leaves a score of 1 no digit behind the point: what a row without a key gives is another mixture."""
    with pytest.raises(VerifyError):
        test_digits_that_a_fill_takes_are_no_difference(-1e7, tmp_path)


@pytest.mark.parametrize("fill", _FILLS)
def test_a_scale_that_is_a_little_wrong_is_seen_beside_such_a_fill(
    fill: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(node: onnx.NodeProto) -> dict[str, int | float | str | list[int]]:
        found = plain_attributes_of(node)
        scale = found.get("scale", 8**-0.5)
        assert isinstance(scale, float)
        return {**found, "scale": scale * 1.0001}

    monkeypatch.setattr("stof.attention.checks.site_comparison.plain_attributes_of", wrong)
    with pytest.raises(VerifyError):
        test_digits_that_a_fill_takes_are_no_difference(fill, tmp_path)


@pytest.mark.parametrize("rows", ["nan", "mean"])
def test_rows_without_a_key_that_are_wrong_are_seen_beside_such_a_fill(
    rows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stof.mask.lift.policy_from_fills", lambda *_: EmptyRows(rows))
    with pytest.raises(VerifyError):
        test_digits_that_a_fill_takes_are_no_difference(-65504.0, tmp_path)
