# SPDX-License-Identifier: Apache-2.0
"""What the report says of fused chains."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from stof.fusion.decide.selection import NAMES
from stof.fusion.plan_entry import ChainPlan
from stof.report import Gain, PageRow, PageTable, Section
from stof.selection import NamedCandidate
from stof.tuning_cache import EarlierMeasurements

KEY = "chains"


@dataclass(frozen=True)
class ChainReport:
    """One chain, or operators that cannot become one.

    Attributes:
        chain: its name.
        operators: the operators, separated by spaces.
        replaced: whether they are replaced.
        reason: why they are not.
        description: what the chain computes.
        gain: time of the replaced operators over the chain's, where it is known.
        measured: whether the gain was measured rather than estimated.
    """

    chain: str
    operators: str
    replaced: bool
    reason: str
    description: str = ""
    gain: float | None = None
    measured: bool = False


@dataclass
class ChainSection(Section):
    """The chains of a model, and operators that are left out of chains.

    Attributes:
        rows: each chain, and each region that is none.
        plans: each region that could become chains, in the order by which options number them.
        tuning: which regions ``--tune`` left out for want of time; empty: none.
        earlier: measurements of earlier runs that decided; None: none did.
    """

    names = NAMES
    rows: list[ChainReport] = field(default_factory=list)
    plans: tuple[ChainPlan, ...] = ()
    tuning: str = ""
    earlier: EarlierMeasurements | None = None

    def to_json(self) -> dict[str, Any]:
        return {KEY: [asdict(row) for row in self.rows]}

    def lines(self) -> list[str]:
        groups: dict[tuple[Any, ...], list[ChainReport]] = defaultdict(list)
        for c in self.rows:
            groups[(c.replaced, c.operators, c.reason, c.gain, c.description)].append(c)
        lines = []
        for group in groups.values():
            first = group[0]
            if first.replaced:
                lines.append(f"  {len(group):3d} x chain of {first.operators}{_gain(first)}")
            else:
                lines.append(f"  kept  {len(group)} x {first.operators}: {first.reason}")
        return lines

    def page_table(self) -> PageTable:
        rows = (
            PageRow(c.chain, c.replaced, (c.operators, _gain(c).removeprefix(", "), "" if c.replaced else c.reason))
            for c in self.rows
        )
        return PageTable("Fused chains", ("operators", "gain", "details"), tuple(rows), frozenset({0}))

    def page_gains(self) -> list[Gain]:
        groups: dict[tuple[str, float, bool], int] = defaultdict(int)
        for c in self.rows:
            if c.replaced and c.gain is not None:
                groups[(c.operators, c.gain, c.measured)] += 1
        return [
            Gain(
                f"chain of {operators}",
                count,
                gain,
                measured,
                "--skip 'chain:NAME' leaves one; --chains off all of them",
            )
            for (operators, gain, measured), count in groups.items()
        ]

    def hints(self) -> list[str]:
        return [f"{self.tuning}; a run with more seconds goes on where this one ended"] if self.tuning else []

    def explain_rows(self, pattern: str) -> list[str]:
        reports = {row.chain: row for row in self.rows}
        chosen = [(i, p) for i, p in enumerate(self.plans) if NamedCandidate(p.chain, i).matches(pattern)]
        return [line for i, p in chosen for line in _explain_region(i, p, reports.get(p.chain))]


def _gain(row: ChainReport) -> str:
    return "" if row.gain is None else f", {'measured' if row.measured else 'estimated'} {row.gain:.2f}x"


def _explain_region(index: int, plan: ChainPlan, row: ChainReport | None) -> list[str]:
    """How far a region got. ``row``: its own, which a region has unless parts of it were replaced."""
    lines = [f"chain {index}  {plan.chain}", f"  match  {plan.operators}"]
    count = len(plan.op_types)
    if not plan.replace:
        reason = plan.reason if row is None else f"{row.reason}{_gain(row)}"
        return [*lines, f"  choice stopped: {reason}"]
    parts = [f"{start} to {end - 1}" for start, end in plan.segments]
    whole = plan.segments == ((0, count),)
    how = "replaced" if whole else f"operators {', '.join(parts)} replaced"
    return [*lines, f"  -> {how}{_gain(row) if row is not None else ''}"]
