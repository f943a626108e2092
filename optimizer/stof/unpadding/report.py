# SPDX-License-Identifier: Apache-2.0
"""What the report says of key padding masks, and of what they pad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stof.report import Gain, PageRow, PageTable, Section
from stof.selection import CandidateNames, NamedCandidate

KEY = "unpadding"
NAMES = CandidateNames("padding mask", "unpad:")
PADDING = (0.0, 0.5, 0.75, 0.85)  # shares of padding that gains are estimated for

_USUAL = 0.5  # of these, the share of the page's bar


@dataclass(frozen=True)
class UnpadReport:
    """A key padding mask, and what it pads; options name it behind ``unpad:`` by the tensor of its mask or by ``index``.

    Attributes:
        batch: the tensor of the key padding mask.
        nodes: how many nodes run on real tokens alone.
        attentions: how many attentions do.
        of_attentions: how many attentions read the mask.
        keys_only: attentions between another text and the real tokens of this one.
        gains: the estimated time with padding over that without, at each share of ``padding``; empty where nothing is known.
        padding: shares of all rows that are assumed to be padding.
        zero_outputs: outputs whose rows of padding are 0, as ``--unpad on`` allows.
        rest: why other attentions under the mask stay padded; empty where none does.
        capacity: the number of tokens that there is room for in every run; 0: as much as a run has.
        assumption: under which other numbers of the mask than one are padding; empty where they are not.
    """

    batch: str
    index: int | None
    replaced: bool
    reason: str
    nodes: int = 0
    attentions: int = 0
    of_attentions: int = 0
    keys_only: int = 0
    gains: tuple[float, ...] = ()
    padding: tuple[float, ...] = PADDING
    zero_outputs: tuple[str, ...] = ()
    rest: str = ""
    capacity: int = 0
    assumption: str = ""


@dataclass
class UnpadSection(Section):
    """The report of a model's padded batches, a row for each mask, in the order of the graph."""

    names = NAMES
    rows: list[UnpadReport] = field(default_factory=list)

    def without(self, reason: str) -> UnpadSection:
        """The section where no batch is unpadded, for one reason."""
        rows = [
            UnpadReport(r.batch, r.index, False, reason, of_attentions=r.of_attentions) if r.replaced else r
            for r in self.rows
        ]
        return replace(self, rows=rows)

    @property
    def candidates_words(self) -> str:
        return "padding masks"

    @property
    def changes_outputs(self) -> bool:
        return any(r.replaced and r.zero_outputs for r in self.rows)

    @property
    def verified_form(self) -> str:
        return "with rows of padding 0 in the original, too"

    def to_json(self) -> dict[str, Any]:
        return {KEY: [asdict(row) for row in self.rows]}

    def headline(self, dry_run: bool) -> str:
        done = [r for r in self.rows if r.replaced]
        if not done:
            return ""
        nodes = sum(r.nodes for r in done)
        zeros = sorted({n for r in done for n in r.zero_outputs})
        changed = f"ROWS OF PADDING BECOME 0 in {', '.join(zeros)}: " if zeros else ""
        return f"{changed}{nodes} nodes {'can run' if dry_run else 'run'} on real tokens alone"

    def reasons_kept(self) -> list[str]:
        kept = [f"padding of {r.batch} stays: {r.reason}" for r in self.rows if not r.replaced]
        return kept + [f"padding of {r.batch} stays in part: {r.rest}" for r in self.rows if r.replaced and r.rest]

    def lines(self) -> list[str]:
        return [line for row in self.rows for line in _row_lines(row)]

    def page_table(self) -> PageTable:
        rows = tuple(PageRow(r.batch, r.replaced, (_facts(r) if r.replaced else r.reason,)) for r in self.rows)
        return PageTable("Padding masks", ("details",), rows)

    def page_gains(self) -> Sequence[Gain]:
        return [
            Gain(
                f"batches padded by half, mask {r.batch}",
                r.nodes,
                r.gains[r.padding.index(_USUAL)],
                False,
                "--unpad off leaves the padding",
            )
            for r in self.rows
            if r.replaced and r.gains
        ]

    def explain_rows(self, pattern: str) -> list[str]:
        chosen = [r for r in self.rows if NamedCandidate(r.batch, r.index).matches(pattern)]
        return [line for row in chosen for line in _explain_row(row)]


def _facts(row: UnpadReport) -> str:
    words = [f"{row.nodes} nodes, {row.attentions} of {row.of_attentions} attentions"]
    if row.keys_only:
        words.append(f"keys and values alone of {row.keys_only} more")
    if row.capacity:
        words.append(f"room for {row.capacity} tokens in every run")
    if row.gains:
        estimates = (f"{gain:.1f}x at {share:.0%}" for share, gain in zip(row.padding, row.gains, strict=True))
        words.append(f"estimated {', '.join(estimates)} padding")
    return ", ".join(words)


def _row_lines(row: UnpadReport) -> list[str]:
    if not row.replaced:
        return [f"  kept  padding of {row.batch}: {row.reason}"]
    lines = [f"  real tokens alone, by {row.batch}: {_facts(row)}"]
    if row.zero_outputs:
        lines.append(f"        rows of padding are 0 in {', '.join(row.zero_outputs)}")
    if row.assumption:
        lines.append(f"        {row.assumption}")
    return [*lines, f"        the rest is padded: {row.rest}"] if row.rest else lines


def _explain_row(row: UnpadReport) -> list[str]:
    lines = [f"padding mask {'-' if row.index is None else row.index}  {row.batch}"]
    if row.replaced:
        more = [f"  assume {row.assumption}"] if row.assumption else []
        more += [f"  rest   {row.rest}"] if row.rest else []
        return [*lines, f"  match  {_facts(row)}", *more, "  -> replaced"]
    return [*lines, f"  stopped: {row.reason}"]
