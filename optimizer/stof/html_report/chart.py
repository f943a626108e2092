# SPDX-License-Identifier: Apache-2.0
"""Gains by length as a chart: lines as SVG, labels and points as HTML, so that they stay readable at every width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stof.html_report import elements as e

COLORS = 6  # classes c0 to c5 of the style sheet
_MOST_TICKS = 6
_NEAREST = 0.12  # of the width, between two labels
_LOG_PAD = 0.12  # of the height, beyond the least and the largest gain
_GAINS = tuple(digit * 10.0**power for power in range(-3, 5) for digit in (1, 2, 5))


@dataclass(frozen=True)
class Series:
    """Gains of one thing.

    Attributes:
        label: of the legend.
        points: lengths and gains.
        is_measured: whether they were measured: a solid line, and the value beside each point.
    """

    label: str
    points: Sequence[tuple[int, float]]
    is_measured: bool

    @property
    def drawn(self) -> list[tuple[int, float]]:
        """The points that a logarithmic scale has, by their length."""
        return sorted((x, y) for x, y in self.points if x > 0 and y > 0 and math.isfinite(y))


@dataclass(frozen=True)
class _Scale:
    """Maps a range to 0 to 1, by logarithms."""

    low: float
    high: float

    def of(self, value: float) -> float:
        return 0.5 if self.low == self.high else math.log(value / self.low) / math.log(self.high / self.low)


def chart(series: Sequence[Series], axis: str) -> str:
    """The chart as HTML; empty where there are no two lengths.

    Args:
        series: what is drawn, at most as many as there are colors.
        axis: what lengths are, in words.
    """
    series = [s for s in series if s.drawn][:COLORS]
    lengths = sorted({x for s in series for x, _ in s.drawn})
    if len(lengths) < 2:
        return ""
    gains = [1.0, *(y for s in series for _, y in s.drawn)]
    pad = max(1.25, (max(gains) / min(gains)) ** _LOG_PAD)
    x, y = _Scale(lengths[0], lengths[-1]), _Scale(min(gains) / pad, max(gains) * pad)
    measured = {n for s in series if s.is_measured for n, _ in s.drawn}
    xs = _thin(
        [
            (n, x.of(n))
            for n in sorted(lengths, key=lambda n: (n not in measured, n not in (lengths[0], lengths[-1]), n))
        ]
    )
    ys = [g for g in _GAINS if y.low < g < y.high]
    while len(ys) > _MOST_TICKS:
        ys = [g for i, g in enumerate(ys) if g == 1.0 or (i - ys.index(1.0)) % 2 == 0]
    content = [
        _lines(series, x, y, ys),
        *(e.tag("span", f"{g:g}×", class_="tick y", style=f"top:{_percent(1 - y.of(g))}") for g in ys),
        *(e.tag("span", str(n), class_="tick x", style=f"left:{_percent(at)}") for n, at in xs),
        *(_point(s, i, p, x, y) for i, s in enumerate(series) for p in s.drawn),
    ]
    legend = e.tag("div", "".join(_key(s, i) for i, s in enumerate(series)), class_="legend")
    words = "; ".join(f"{s.label}: " + ", ".join(f"{g:.2f} times at {n}" for n, g in s.drawn) for s in series)
    canvas = e.tag("div", "".join(content), class_="canvas", role="img", aria_label=e.shown(words, 2000))
    return e.tag("div", legend + canvas + e.tag("div", e.text(axis), class_="axis-name"), class_="chart")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _thin(ticks: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Ticks that are far enough from each other; earlier ones go first."""
    kept: list[tuple[int, float]] = []
    for tick in ticks:
        if len(kept) < _MOST_TICKS and all(abs(tick[1] - other[1]) >= _NEAREST for other in kept):
            kept.append(tick)
    return sorted(kept)


def _lines(series: Sequence[Series], x: _Scale, y: _Scale, ticks: Sequence[float]) -> str:
    """The grid, the region of losses, and a line for each series."""
    loss = 100 * (1 - y.of(1.0))
    drawn = [f'<rect class="losses" y="{loss:.2f}" width="100" height="{100 - loss:.2f}"/>']
    for gain in ticks:
        kind = "one" if gain == 1.0 else "grid"
        drawn.append(f'<path class="{kind}" d="M0 {100 * (1 - y.of(gain)):.2f}h100"/>')
    for i, s in enumerate(series):
        path = "L".join(f"{100 * x.of(n):.2f} {100 * (1 - y.of(g)):.2f}" for n, g in s.drawn)
        if len(s.drawn) > 1:
            drawn.append(f'<path class="line c{i} {"measured" if s.is_measured else "estimated"}" d="M{path}"/>')
    return f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" aria-hidden="true">{"".join(drawn)}</svg>'


def _point(series: Series, color: int, point: tuple[int, float], x: _Scale, y: _Scale) -> str:
    length, gain = point
    style = f"left:{_percent(x.of(length))};top:{_percent(1 - y.of(gain))}"
    how = "measured" if series.is_measured else "estimated"
    title = e.shown(f"{series.label}: {gain:.2f}× at {length}, {how}")
    dot = e.tag("span", "", class_=f"dot c{color} {how}", style=style, title=title)
    if not series.is_measured:
        return dot
    side = "left" if x.of(length) > 0.5 else "right"
    return dot + e.tag("span", f"{gain:.2f}×", class_=f"mark {side}{' loss' if gain < 1 else ''}", style=style)


def _key(series: Series, color: int) -> str:
    how = "measured" if series.is_measured else "estimated"
    return e.tag("span", e.tag("i", class_=f"key c{color} {how}") + e.text(f"{series.label}, {how}"))
