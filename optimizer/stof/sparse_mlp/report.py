# SPDX-License-Identifier: Apache-2.0
"""What the report says of MLPs whose activation gives zeros."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stof.report import Gain, PageRow, PageTable, Section
from stof.selection import CandidateNames, NamedCandidate

KEY = "mlps"
NAMES = CandidateNames("MLP", "mlp:")


@dataclass(frozen=True)
class MlpReport:
    """An MLP whose activation gives zeros; options name it behind ``mlp:`` by its name or ``index``.

    Attributes:
        density: the share of active neurons in runs of the model on given inputs; None: not measured.
        idle: the share of neurons that never were, and are sorted behind the others; None: the neurons keep their order.
        predicted_gain: the bytes of weights that one token reads in the dense MLP, over those of active neurons.
    """

    mlp: str
    index: int | None
    replaced: bool
    reason: str
    activation: str = ""
    sizes: str = ""
    density: float | None = None
    idle: float | None = None
    predicted_gain: float | None = None


@dataclass
class MlpSection(Section):
    """The report of a model's MLPs whose activation gives zeros; ``rows`` are in the order of the graph."""

    names = NAMES
    is_explained_by_default = True
    rows: list[MlpReport] = field(default_factory=list)

    def without(self, reason: str) -> MlpSection:
        """The section where no MLP is replaced, for one reason."""
        rows = [replace(r, replaced=False, reason=reason, predicted_gain=None) if r.replaced else r for r in self.rows]
        return MlpSection(rows)

    def to_json(self) -> dict[str, Any]:
        return {KEY: [asdict(row) for row in self.rows]}

    def headline(self, dry_run: bool) -> str:
        if not self.rows:
            return ""
        return f"{self.replaced} of {len(self.rows)} MLPs with zeros {'can be replaced' if dry_run else 'replaced'}"

    def lines(self) -> list[str]:
        groups: dict[tuple[Any, ...], list[MlpReport]] = defaultdict(list)
        for r in self.rows:
            groups[(r.replaced, r.reason, r.activation, r.sizes)].append(r)
        return [line for group in groups.values() for line in _group_lines(group)]

    def page_table(self) -> PageTable:
        columns = ("activation", "size", "active", "predicted", "details")
        return PageTable("MLPs with zeros", columns, tuple(map(_page_row, self.rows)))

    def page_gains(self) -> list[Gain]:
        groups: dict[tuple[str, str], list[float]] = defaultdict(list)
        for r in self.rows:
            if r.replaced and r.predicted_gain is not None:
                groups[(r.activation, r.sizes)].append(r.predicted_gain)
        return [
            Gain(f"one token, MLP with {activation}, {sizes}", len(gains), sum(gains) / len(gains), False)
            for (activation, sizes), gains in groups.items()
        ]

    def explain_rows(self, pattern: str) -> list[str]:
        chosen = [r for r in self.rows if NamedCandidate(r.mlp, r.index).matches(pattern)]
        return [line for row in chosen for line in _explained_lines(row)]


def _active(rows: Sequence[MlpReport]) -> str:
    """How many neurons were active, for people."""
    shares = [100 * r.density for r in rows if r.density is not None]
    if not shares:
        return "active neurons not measured: --inputs gives runs to count them in"
    low, high = f"{min(shares):.1f}", f"{max(shares):.1f}"
    return f"{low if low == high else f'{low} to {high}'} % of the neurons active on the given inputs"


def _idle(rows: Sequence[MlpReport]) -> str:
    """How many neurons never fired, for people."""
    shares = [100 * r.idle for r in rows if r.idle is not None]
    if not shares:
        return ""
    low, high = f"{min(shares):.1f}", f"{max(shares):.1f}"
    return f"{low if low == high else f'{low} to {high}'} % never, which lie together at the end of the weights"


def _gain(rows: Sequence[MlpReport]) -> str:
    gains = [r.predicted_gain for r in rows if r.predicted_gain is not None]
    return f"predicted {sum(gains) / len(gains):.1f}x for one token" if gains else ""


def _group_lines(group: list[MlpReport]) -> list[str]:
    first = group[0]
    if not first.replaced:
        return [f"  kept  {r.mlp}: {r.reason}" for r in group]
    facts = ", ".join(filter(None, [_active(group), _idle(group), _gain(group)]))
    return [f"  {len(group):3d} x MLP with zeros of {first.activation}: {first.sizes}", f"        {facts}"]


def _page_row(row: MlpReport) -> PageRow:
    active = "" if row.density is None else f"{100 * row.density:.1f} %"
    gain = "" if row.predicted_gain is None else f"{row.predicted_gain:.1f}×"
    return PageRow(row.mlp, row.replaced, (row.activation, row.sizes, active, gain, "" if row.replaced else row.reason))


def _explained_lines(row: MlpReport) -> list[str]:
    lines = [f"MLP {'-' if row.index is None else row.index}  {row.mlp}"]
    if row.sizes:
        lines.append(f"  match  {row.sizes}, zeros of {row.activation}")
        lines.append(f"  active {_active([row])}")
    if row.idle is not None:
        lines.append(f"  idle   {_idle([row])}")
    if row.predicted_gain is not None:
        lines.append(f"  cost   {_gain([row])}")
    lines.append("  -> replaced" if row.replaced else f"  stopped: {row.reason}")
    return lines
