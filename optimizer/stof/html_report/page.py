# SPDX-License-Identifier: Apache-2.0
"""The page of a report: what was done first, then speed, masks, the candidates of each op, verification, and notes.

It needs no network and no script. It knows ops by their sections alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from stof.html_report import elements as e
from stof.html_report.candidates import candidate_table
from stof.html_report.masks import mask_part
from stof.html_report.memory import memory_card, memory_part
from stof.html_report.run_table import describe_sizes, run_facts
from stof.html_report.speed import speed_card, speed_part
from stof.html_report.style import STYLE
from stof.html_report.verification_table import verification_part, verification_words
from stof.report import Report, Section

# Even a text that were not escaped could load nothing and run nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def to_html(report: Report) -> str:
    """The report as one HTML page.

    Its size is bounded: candidates that are alike share a row, and long lists end with a number.
    """
    name = Path(report.model).name
    content = "\n".join(filter(None, [e.tag("h1", e.text(name)), report_parts(report), _run_part(report)]))
    return document(f"{name} - stof", content)


def document(title: str, content: str) -> str:
    """A whole page around its content; ``title`` is plain text."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{e.text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{content}\n</main>\n</body>\n</html>"
    )


def report_parts(report: Report) -> str:
    """All of a report but its title and the facts of its run, which the models of a folder share."""
    parts: Sequence[Callable[[Report], str]] = (
        _summary_part,
        speed_part,
        mask_part,
        _candidate_parts,
        memory_part,
        verification_part,
        _notes_part,
    )
    return "\n".join(filter(None, (part(report) for part in parts)))


def _summary_part(report: Report) -> str:
    sections = list(report.sections.values())
    headlines = [h for h in (s.headline(report.dry_run) for s in sections) if h]
    lede = [", ".join(headlines), result_words(report)]
    if report.dequantized is not None:
        lede = [report.dequantized.headline, *lede, *map(str.strip, report.dequantized.lines())]
    if report.sparsity is not None:  # outputs change: nothing comes before that
        lede = [report.sparsity.headline, *lede, *map(str.strip, report.sparsity.lines())]
    if report.attention_precision is not None:
        lede = [report.attention_precision.headline, *lede, *map(str.strip, report.attention_precision.lines())]
    lede += [line for s in sections for line in s.loss_headlines]
    cards = [_section_card(report, s) for s in sections if s.rows]
    if report.nodes_after:
        change = f"{report.nodes_after - report.nodes_before:+d} in the main graph".replace("-", "−")
        cards.append(e.card("Nodes", f"{report.nodes_before} → {report.nodes_after}", change))
    if report.converted_opset is not None:
        cards.append(e.card("Opset", "{} → {}".format(*report.converted_opset), "the model was converted"))
    cards += [speed_card(report), memory_card(report), _verification_card(report), _size_card(report)]
    earlier = report.earlier_measurements
    return "".join(
        [
            *(e.tag("p", e.text(words, 1000), class_="lede") for words in lede if words),
            e.callout(report.failure, "bad") if report.failure else "",
            e.tag("div", "".join(filter(None, cards)), class_="cards"),
            "" if earlier is None else e.callout(f"Choices: {earlier.to_text()}"),
        ]
    )


def result_words(report: Report) -> str:
    """What was written, or why nothing was."""
    reasons = report.nothing_to_do
    if report.copied:
        return f"Nothing to do: {reasons}; the model was copied as it is: {report.output}"
    if report.output:
        return f"Written: {report.output}"
    if report.failure or (report.verification is not None and report.verification.failures):
        return "Verification failed: no file was written"
    if report.has_result:
        return "No file was written"
    return f"Nothing to do: {reasons}; no file was written" if reasons else "Nothing to do"


def _section_card(report: Report, section: Section) -> str:
    can_be = "can be replaced" if report.dry_run else "replaced"
    return e.card(section.page_table().title, f"{section.replaced} of {len(section.rows)}", can_be)


def _verification_card(report: Report) -> str:
    value, more, kind = verification_words(report)
    return e.card("Verification", value, more, kind)


def _size_card(report: Report) -> str:
    words = describe_sizes(report.facts)
    return e.card("File size", words, "with external data") if words else ""


def _candidate_parts(report: Report) -> str:
    tables = (s.page_table() for s in report.sections.values())
    return "\n".join(e.tag("h2", e.text(t.title)) + candidate_table(t, report.dry_run) for t in tables if t.rows)


def _notes_part(report: Report) -> str:
    lines = [*(hint for s in report.sections.values() for hint in s.hints()), *report.notes]
    return e.tag("h2", "Notes") + e.notes(lines) if lines else ""


def _run_part(report: Report) -> str:
    files = {"model": report.model, "output": report.output or "none"}
    if report.how_to_run:
        files["to run it"] = report.how_to_run
    return run_facts(report.facts, files, report.seconds, report.library)
