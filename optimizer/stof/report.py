# SPDX-License-Identifier: Apache-2.0
"""What an optimization found and did, for the terminal and as JSON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from stof import strict_json
from stof.errors import shown
from stof.selection import CandidateNames, owner_of

if TYPE_CHECKING:
    from stof.verification.result import Comparison, Verification

_MAX_LINES = 4


class Row(Protocol):
    """One candidate of an op."""

    @property
    def replaced(self) -> bool:
        """Whether it became a node of the op."""

    @property
    def reason(self) -> str:
        """Why it was replaced or left."""


class Section(ABC):
    """What the report says of one op: a row for each candidate, and how rows are written.

    Attributes:
        names: how options and messages name the op's candidates.
        rows: a row for each candidate, and for others that are none for a reason.
    """

    names: ClassVar[CandidateNames]
    rows: Sequence[Row]

    @property
    def replaced(self) -> int:
        """How many candidates were replaced."""
        return sum(row.replaced for row in self.rows)

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The rows, and other facts of the op, by their keys in the report's JSON."""

    @abstractmethod
    def lines(self) -> list[str]:
        """A line or a few for each kind of row."""

    def headline(self, dry_run: bool) -> str:
        """The section in the report's first line; or empty."""
        return ""

    def mask_pictures(self) -> list[str]:
        """Lines below the rows of all sections."""
        return []

    def nothing_to_do(self) -> str:
        """Why no candidate is replaced; empty where other sections say it."""
        return ""

    def hints(self) -> list[str]:
        """What the user may try."""
        return []

    def explain_rows(self, pattern: str) -> list[str]:
        """How far the candidates that a pattern (without the op's prefix) names got, for ``--explain``."""
        return []


@dataclass
class Report:
    """The whole result. ``sections`` are by the key of their op, in the order of ``stof.ops``."""

    model: str
    output: str | None = None
    copied: bool = False  # nothing was replaced: the output is a copy of the model
    sections: dict[str, Section] = field(default_factory=dict)
    nodes_before: int = 0
    nodes_after: int = 0
    dry_run: bool = False
    verification: Verification | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    library: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what this installation lacks for the target

    def rows(self, key: str) -> list[Any]:
        """The rows of an op by its key; empty where the op looked for nothing."""
        return list(self.sections[key].rows) if key in self.sections else []

    @property
    def sites(self) -> list[Any]:
        """The rows of attention sites (:class:`stof.attention.report.SiteReport`)."""
        return self.rows("sites")

    @property
    def chains(self) -> list[Any]:
        """The rows of fused chains (:class:`stof.fusion.apply.ChainReport`)."""
        return self.rows("chains")

    @property
    def pictures(self) -> dict[str, list[str]]:
        """Pictures of the masks by their text: rows of tiles."""
        found: dict[str, list[str]] = self.sections["sites"].to_json()["pictures"] if "sites" in self.sections else {}
        return found

    @property
    def replaced(self) -> int:
        """How many candidates of all ops were replaced."""
        return sum(section.replaced for section in self.sections.values())

    def to_json(self) -> str:
        """Every fact as JSON; errors that are no number are the strings "inf" and "nan"."""
        data: dict[str, Any] = {"model": self.model, "output": self.output}
        for section in self.sections.values():
            data |= section.to_json()
        own = ("copied", "nodes_before", "nodes_after", "dry_run", "verification", "seconds", "library", "notes")
        data |= {name: getattr(self, name) for name in own}
        if self.verification is not None:
            data["verification"] = {**asdict(self.verification), "ok": not self.verification.failures}
        return strict_json.dumps(data, indent=2, default=str)

    def to_text(self) -> str:
        """A table by kind of candidate, a picture of each distinct mask, and what was verified."""
        sections = self.sections.values()
        lines = [f"{self.model}: {self._headline()}"]
        lines += [line for s in sections for line in s.lines()]
        lines += [line for s in sections for line in s.mask_pictures()]
        if self.nodes_after:
            lines += ["", f"nodes: {self.nodes_before} -> {self.nodes_after}"]
        lines += self._verification_lines()
        reasons = self._nothing_to_do()
        if self.copied:
            lines.append(f"nothing to do: {reasons}; the model was copied as it is")
        if self.output:
            lines.append(f"written: {self.output}")
        elif self.replaced:
            lines.append("dry run: no file was written" if self.dry_run else "the optimized model is returned")
        else:
            lines.append(f"nothing to do: {reasons}; no file was written")
        lines += [f"hint: {hint}" for s in sections for hint in s.hints()]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(map(shown, lines))

    def summary(self) -> str:
        """One line: what was replaced, or why nothing was, and whether it was verified."""
        if not self.replaced:
            return f"nothing to do: {self._nothing_to_do()}{'; copied' if self.copied else ''}"
        if self.dry_run:
            return self._headline()
        return f"{self._headline()}; {'not verified' if self.verification is None else 'verified'}"

    def _headline(self) -> str:
        return ", ".join(h for h in (s.headline(self.dry_run) for s in self.sections.values()) if h)

    def _nothing_to_do(self) -> str:
        return ", ".join(r for r in (s.nothing_to_do() for s in self.sections.values()) if r)

    def explain(self, pattern: str) -> str:
        """How far candidates got: a line for each step that they passed, and the reason where they stopped."""
        sections = self.sections.values()
        owner = owner_of(pattern, [s.names for s in sections])
        own = [s for s in sections if s.names is owner]
        return "\n".join(shown(line) for s in own for line in s.explain_rows(pattern.removeprefix(s.names.prefix)))

    def _verification_lines(self) -> list[str]:
        v = self.verification
        if v is None:
            return ["not verified"] if self.output and not self.copied else []
        sites = [c for c in v.comparisons if c.site]
        outputs = [c for c in v.comparisons if not c.site]
        lines = []
        if sites:
            worst = max(sites, key=lambda c: c.difference / c.budget if c.budget else 0.0)
            lines.append(
                f"verified: {len(sites)} sites against fp64, worst error {worst.difference:.2e} of {worst.budget:.2e} allowed; "
                f"{_describe_coverage(sites)}"
            )
        if outputs:
            worst = max(outputs, key=lambda c: c.difference / c.budget if c.budget else 0.0)
            lines.append(
                f"verified: {len(outputs)} outputs against the original, worst difference {worst.difference:.2e} of "
                f"{worst.budget:.2e} allowed ({v.seconds:.1f} s{'' if v.complete else ', cut short by the budget'}); "
                f"{_describe_coverage(outputs)}"
            )
            lines += _undefined_lines(outputs)
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


def _describe_coverage(comparisons: Sequence[Comparison]) -> str:
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


def _undefined_lines(outputs: Sequence[Comparison]) -> list[str]:
    """Where elements are NaN in the original alone."""
    found = [c for c in outputs if c.coverage.undefined]
    lines = []
    for c in found[:_MAX_LINES]:
        rows = c.coverage.rows
        where = (
            f" in batch row{'s' if len(rows) > 1 else ''} {', '.join(str(r) for r in rows[:_MAX_LINES])}"
            if rows
            else ""
        )
        more = " ..." if len(rows) > _MAX_LINES else ""
        lines.append(f"          {c.what}: {c.coverage.undefined} are NaN in the original alone{where}{more}")
    if len(found) > _MAX_LINES:
        lines.append(f"          and {len(found) - _MAX_LINES} more outputs")
    return lines
