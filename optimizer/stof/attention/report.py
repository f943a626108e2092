# SPDX-License-Identifier: Apache-2.0
"""What the report says of attention sites."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from stof.mask.draw_masks import MaskDrawing
from stof.report import Gain, MaskPicture, PageRow, PageTable, Section, TileGrid
from stof.selection import CandidateNames, NamedCandidate
from stof.tuning_cache import EarlierMeasurements

KEY = "sites"
NAMES = CandidateNames("site")
_ADVICE = "--shape NAME=N..M states the lengths in use: sites that lose there stay as they are; --skip SITE leaves one"


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
    """The sites of a model.

    Attributes:
        rows: each site, and each softmax that is none.
        pictures: rows of tiles, by the mask's text, for the terminal and JSON.
        drawings: larger pictures for the report's page, by the mask's text; empty where no page is asked for.
        earlier: measurements of earlier runs that decided; None: none did.
        curves: the estimated gain at several lengths, by a site's name; empty where no page is asked for.
    """

    names = NAMES
    is_explained_by_default = True
    rows: list[SiteReport] = field(default_factory=list)
    pictures: dict[str, list[str]] = field(default_factory=dict)
    drawings: dict[str, MaskDrawing] = field(default_factory=dict)
    earlier: EarlierMeasurements | None = None
    curves: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)

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

    def reasons_by_site(self) -> dict[str, str]:
        return {s.site: "; ".join(s.notes) if s.replaced else s.reason for s in self.rows}

    def page_table(self) -> PageTable:
        columns = ("mask", "heads", "tiles", "estimated", "details")
        return PageTable("Attention sites", columns, tuple(map(_page_row, self.rows)), frozenset({0}), group=0)

    def page_pictures(self) -> list[MaskPicture]:
        return [self._picture(mask, drawing) for mask, drawing in self.drawings.items()]

    def page_gains(self) -> list[Gain]:
        groups: dict[tuple[str, str, int, float], list[str]] = defaultdict(list)
        for s in self.rows:
            if s.replaced and s.predicted_gain is not None:
                groups[(s.family, s.heads, s.length, s.predicted_gain)].append(s.site)
        return [
            Gain(
                f"attention, {family}, {heads}, S = {length}",
                len(names),
                gain,
                False,
                _ADVICE,
                self.curves.get(names[0], ()),
                f"attention, {family}, {heads}",
            )
            for (family, heads, length, gain), names in groups.items()
        ]

    def _picture(self, mask: str, drawing: MaskDrawing) -> MaskPicture:
        rows = [s for s in self.rows if s.replaced and s.mask == mask]
        sizes = {(s.tile_density, s.length): None for s in rows}
        facts = [f"{len(rows)} site{'' if len(rows) == 1 else 's'}"]
        facts += [
            f"{_percent(share)} of tiles computed at S = {length}" for share, length in sizes if share is not None
        ]
        facts += [drawing.note] if drawing.note else []
        title = next((s.family for s in rows), "mask")
        grids = tuple(TileGrid(label, rows) for label, rows in drawing.grids)
        return MaskPicture(title, mask or "every pair", tuple(facts), drawing.length, drawing.length, grids)

    def nothing_to_do(self) -> str:
        return "no attention site is replaced" if self.rows else ""

    def nothing_found(self) -> str:
        return (
            "the graph has no Softmax node, no exponentials divided by their sum and no fused attention node, by which "
            "attention is found"
        )

    def hints(self) -> list[str]:
        if any(s.step is Step.LIFT for s in self.rows):
            return ["--mask SITE=EXPR states a mask that cannot be read off the graph; it is checked"]
        return []

    def explain_rows(self, pattern: str) -> list[str]:
        chosen = [row for row in self.rows if NamedCandidate(row.site, row.index).matches(pattern)]
        return [line for row in chosen for line in _explain_row(row)]


def _group_lines(group: list[SiteReport]) -> list[str]:
    first = group[0]
    if not first.replaced:
        return [f"  kept  {s.site}: {s.reason}" for s in group]
    gain = "" if first.predicted_gain is None else f", estimated {first.predicted_gain:.1f}x at S = {first.length}"
    density = "" if first.tile_density is None else f", {100 * first.tile_density:.1f} % of tiles"
    lines = [
        f"  {len(group):3d} x {first.family}: {first.mask or 'every pair'}",
        f"        {first.heads}, D = {first.head_size}, empty rows: {first.empty_rows}, "
        f"kernel {first.kernel}{density}{gain}",
        f"        {first.form}",
    ]
    lines += [f"        note: {n}" for n in first.notes]
    return lines


def _page_row(s: SiteReport) -> PageRow:
    if not s.replaced:
        return PageRow(s.site, False, (s.mask, s.heads, "", "", f"{s.step.value}: {s.reason}"))
    heads = f"{s.heads}, D = {s.head_size}"
    tiles = "" if s.tile_density is None else _percent(s.tile_density)
    gain = "" if s.predicted_gain is None else f"{s.predicted_gain:.1f}×"
    length = f"tiles and gain at S = {s.length}" if tiles or gain else ""
    words = [f"kernel {s.kernel}", s.form, f"empty rows: {s.empty_rows}", length, *s.notes]
    return PageRow(s.site, True, (s.mask or "every pair", heads, tiles, gain, "; ".join(filter(None, words))))


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _explain_row(s: SiteReport) -> list[str]:
    order = list(Step)
    got = order.index(s.step)
    steps = {
        Step.MATCH: f"{s.heads}, D = {s.head_size}; {s.form}",
        Step.LIFT: f"{s.mask or 'every pair'}  ({s.family})",
        Step.CHECK: "the graph's mask subgraph gives the same at several lengths and paddings",
        Step.KERNEL: s.kernel or "there is one",
        Step.COST: ""
        if s.predicted_gain is None or s.tile_density is None
        else f"{100 * s.tile_density:.1f} % of tiles, {s.predicted_gain:.1f}x estimated at S = {s.length}",
    }
    lines = [f"site {'-' if s.index is None else s.index}  {s.site}"]
    lines += [f"  {step.value:<7}{words}" for step, words in steps.items() if order.index(step) < got]
    lines += [f"  note   {note}" for note in s.notes]
    lines.append("  -> replaced" if s.replaced else f"  {s.step.value:<7}stopped: {s.reason}")
    return lines
