# SPDX-License-Identifier: Apache-2.0
"""Times before and after on the page: gains by length, bars, and what to do where a gain is below 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from stof.html_report import elements as e
from stof.html_report.chart import COLORS, Series, chart
from stof.report import SLOWER_ADVICE, Gain, Report

if TYPE_CHECKING:
    from stof.verification.model_times import ModelTimes

_MOST_BARS = 24
_WHOLE, _PADDED, _TOKEN = "Whole model", "Whole model, padded texts", "One token behind a past"


def is_loss(factor: float) -> bool:
    """Whether a gain is below 1 in the two digits that are shown."""
    return round(factor, 2) < 1.0


def speed_card(report: Report) -> str:
    """The speed-up of the summary: measured of the whole model, else estimated of single nodes."""
    if (times := report.times) is not None:
        words = f"whole model, {times.inputs}"
        all_gains = [t.speedup for t in times.lengths]
        if times.shorter:
            words += f"; {min(all_gains):.2f} to {max(all_gains):.2f}× at {len(all_gains)} lengths"
        if times.padded is not None:
            words += f"; {times.padded.speedup:.2f}× on padded texts"
        return e.card("Measured speed-up", f"{times.speedup:.2f}×", words, "bad" if is_loss(min(all_gains)) else "")
    gains = [g.factor for s in report.sections.values() for g in s.page_gains() if not g.measured]
    if not gains:
        return ""
    least, most = min(gains), max(gains)
    value = f"{least:.1f}×" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f} to {most:.1f}×"
    return e.card("Estimated speed-up", value, "of the replaced nodes alone", "bad" if is_loss(least) else "")


def speed_part(report: Report) -> str:
    """The chart, the bars, and advice; empty where nothing is known of times."""
    gains = [g for s in report.sections.values() for g in s.page_gains()]
    timed = _list_times(report)
    bars = [_time_bars(what, times) for what, times in timed]
    bars += [_gain_bars(g) for g in gains[:_MOST_BARS]]
    if not bars:
        return ""
    words = "Best times of alternating runs in ONNX Runtime. " if timed else ""
    if gains:
        words += "Estimated and measured gains of an operator count the nodes that it replaces, not the whole model."
    hidden = len(gains) - _MOST_BARS
    return "".join(
        [
            e.tag("h2", "Time before and after"),
            e.tag("p", e.text(words), class_="quiet"),
            _advice(timed, gains),
            _chart(report, gains),
            e.tag("div", e.tag("div", "".join(bars), class_="bars"), class_="card flow"),
            e.tag("p", e.text(f"{hidden} more kinds are in the tables below."), class_="quiet") if hidden > 0 else "",
        ]
    )


def _list_times(report: Report) -> list[tuple[str, ModelTimes]]:
    """What --time measured: the longest inputs first, then shorter ones, padded texts, a token."""
    if report.times is None:
        return []
    others = ((_PADDED, report.times.padded), (_TOKEN, report.times.token))
    times_by_label = [(_WHOLE, times) for times in reversed(report.times.lengths)]
    return times_by_label + [(label, times) for label, times in others if times is not None]


def _advice(timed: Sequence[tuple[str, ModelTimes]], gains: Sequence[Gain]) -> str:
    """What to do about each gain below 1."""
    slower = [f"{what}, {t.label}: {t.speedup:.2f}×" for what, t in timed if is_loss(t.speedup)]
    lines = [f"Slower than the original: {'; '.join(slower)}. {SLOWER_ADVICE}"] if slower else []
    for gain in gains:
        lost = [f"{factor:.2f}× at {length}" for length, factor in gain.points if is_loss(factor)]
        if is_loss(gain.factor) or lost:
            origin = "measured" if gain.measured else "estimated"
            where = ", ".join(lost) or f"{gain.factor:.2f}×"
            what = f"{gain.count} × {gain.curve or gain.label}"
            lines.append(f"{what}: {origin} {where}, slower than what it replaces. What to do: {gain.advice}")
    return "".join(e.callout(line, "bad") for line in lines)


def _chart(report: Report, gains: Sequence[Gain]) -> str:
    series = []
    if (times := report.times) is not None:
        series.append(Series("whole model", [(t.length, t.speedup) for t in times.lengths], True))
        if times.token is not None:
            series.append(Series("one token behind a past", [(times.token.length, times.token.speedup)], True))
    curves = sorted((g for g in gains if g.points), key=lambda g: -g.count)
    free = COLORS - len(series)
    series += [Series(f"{g.count} × {g.curve}", g.points, g.measured) for g in curves[:free]]
    drawn = chart(series, "keys of the longest attention, logarithmic; gain over the original, logarithmic")
    if not drawn:
        return ""
    hidden = len(curves) - free
    more = e.tag("p", e.text(f"{hidden} more curves are left out."), class_="quiet") if hidden > 0 else ""
    return e.tag("div", e.tag("h3", "Gain by length") + drawn + more, class_="card")


def _time_bars(what: str, times: ModelTimes) -> str:
    longest = max(times.original.best, times.optimized.best)
    pairs = [("original", times.original.best), ("optimized", times.optimized.best)]
    shares = [(label, seconds / longest, _milliseconds(seconds)) for label, seconds in pairs]
    return _bars(f"{what}, measured, {times.label}", times.speedup, "", shares)


def _gain_bars(gain: Gain) -> str:
    longest = max(1.0, 1.0 / gain.factor) if gain.factor > 0 else 1.0
    after = 1.0 / gain.factor if gain.factor > 0 else 1.0
    shares = [("before", 1.0 / longest, "100 %"), ("after", after / longest, f"{100 * after:.3g} %")]
    return _bars(f"{gain.count} × {gain.label}", gain.factor, "measured" if gain.measured else "estimated", shares)


def _bars(title: str, factor: float, how: str, shares: Sequence[tuple[str, float, str]]) -> str:
    lost = is_loss(factor)
    words = " ".join(filter(None, [f"{factor:.2f}×", how, "slower" if lost else ""]))
    head = e.tag("span", e.text(title, 240)) + e.tag("b", e.text(words), class_="loss" if lost else "")
    first, second = shares
    bars = e.bar(*first) + e.bar(*second, "lost" if lost else "after")
    return e.tag("div", e.tag("div", head, class_="bar-title") + bars)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"
