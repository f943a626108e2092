# SPDX-License-Identifier: Apache-2.0
"""What an optimization found and did, for the terminal and as JSON."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from stof import strict_json
from stof.errors import shown
from stof.fusion.apply import ChainReport

if TYPE_CHECKING:
    from stof.verification.compare import Comparison
    from stof.verification.verifier import Verification

_MOST_LINES = 4


class Step(str, enum.Enum):
    """How far a softmax got: the step that kept it as it is, in order, or ``DONE``."""

    MATCH = "match"
    CHOICE = "choice"
    LIFT = "lift"
    CHECK = "check"
    KERNEL = "kernel"
    COST = "cost"
    DONE = "done"


@dataclass(frozen=True)
class SiteReport:
    """One site, or one softmax that is none: that has no ``index``, the number by which options name a site."""

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
class Report:
    """The whole result."""

    model: str
    output: str | None = None
    sites: list[SiteReport] = field(default_factory=list)
    chains: list[ChainReport] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    dry_run: bool = False
    pictures: dict[str, list[str]] = field(default_factory=dict)
    verification: Verification | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    library: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what this installation lacks for the target

    @property
    def replaced(self) -> int:
        """How many sites became StofAttention."""
        return sum(s.replaced for s in self.sites)

    def to_json(self) -> str:
        """Every fact as JSON; errors that are no number are the strings "inf" and "nan"."""
        data = asdict(self)
        if self.verification is not None:
            data["verification"]["ok"] = not self.verification.failures
        return strict_json.dumps(data, indent=2, default=str)

    def to_text(self) -> str:
        """A table by kind of site, a picture of each distinct mask, and what was verified."""
        verb = "can be replaced" if self.dry_run else "replaced"
        lines = [f"{self.model}: {len(self.sites)} softmax, {self.replaced} attention sites {verb}"]
        groups: dict[tuple[Any, ...], list[SiteReport]] = defaultdict(list)
        for s in self.sites:
            groups[(s.replaced, s.mask, s.family, s.heads, s.head_size, s.empty_rows, s.reason, s.length)].append(s)
        for group in groups.values():
            lines.extend(self._group(group))
        lines += self._chains()
        for mask, rows in self.pictures.items():
            lines += ["", f"  {mask or 'every pair'}   (# all, + some, . no pair of a tile)"]
            lines += [f"    {row}" for row in rows]
        if self.nodes_after:
            lines += ["", f"nodes: {self.nodes_before} -> {self.nodes_after}"]
        lines += self._verified()
        if self.output:
            lines.append(f"written: {self.output}")
        elif any(c.replaced for c in self.chains):
            lines.append("dry run: no file was written")
        elif not self.sites:
            lines.append(
                "nothing to do: the graph has no Softmax node, no exponentials divided by their sum and no fused attention "
                "node, by which attention is found; no file was written"
            )
        elif not self.replaced:
            lines.append("nothing to do: no attention site is replaced; no file was written")
        elif self.dry_run:
            lines.append("dry run: no file was written")
        if any(s.step is Step.LIFT for s in self.sites):
            lines.append("hint: --mask SITE=EXPR states a mask that cannot be read off the graph; it is checked")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(map(shown, lines))

    def explain(self, chosen: Sequence[SiteReport] | None = None) -> str:
        """How far each site got, one line for each step that it passed and the reason where it stopped."""
        return "\n".join(shown(line) for s in (self.sites if chosen is None else chosen) for line in _explained(s))

    def _chains(self) -> list[str]:
        groups: dict[tuple[Any, ...], list[ChainReport]] = defaultdict(list)
        for c in self.chains:
            groups[(c.replaced, c.operators, c.reason, c.gain, c.description)].append(c)
        lines = []
        for group in groups.values():
            first = group[0]
            if first.replaced:
                how = "measured" if first.measured else "predicted"
                gain = "" if first.gain is None else f", {how} {first.gain:.2f}x"
                lines.append(f"  {len(group):3d} x chain of {first.operators}{gain}")
            else:
                lines.append(f"  kept  {len(group)} x {first.operators}: {first.reason}")
        return lines

    def _group(self, group: list[SiteReport]) -> list[str]:
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

    def _verified(self) -> list[str]:
        v = self.verification
        if v is None:
            return ["not verified"] if self.output else []
        sites = [c for c in v.comparisons if c.site]
        outputs = [c for c in v.comparisons if not c.site]
        lines = []
        if sites:
            worst = max(sites, key=lambda c: c.difference / c.budget if c.budget else 0.0)
            lines.append(
                f"verified: {len(sites)} sites against fp64, worst error {worst.difference:.2e} of {worst.budget:.2e} allowed; "
                f"{_compared(sites)}"
            )
        if outputs:
            worst = max(outputs, key=lambda c: c.difference / c.budget if c.budget else 0.0)
            lines.append(
                f"verified: {len(outputs)} outputs against the original, worst difference {worst.difference:.2e} of "
                f"{worst.budget:.2e} allowed ({v.seconds:.1f} s{'' if v.complete else ', cut short by the budget'}); "
                f"{_compared(outputs)}"
            )
            lines += _undefined(outputs)
        if v.expanded:
            lines.append(
                "          (ONNX Runtime refuses fused attention nodes of the original: it ran with them expanded to "
                "the nodes that the ONNX standard defines them by)"
            )
        if v.widened:
            lines.append(
                "          (half precision: both ran widened to fp32, the operator of each site in its own type)"
            )
        return lines


def _compared(comparisons: Sequence[Comparison]) -> str:
    """Which elements were compared, and why others were not."""
    given = [c.coverage for c in comparisons]
    elements, compared = sum(c.elements for c in given), sum(c.compared for c in given)
    if compared == elements:
        return "every element was compared"
    reasons = {
        "NaN or infinite in both": sum(c.nonfinite for c in given),
        "NaN in the original alone": sum(c.undefined for c in given),
        "in rows without a key": sum(c.ignored for c in given),
    }
    words = " and ".join(f"{number} are {reason}" for reason, number in reasons.items() if number)
    return f"of {elements} elements {compared} were compared, {words}"


def _undefined(outputs: Sequence[Comparison]) -> list[str]:
    """Where elements are NaN in the original alone."""
    found = [c for c in outputs if c.coverage.undefined]
    lines = []
    for c in found[:_MOST_LINES]:
        rows = c.coverage.rows
        where = (
            f" in batch row{'s' if len(rows) > 1 else ''} {', '.join(str(r) for r in rows[:_MOST_LINES])}"
            if rows
            else ""
        )
        more = " ..." if len(rows) > _MOST_LINES else ""
        lines.append(f"          {c.what}: {c.coverage.undefined} are NaN in the original alone{where}{more}")
    if len(found) > _MOST_LINES:
        lines.append(f"          and {len(found) - _MOST_LINES} more outputs")
    return lines


def _explained(s: SiteReport) -> list[str]:
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
