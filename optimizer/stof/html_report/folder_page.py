# SPDX-License-Identifier: Apache-2.0
"""The page of a folder: a row for each model, then the report of each model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stof.html_report import elements as e
from stof.html_report.page import document, report_parts, result_words
from stof.html_report.run_table import describe_sizes, run_facts
from stof.html_report.speed import is_loss
from stof.html_report.verification_table import verification_words
from stof.report import Report

if TYPE_CHECKING:
    from stof.folder_report import FolderReport

_MOST_MODELS = 40  # whose reports are on the page
_MOST_OPEN = 4  # models whose reports are open at first
_MOST_FILES = 100  # names of other files


def folder_to_html(folder: FolderReport) -> str:
    """The report of a folder as one HTML page; of many models the first ones have their reports on it."""
    name = Path(folder.folder).resolve().name or folder.folder
    models = sorted({*folder.reports, *folder.failures})
    shown = [m for m in models if m in folder.analyzed][:_MOST_MODELS]
    parts = [e.tag("h1", e.text(name)), _summary(folder), e.tag("h2", "Models"), _index(folder, models, shown)]
    parts += [_model_part(folder, m, i, len(shown) <= _MOST_OPEN) for i, m in enumerate(shown)]
    if unlisted := sum(m in folder.analyzed for m in models) - len(shown):
        parts.append(
            e.tag(
                "p",
                e.text(f"The reports of {unlisted} more models are in the report as JSON (--json)."),
                class_="quiet",
            )
        )
    notes = folder.all_notes()
    parts += [e.tag("h2", "Notes") + e.notes(notes)] if notes else []
    parts += [_other_files(folder), _run(folder)]
    return document(f"{name} - stof", "\n".join(filter(None, parts)))


def _summary(folder: FolderReport) -> str:
    replaced = sum(r.has_result for r in folder.reports.values())
    verified = [r.verification for r in folder.analyzed.values() if r.verification is not None]
    count = len(folder.reports) + len(folder.failures)
    cards = [e.card("Models", str(count), f"{replaced} {'can be changed' if folder.dry_run else 'changed'}")]
    if folder.failures:
        cards.append(e.card("Failed", str(len(folder.failures)), "nothing was written", "bad"))
    if verified:
        comparisons = sum(len(v.comparisons) for v in verified)
        complete = all(v.complete for v in verified)
        failed = any(v.failures for v in verified)
        words = f"{comparisons} comparisons{'' if complete else ', some cut short'}"
        cards.append(e.card("Verification", "failed" if failed else "passed", words, "bad" if failed else "good"))
    sizes = [r.facts for r in folder.reports.values() if r.facts is not None]
    written = f"Written: {folder.output}" if folder.output else folder.failure or "No file was written"
    before = sum(f.model_bytes or 0 for f in sizes)
    after = sum(f.output_bytes or 0 for f in sizes)
    if before and folder.facts is not None:
        shown = describe_sizes(folder.facts.with_sizes(before, after or None))
        cards.append(e.card("File size", shown, "of all models, with external data"))
    return e.tag("p", e.text(written, 1000), class_="lede") + e.tag("div", "".join(cards), class_="cards")


def _index(folder: FolderReport, models: list[str], shown: list[str]) -> str:
    """A row for each model; its name leads to its report."""
    rows = []
    for model in models:
        label = e.tag("code", e.text(model))
        name = e.tag("a", label, href=f"#model-{shown.index(model)}") if model in shown else label
        rows.append([e.tag("td", name, class_="text"), *_cells(folder, model)])
    headings = ("model", "result", "measured", "verification", "replaced", "nodes", "file size", "details")
    return e.table(headings, [e.RowGroup(rows)], f"{len(models)} models")


def _cells(folder: FolderReport, model: str) -> list[str]:
    report = folder.analyzed.get(model)
    error = folder.failures.get(model)
    if report is None:
        cells = [e.tag("td", e.pill("failed", "bad"), class_="short"), *[e.tag("td")] * 5]
        return [*cells, e.tag("td", e.text(error or "", 1000), class_="text long")]
    count = sum(len(s.rows) for s in report.sections.values())
    changes = report.nodes_after > 0
    verdict, words, kind = verification_words(report)
    nodes = f"{report.nodes_before} → {report.nodes_after}" if changes else ""
    result = e.pill("failed", "bad") if error else _result(report)
    details = str(error) if error else result_words(report) if not report.has_result else words
    details = ". ".join(filter(None, [details, *report.reasons_kept()]))
    earlier = report.earlier_measurements
    if earlier is not None:
        details += f". Choices: {earlier.to_text()}"
    return [
        e.tag("td", result, class_="short"),
        e.tag("td", _speed(report), class_="short"),
        e.tag("td", e.pill(verdict, kind) if kind else e.text(verdict), class_="short"),
        e.tag("td", e.text(f"{report.replaced} of {count}"), class_="short"),
        e.tag("td", e.text(nodes), class_="short"),
        e.tag("td", e.text(describe_sizes(report.facts)), class_="short"),
        e.tag("td", e.text(details, 1000), class_="text long"),
    ]


def _result(report: Report) -> str:
    if report.has_result:
        return e.pill("can be replaced" if report.dry_run else "replaced", "good")
    return e.pill("copied" if report.copied else "nothing to do", "kept")


def _speed(report: Report) -> str:
    """The measured speed-up of the whole model, and the range of all lengths."""
    if report.times is None:
        return ""
    gains = [t.speedup for t in report.times.lengths]
    least, most = f"{min(gains):.2f}", f"{max(gains):.2f}×"
    return e.tag(
        "b", e.text(most if len(gains) == 1 else f"{least} to {most}"), class_="loss" if is_loss(min(gains)) else ""
    )


def _model_part(folder: FolderReport, model: str, number: int, is_open: bool) -> str:
    """The report of one model, behind its name."""
    content = e.tag("div", report_parts(folder.analyzed[model]), id=f"model-{number}")
    return e.tag("section", e.fold(model, content, is_open), class_="model")


def _other_files(folder: FolderReport) -> str:
    """What else is in the new folder."""
    if folder.output is None:
        return ""
    lines = [*folder.library_lines(), f"{len(folder.others)} other files: copied"]
    names = ", ".join(e.shown(name) for name in folder.others[:_MOST_FILES])
    unlisted = len(folder.others) - _MOST_FILES
    listed = e.tag("p", e.text(f"{names}{f', and {unlisted} more' if unlisted > 0 else ''}", 10_000), class_="quiet")
    return e.tag("h2", "Other files") + e.notes(lines) + (listed if folder.others else "")


def _run(folder: FolderReport) -> str:
    seconds: dict[str, float] = {}
    for report in folder.reports.values():
        for step, spent in report.seconds.items():
            seconds[step] = seconds.get(step, 0.0) + spent
    library = next((r.library for r in folder.analyzed.values()), {})
    return run_facts(folder.facts, {"folder": folder.folder, "output": folder.output or "none"}, seconds, library)
