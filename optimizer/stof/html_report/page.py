# SPDX-License-Identifier: Apache-2.0
"""The page of a report: what was done first, then speed, masks, the candidates of each op, verification, and notes.

It needs no network and no script. It knows ops by their sections alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stof.html_report import elements as e
from stof.html_report.candidates import candidate_table
from stof.html_report.style import STYLE
from stof.html_report.verification_table import verification_part, verification_words
from stof.report import Gain, MaskPicture, Report, Section

if TYPE_CHECKING:
    from stof.verification.model_times import ModelTimes

_MOST_BARS = 24
# Even a text that were not escaped could load nothing and run nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def to_html(report: Report) -> str:
    """The report as one HTML page.

    Its size is bounded: candidates that are alike share a row where there are many, and long lists end with a number.
    """
    title = f"{Path(report.model).name} - stof"
    parts: Sequence[Callable[[Report], str]] = (
        _header,
        _speed_part,
        _mask_part,
        _candidate_parts,
        verification_part,
        _notes_part,
        _details_part,
    )
    body = "\n".join(filter(None, (part(report) for part in parts)))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{e.text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>"
    )


def _header(report: Report) -> str:
    sections = list(report.sections.values())
    headlines = [h for h in (s.headline(report.dry_run) for s in sections) if h]
    lede = [", ".join(headlines), _result_words(report)]
    if report.sparsity is not None:  # outputs change: nothing comes before that
        lede = [report.sparsity.headline, *lede, *map(str.strip, report.sparsity.lines())]
    cards = [_section_card(report, s) for s in sections if s.rows]
    if report.nodes_after:
        change = f"{report.nodes_after - report.nodes_before:+d} in the main graph".replace("-", "−")
        cards.append(e.card("Nodes", f"{report.nodes_before} → {report.nodes_after}", change))
    if report.converted_opset is not None:
        cards.append(e.card("Opset", "{} → {}".format(*report.converted_opset), "the model was converted"))
    cards += [_speed_card(report, sections), _verification_card(report)]
    return "".join(
        [
            e.tag("h1", e.text(Path(report.model).name)),
            *(e.tag("p", e.text(words, 1000), class_="lede") for words in lede if words),
            e.tag("div", "".join(filter(None, cards)), class_="cards"),
        ]
    )


def _result_words(report: Report) -> str:
    if report.output:
        return f"Written: {report.output}"
    if report.verification is not None and report.verification.failures:
        return "Verification failed: no file was written"
    if report.replaced:
        return "No file was written"
    reasons = report.nothing_to_do
    return f"Nothing to do: {reasons}; no file was written" if reasons else "Nothing to do"


def _section_card(report: Report, section: Section) -> str:
    can_be = "can be replaced" if report.dry_run else "replaced"
    return e.card(section.page_table().title, f"{section.replaced} of {len(section.rows)}", can_be)


def _speed_card(report: Report, sections: Sequence[Section]) -> str:
    if report.times is not None:
        return e.card("Measured speed-up", f"{report.times.speedup:.2f}×", f"whole model, {report.times.inputs}")
    gains = [g for s in sections for g in s.page_gains() if not g.measured]
    if not gains:
        return ""
    least, most = min(g.factor for g in gains), max(g.factor for g in gains)
    value = f"{least:.1f}×" if f"{least:.1f}" == f"{most:.1f}" else f"{least:.1f} to {most:.1f}×"
    return e.card("Estimated speed-up", value, "of the replaced nodes alone")


def _verification_card(report: Report) -> str:
    value, more, kind = verification_words(report)
    return e.card("Verification", value, more, kind)


def _speed_part(report: Report) -> str:
    bars = []
    if report.times is not None:
        bars.append(_time_bars("Whole model", report.times))
        if report.times.token is not None:
            bars.append(_time_bars("One token behind a past", report.times.token))
    gains = [g for s in report.sections.values() for g in s.page_gains()]
    bars += [_gain_bars(g) for g in gains[:_MOST_BARS]]
    if not bars:
        return ""
    left = len(gains) - _MOST_BARS
    more = e.tag("p", e.text(f"{left} more kinds are in the tables below."), class_="quiet") if left > 0 else ""
    words = "Best times of alternating runs. " if report.times is not None else ""
    if gains:
        words += "Estimated and measured gains of an operator count the nodes that it replaces, not the whole model."
    lede = e.tag("p", e.text(words), class_="quiet")
    box = e.tag("div", e.tag("div", "".join(bars), class_="bars"), class_="card")
    return f"{e.tag('h2', 'Time before and after')}{lede}{box}{more}"


def _time_bars(what: str, times: ModelTimes) -> str:
    longest = max(times.original.best, times.optimized.best)
    pairs = [("original", times.original.best), ("optimized", times.optimized.best)]
    shares = [(label, seconds / longest, _milliseconds(seconds)) for label, seconds in pairs]
    return _bars(f"{what}, measured in ONNX Runtime, {times.inputs}", f"{times.speedup:.2f}×", shares)


def _gain_bars(gain: Gain) -> str:
    title = f"{gain.count} × {gain.label}"
    how = "measured" if gain.measured else "estimated"
    longest = max(1.0, 1.0 / gain.factor) if gain.factor > 0 else 1.0
    after = 1.0 / gain.factor if gain.factor > 0 else 1.0
    shares = [("before", 1.0 / longest, "100 %"), ("after", after / longest, f"{100 * after:.3g} %")]
    return _bars(title, f"{gain.factor:.2f}× {how}", shares)


def _bars(title: str, factor: str, shares: Sequence[tuple[str, float, str]]) -> str:
    head = e.tag("div", e.tag("span", e.text(title, 160)) + e.tag("b", e.text(factor)), class_="bar-title")
    (first, second) = shares
    return e.tag("div", head + e.bar(*first) + e.bar(*second, "after"))


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


def _mask_part(report: Report) -> str:
    pictures = [p for s in report.sections.values() for p in s.page_pictures()]
    if not pictures:
        return ""
    legend = [("all", "every pair of the tile"), ("some", "some pairs"), ("none", "no pair: skipped")]
    key = e.tag("div", "".join(e.swatch(*entry) for entry in legend), class_="legend")
    return e.tag("h2", "Masks") + key + e.tag("div", "".join(map(_mask_figure, pictures)), class_="masks")


def _mask_figure(picture: MaskPicture) -> str:
    plots = []
    for grid in picture.grids:
        x, y = (
            e.tag(
                "div", e.tag("span", "0") + e.tag("span", f"{word} →") + e.tag("span", str(end)), class_=f"axis {name}"
            )
            for word, end, name in (("key", picture.keys, "x"), ("query", picture.queries, "y"))
        )
        name = e.tag("div", e.text(grid.label), class_="name") if grid.label else ""
        svg = e.tile_grid(grid.rows, f"{picture.title} {picture.mask} {grid.label}".strip())
        plots.append(e.tag("div", name + e.tag("div", x + y + svg, class_="frame"), class_="plot"))
    words = e.tag("h3", e.text(picture.title)) + e.tag("code", e.text(picture.mask))
    listed = e.tag("ul", "".join(e.tag("li", e.text(f)) for f in picture.facts))
    content = e.tag("div", "".join(plots), class_="plots") + e.tag("figcaption", words + listed)
    return e.tag("figure", content, class_="card mask wide" if len(plots) > 1 else "card mask")


def _candidate_parts(report: Report) -> str:
    tables = (s.page_table() for s in report.sections.values())
    return "\n".join(e.tag("h2", e.text(t.title)) + candidate_table(t, report.dry_run) for t in tables if t.rows)


def _notes_part(report: Report) -> str:
    lines = [*(hint for s in report.sections.values() for hint in s.hints()), *report.notes]
    return e.tag("h2", "Notes") + e.notes(lines) if lines else ""


def _details_part(report: Report) -> str:
    steps = {f"step {name}": f"{seconds:.2f} s" for name, seconds in report.seconds.items()}
    library = {f"library: {name}": _joined(value) for name, value in report.library.items()}
    pairs = {"model": report.model, "output": report.output or "none", **steps, **library}
    content = e.tag("summary", "Files, times of the steps, library") + e.facts(pairs)
    return e.tag("h2", "Run") + e.tag("details", content)


def _joined(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
