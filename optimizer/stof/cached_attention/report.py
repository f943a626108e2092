# SPDX-License-Identifier: Apache-2.0
"""What the report says of attention over a KV cache."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stof.report import Gain, MaskPicture, PageRow, PageTable, Section
from stof.selection import CandidateNames, NamedCandidate

KEY = "caches"
NAMES = CandidateNames("cache", "cache:")


@dataclass(frozen=True)
class CacheReport:
    """A GroupQueryAttention with a cache; options name it behind ``cache:`` by its name or ``index``."""

    cache: str
    index: int | None
    replaced: bool
    reason: str
    mask: str = ""
    heads: str = ""
    head_size: int = 0
    features: tuple[str, ...] = ()
    predicted_gain: float | None = None
    length: int = 0  # keys before the new token at which the gain is given


@dataclass
class CacheSection(Section):
    """The report of a model's GroupQueryAttention nodes with a KV cache.

    Attributes:
        rows: a row for each, in the order of the graph.
        pictures: of the distinct masks for the report's page; empty where no page is asked for.
        curves: the estimated gain at several lengths, by a cache's name; likewise.
    """

    names = NAMES
    is_explained_by_default = True
    rows: list[CacheReport] = field(default_factory=list)
    pictures: list[MaskPicture] = field(default_factory=list)
    curves: dict[str, tuple[tuple[int, float], ...]] = field(default_factory=dict)

    def without(self, reason: str) -> CacheSection:
        """The section where no node is replaced, for one reason."""
        rows = [replace(r, replaced=False, reason=reason, predicted_gain=None) if r.replaced else r for r in self.rows]
        return CacheSection(rows)

    def to_json(self) -> dict[str, Any]:
        return {KEY: [asdict(row) for row in self.rows]}

    @property
    def candidates_words(self) -> str:
        return "attentions over a KV cache"

    def headline(self, dry_run: bool) -> str:
        if not self.rows:
            return ""
        can_be = "can be replaced" if dry_run else "replaced"
        return f"{self.replaced} of {len(self.rows)} {self.candidates_words} {can_be}"

    def lines(self) -> list[str]:
        groups: dict[tuple[Any, ...], list[CacheReport]] = defaultdict(list)
        for r in self.rows:
            groups[(r.replaced, r.reason, r.mask, r.heads, r.head_size, r.features, r.predicted_gain)].append(r)
        return [line for group in groups.values() for line in _group_lines(group)]

    def page_table(self) -> PageTable:
        columns = ("mask", "heads", "estimated", "details")
        return PageTable(
            "Attention over a KV cache", columns, tuple(map(_page_row, self.rows)), frozenset({0}), group=0
        )

    def page_pictures(self) -> Sequence[MaskPicture]:
        return self.pictures

    def page_gains(self) -> list[Gain]:
        groups: dict[tuple[str, str, int, float], list[str]] = defaultdict(list)
        for r in self.rows:
            if r.replaced and r.predicted_gain is not None:
                groups[(r.mask, r.heads, r.length, r.predicted_gain)].append(r.cache)
        return [
            Gain(
                f"one token over a cache of {length} keys, {mask}, {heads}",
                len(names),
                gain,
                False,
                "--skip cache:NAME leaves one as it is",
                self.curves.get(names[0], ()),
                f"one token over a cache, {mask}, {heads}",
            )
            for (mask, heads, length, gain), names in groups.items()
        ]

    def explain_rows(self, pattern: str) -> list[str]:
        chosen = [r for r in self.rows if NamedCandidate(r.cache, r.index).matches(pattern)]
        return [line for row in chosen for line in _explain_row(row)]


def _gain(row: CacheReport) -> str:
    return "" if row.predicted_gain is None else f"estimated {row.predicted_gain:.1f}x at {row.length} keys"


def _group_lines(group: list[CacheReport]) -> list[str]:
    first = group[0]
    if not first.replaced:
        return [f"  kept  {r.cache}: {r.reason}" for r in group]
    facts = ", ".join(filter(None, [first.heads, f"D = {first.head_size}", *first.features, _gain(first)]))
    return [f"  {len(group):3d} x attention over a KV cache: {first.mask}", f"        {facts}"]


def _page_row(row: CacheReport) -> PageRow:
    if not row.replaced:
        return PageRow(row.cache, False, (row.mask, row.heads, "", row.reason))
    heads = f"{row.heads}, D = {row.head_size}"
    gain = "" if row.predicted_gain is None else f"{row.predicted_gain:.1f}×"
    words = [*row.features, f"gain of one token at {row.length} keys" if gain else ""]
    return PageRow(row.cache, True, (row.mask, heads, gain, "; ".join(filter(None, words))))


def _explain_row(row: CacheReport) -> list[str]:
    lines = [f"cache {'-' if row.index is None else row.index}  {row.cache}"]
    if row.heads:
        lines.append(f"  match  {', '.join([row.heads, f'D = {row.head_size}', *row.features])}")
        lines.append(f"  mask   {row.mask}")
    if row.predicted_gain is not None:
        lines.append(f"  cost   {_gain(row)}")
    lines.append("  -> replaced" if row.replaced else f"  stopped: {row.reason}")
    return lines
