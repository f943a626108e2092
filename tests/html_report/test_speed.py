# SPDX-License-Identifier: Apache-2.0
"""Gains on the page: by length, coloured where they are below 1, and what to do there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.html_report.strict_page import parse, report_of, site, text_of, write_model

import stof
from stof.attention.report import SiteSection
from stof.fusion.report import ChainReport, ChainSection
from stof.html_report import to_html
from stof.html_report.chart import Series, chart
from stof.options import Options
from stof.report import SLOWER_ADVICE, Report
from stof.verification.model_times import ModelTimes, RunTimes


def times(gain: float, inputs: str = "batch 1, sequence 512", length: int = 512) -> ModelTimes:
    return ModelTimes(inputs, RunTimes(0.1 * gain, 0.2, 9), RunTimes(0.1, 0.2, 9), length=length)


def three(*gains: float) -> ModelTimes:
    found = [times(g, f"batch 1, sequence {n}", n) for g, n in zip(gains, (128, 512, 2048), strict=True)]
    return replace(found[-1], shorter=tuple(found[:-1]))


def kinds(page: str, tag: str) -> list[str]:
    """The classes of elements."""
    return [dict(attributes).get("class") or "" for name, attributes in parse(page).tags if name == tag]


# ---- by length ----
def test_estimates_and_measured_points_are_in_one_chart() -> None:
    section = SiteSection([site("a"), site("b")], curves={"a": ((128, 1.5), (2048, 7.9), (8192, 9.0))})
    token = times(1.25, "batch 1, sequence 1, past 2047", 2048)
    page = to_html(report_of(section, times=replace(three(2.0, 3.0, 4.0), token=token)))
    words = text_of(page)
    assert "whole model, measured" in words
    assert "one token behind a past, measured" in words
    assert "2 × attention, causal, 4 heads, estimated" in words
    (label,) = (dict(a)["aria-label"] for tag, a in parse(page).tags if dict(a).get("class") == "canvas")
    assert label is not None
    assert "whole model: 2.00 times at 128, 3.00 times at 512, 4.00 times at 2048" in label
    assert "one token behind a past: 1.25 times at 2048" in label
    assert "4 heads: 1.50 times at 128, 7.90 times at 2048, 9.00 times at 8192" in label
    lines = [kind for kind in kinds(page, "path") if kind.startswith("line")]
    assert lines == ["line c0 measured", "line c2 estimated"]
    assert sum("dot" in kind for kind in kinds(page, "span")) == 3 + 1 + 3
    for words_of_bar in ("sequence 128 2.00×", "sequence 512 3.00×", "sequence 2048 4.00×", "past 2047 1.25×"):
        assert words_of_bar in words
    assert "2.00 to 4.00× at 3 lengths" in words


def test_points_of_a_chart_lie_within_it() -> None:
    drawn = chart([Series("a", [(16, 0.2), (100_000, 900.0)], True), Series("b", [(300, 1.0)], False)], "keys")
    places = [float(x) for x in re.findall(r"(?:left|top):([-\d.]+)%", drawn)]
    assert len(places) > 8
    assert all(0 <= x <= 100 for x in places)
    numbers = [float(x) for path in re.findall(r' d="M([^"h]+)"', drawn) for x in re.split("[ L]", path)]
    assert all(0 <= x <= 100 for x in numbers)


@pytest.mark.parametrize(
    "points", [[], [(512, 2.0)], [(0, 2.0), (512, 2.0)], [(128, float("inf")), (512, float("nan"))]]
)
def test_one_length_is_no_curve(points: list[tuple[int, float]]) -> None:
    assert chart([Series("a", points, True)], "keys") == ""


def test_numbers_that_no_scale_has_are_left_out() -> None:
    points = [(128, 2.0), (256, 0.0), (512, float("nan")), (1024, -1.0), (2048, 4.0), (4096, 4.0)]
    drawn = chart([Series("a", points, False)], "keys")
    assert drawn.count('class="dot') == 3


def test_many_curves_have_a_limit() -> None:
    rows = [site(f"s{i}", heads=f"{i} heads", predicted_gain=1.0 + i) for i in range(40)]
    section = SiteSection(rows, curves={r.site: ((128, 2.0), (512, 3.0)) for r in rows})
    words = text_of(to_html(report_of(section)))
    assert "34 more curves are left out" in words


def test_a_page_has_curves_of_a_real_model(tmp_path: Path) -> None:
    model, page = write_model(tmp_path, "window"), tmp_path / "page.html"
    stof.optimize(model, options=Options(report=page, dry_run=True, shapes={}))
    (label,) = (dict(a)["aria-label"] for _, a in parse(page.read_text()).tags if dict(a).get("class") == "canvas")
    assert label is not None
    assert re.findall(r"times at (\d+)", label) == ["128", "256", "512", "1024", "2048", "4096", "8192"]
    plain = stof.optimize(model, options=Options(dry_run=True))
    assert not plain.sections["sites"].curves  # type: ignore[attr-defined]


# ---- below 1 ----
def test_a_measured_loss_is_coloured_and_followed_by_what_to_do() -> None:
    report = report_of(SiteSection([site()]), times=three(0.8, 0.991, 1.5))
    page = to_html(report)
    words = text_of(page)
    assert "batch 1, sequence 128 0.80× slower" in words
    slower = "Whole model, batch 1, sequence 512: 0.99×; Whole model, batch 1, sequence 128: 0.80×"
    assert f"Slower than the original: {slower}. {SLOWER_ADVICE}" in words
    assert kinds(page, "p").count("callout bad") == 1
    assert kinds(page, "b").count("loss") == 2
    assert kinds(page, "i").count("lost") == 2
    assert (
        "hint: slower than the original at batch 1, sequence 512; batch 1, sequence 128. What to do: "
        in report.to_text()
    )


def test_the_summary_shows_a_loss() -> None:
    page = to_html(report_of(SiteSection([site()]), times=three(2.0, 1.5, 0.7)))
    assert "card bad" in kinds(page, "div")


@pytest.mark.parametrize("gain", [0.996, 1.0, 3.0])
def test_what_is_shown_as_1_is_no_loss(gain: float) -> None:
    report = report_of(SiteSection([site(predicted_gain=gain)]), times=times(gain))
    page = to_html(report)
    assert not {"callout bad", "loss", "lost", "card bad"} & {
        k for tag in ("p", "b", "i", "div") for k in kinds(page, tag)
    }
    assert "slower" not in text_of(page)
    assert "hint: slower" not in report.to_text()


def test_losses_of_single_ops_say_how_to_leave_them() -> None:
    section = SiteSection(
        [site("a"), site("b", heads="8 heads", predicted_gain=0.6)], curves={"a": ((128, 0.7), (512, 0.9), (2048, 7.9))}
    )
    chains = ChainSection([ChainReport("c", "Add Mul", True, "replaced", "", 0.9, True)])
    words = text_of(to_html(report_of(section, chains)))
    assert (
        "1 × attention, causal, 4 heads: estimated 0.70× at 128, 0.90× at 512, slower than what it replaces." in words
    )
    assert "8 heads, S = 2048: estimated 0.60×" not in words  # its curve is not known, its label is
    assert "8 heads: estimated 0.60×, slower than what it replaces. What to do: --shape NAME=N..M" in words
    assert (
        "1 × chain of Add Mul: measured 0.90×, slower than what it replaces. What to do: --skip 'chain:NAME'" in words
    )


def test_names_of_inputs_are_text() -> None:
    name = '"><script>alert(1)</script>\u202e'
    report = Report(
        "m.onnx", sections={"sites": SiteSection([site(family=name)])}, times=replace(three(0.5, 0.6, 0.7), inputs=name)
    )
    page = to_html(report)
    assert "<script" not in page
    assert "\u202e" not in page
    parse(page)
