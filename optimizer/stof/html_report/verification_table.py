# SPDX-License-Identifier: Apache-2.0
"""Verification on the page: one line for the summary, and a table of comparisons, failures first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from stof.html_report import elements as e
from stof.report import Report
from stof.verification.describe import (
    describe_coverage,
    describe_how_run,
    describe_padding,
    describe_partial,
    describe_reduced_inputs,
    describe_unread,
)

if TYPE_CHECKING:
    from stof.verification.result import Comparison, Verification

_MOST_ROWS = 300
_MOST_DECISIONS = 20
_MOST_SKIPPED = 12
_MOST_VISIBLE = 20  # rows that stay visible: failures first, then the largest shares


def verification_words(report: Report) -> tuple[str, str, str]:
    """The value of the summary's card, the words below it, and the card's kind."""
    verification = report.verification
    if verification is None:
        return (
            "not verified",
            "a dry run" if report.dry_run else "" if report.has_result else "nothing was replaced",
            "",
        )
    count = sum(c.comparable for c in verification.comparisons)
    if failed := len(verification.failures):
        return "failed", f"{failed} of {count} comparisons", "bad"
    if verification.partial is not None:
        return "in part", f"{count} comparisons of sites; the original does not run here", ""
    cut = "" if verification.complete else ", cut short"
    return "passed", f"{count} comparisons in {verification.seconds:.1f} s{cut}", "good"


def verification_part(report: Report) -> str:
    """The comparisons as a table; empty where there are none."""
    verification = report.verification
    if verification is None or not verification.comparisons:
        return ""
    ranked = sorted(verification.comparisons, key=lambda c: (c.ok, not c.site, -_share(c)))
    rows = [_row(c) for c in ranked[:_MOST_ROWS]]
    remaining = ranked[_MOST_ROWS:]
    worst_remaining = max(map(_share, remaining), default=0.0)
    more = f"{len(remaining)} more comparisons, the worst at {100 * worst_remaining:.3g} % of what is allowed."
    headings = ("result", "what", "difference", "allowed", "share", "compared")
    worst = max(map(_share, ranked))
    hidden = len(rows) > _MOST_VISIBLE
    summary = f"{len(ranked)} comparisons, the worst at {100 * worst:.3g} % of what is allowed"
    return "".join(
        [
            e.tag("h2", "Verification"),
            *(e.tag("p", e.text(words, 2000), class_="quiet") for words in _sentences(verification)),
            e.table(headings, [e.RowGroup(rows[:_MOST_VISIBLE])], summary),
            e.fold(f"{summary}: the others", e.table(headings, [e.RowGroup(rows[_MOST_VISIBLE:])], ""))
            if hidden
            else "",
            e.tag("p", e.text(more), class_="quiet") if remaining else "",
        ]
    )


def _sentences(verification: Verification) -> list[str]:
    alone = [c for c in verification.comparisons if c.site and not c.comparable]
    sites = sum(bool(c.site) for c in verification.comparisons)
    words = [
        f"{sites - len(alone)} comparisons of single sites with fp64, {len(verification.comparisons) - sites} of outputs "
        "with the original's."
    ]
    if alone:
        words.append(f"Compared by the model's outputs alone: {len(alone)} sites.")
    if verification.partial is not None:
        words = [*map(_sentence, describe_partial(verification.partial)), *words]
    elif not verification.complete:
        words.append("A limit ended verification before all inputs were run (--verify-budget, --verify-memory).")
    if verification.skipped:
        ran = f"{len(verification.cases)} of {len(verification.cases) + len(verification.skipped)} sets of inputs were compared"
        hidden = len(verification.skipped) - _MOST_SKIPPED
        skipped = "; ".join(f"{s.case} ({s.reason})" for s in verification.skipped[:_MOST_SKIPPED])
        words.append(f"{ran}; not {skipped}{f'; and {hidden} more' if hidden > 0 else ''}.")
    if verification.sites_left:
        words.append(f"No time was left to compare {verification.sites_left} sites by themselves.")
    facts = [describe_unread(verification)] if verification.unread else []
    facts += [describe_reduced_inputs(verification)] if verification.reduced_inputs else []
    words += map(_sentence, facts)
    if others := sum(not c.comparable and not c.site for c in verification.comparisons):
        words.append(
            f"{others} outputs are not comparable: the original's own runs differ by as much as the numbers vary."
        )
    for decision in verification.decisions[:_MOST_DECISIONS]:
        verdict = "as in the original's own runs" if decision.explained else "more than in the original's own runs"
        words.append(f"Decided by rounding, {verdict}: {decision.case}: {decision.to_text()}.")
    words += map(_sentence, describe_how_run(verification))
    words += map(_sentence, describe_padding(verification))
    if verification.suspects:
        words.append(f"Sites that make outputs differ together: {', '.join(verification.suspects)}.")
    return words


def _sentence(fact: str) -> str:
    return f"{fact[:1].upper()}{fact[1:]}."


def _share(comparison: Comparison) -> float:
    """The difference over what is allowed."""
    if not comparison.difference and comparison.ok:
        return 0.0
    share = comparison.difference / comparison.budget if comparison.budget else math.inf
    return math.inf if math.isnan(share) else share


def _row(comparison: Comparison) -> list[str]:
    share = _share(comparison)
    width = f"width:{100 * min(1.0, share):.1f}%"
    meter = e.tag("span", e.tag("i", class_="" if share <= 1 else "over", style=width), class_="meter")
    percent = f"{100 * share:.3g} %" if math.isfinite(share) else "over"
    what = e.text(comparison.what) + (
        e.tag("div", e.text(comparison.detail, 1000), class_="quiet") if comparison.detail else ""
    )
    coverage = describe_coverage([comparison])
    return [
        e.tag("td", _verdict(comparison), class_="short"),
        e.tag("td", what, class_="text long"),
        e.tag("td", f"{comparison.difference:.2e}", class_="number"),
        e.tag("td", f"{comparison.budget:.2e}", class_="number"),
        e.tag("td", meter + percent, class_="short share"),
        e.tag("td", e.text(coverage), class_="text"),
    ]


def _verdict(comparison: Comparison) -> str:
    if not comparison.ok:
        return e.pill("failed", "bad")
    return e.pill("passed", "good") if comparison.comparable else e.pill("not comparable", "")
