# SPDX-License-Identifier: Apache-2.0
"""What the report says of attention sites."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from stof.report import Section
from stof.selection import CandidateNames, NamedCandidate

KEY = "sites"
NAMES = CandidateNames("site")


class Step(enum.StrEnum):
    """The step at which a softmax was left as it is, in order, or ``DONE``."""

    MATCH = "match"
    CHOICE = "choice"
    LIFT = "lift"
    CHECK = "check"
    KERNEL = "kernel"
    COST = "cost"
    DONE = "done"


@dataclass(frozen=True)
class SiteReport:
    """A site, or a softmax that is not attention, whose ``index`` is None; options name a site by its index."""

    site: str
    replaced: bool
    reason: str
    form: str = ""
    mask: str = ""
    family: str = ""
    heads: str = ""
    head_size: int = 0
    empty_rows: str = ""
    kernel: str = ""
    tile_density: float | None = None
    predicted_gain: float | None = None
    notes: tuple[str, ...] = ()
    index: int | None = None
    step: Step = Step.MATCH
    length: int = 0  # S = T at which density and gain are given


@dataclass
class SiteSection(Section):
    """The sites of a model, and pictures of their masks: rows of tiles, by the mask's text."""

    names = NAMES
    rows: list[SiteReport] = field(default_factory=list)
    pictures: dict[str, list[str]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {KEY: [asdict(row) for row in self.rows], "pictures": self.pictures}

    def headline(self, dry_run: bool) -> str:
        return (
            f"{len(self.rows)} softmax, {self.replaced} attention sites {'can be replaced' if dry_run else 'replaced'}"
        )

    def lines(self) -> list[str]:
        groups: dict[tuple[Any, ...], list[SiteReport]] = defaultdict(list)
        for s in self.rows:
            groups[(s.replaced, s.mask, s.family, s.heads, s.head_size, s.empty_rows, s.reason, s.length)].append(s)
        return [line for group in groups.values() for line in _group_lines(group)]

    def mask_pictures(self) -> list[str]:
        lines: list[str] = []
        for mask, rows in self.pictures.items():
            lines += ["", f"  {mask or 'every pair'}   (# all, + some, . no pair of a tile)"]
            lines += [f"    {row}" for row in rows]
        return lines

    def nothing_to_do(self) -> str:
        if not self.rows:
            return (
                "the graph has no Softmax node, no exponentials divided by their sum and no fused attention node, by which "
                "attention is found"
            )
        return "no attention site is replaced"

    def hints(self) -> list[str]:
        if any(s.step is Step.LIFT for s in self.rows):
            return ["--mask SITE=EXPR states a mask that cannot be read off the graph; it is checked"]
        return []

    def explain_rows(self, pattern: str) -> list[str]:
        chosen = [row for row in self.rows if NamedCandidate(row.site, row.index).matches(pattern)]
        return [line for row in chosen for line in _explained_lines(row)]


def _group_lines(group: list[SiteReport]) -> list[str]:
    first = group[0]
    if not first.replaced:
        return [f"  kept  {s.site}: {s.reason}" for s in group]
    gain = "" if first.predicted_gain is None else f", predicted {first.predicted_gain:.1f}x at S = {first.length}"
    density = "" if first.tile_density is None else f", {100 * first.tile_density:.1f} % of tiles"
    lines = [
        f"  {len(group):3d} x {first.family}: {first.mask or 'every pair'}",
        f"        {first.heads}, D = {first.head_size}, empty rows: {first.empty_rows}, "
        f"kernel {first.kernel}{density}{gain}",
        f"        {first.form}",
    ]
    lines += [f"        note: {n}" for n in first.notes]
    return lines


def _explained_lines(s: SiteReport) -> list[str]:
    order = list(Step)
    got = order.index(s.step)
    steps = {
        Step.MATCH: f"{s.heads}, D = {s.head_size}; {s.form}",
        Step.LIFT: f"{s.mask or 'every pair'}  ({s.family})",
        Step.CHECK: "the graph's mask subgraph gives the same at several lengths and paddings",
        Step.KERNEL: s.kernel or "there is one",
        Step.COST: ""
        if s.predicted_gain is None or s.tile_density is None
        else f"{100 * s.tile_density:.1f} % of tiles, {s.predicted_gain:.1f}x predicted at S = {s.length}",
    }
    lines = [f"site {'-' if s.index is None else s.index}  {s.site}"]
    lines += [f"  {step.value:<7}{words}" for step, words in steps.items() if order.index(step) < got]
    lines += [f"  note   {note}" for note in s.notes]
    lines.append("  -> replaced" if s.replaced else f"  {s.step.value:<7}stopped: {s.reason}")
    return lines
