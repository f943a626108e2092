# SPDX-License-Identifier: Apache-2.0
"""What reports of GEMMs and of sparse MLPs in reduced precision have in common: rows, their errors, and lines for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar


@dataclass(frozen=True, kw_only=True)
class ReducedRow(ABC):
    """An operator that may compute in reduced precision, or that may not for a reason.

    Attributes:
        node: its name.
        reduced: whether it may.
        reason: why it may not.
        relative_rms: the root mean square error of its output over that of fp64, the largest of all sets; None: not measured.
    """

    node: str
    reduced: bool
    reason: str = ""
    relative_rms: float | None = None

    @property
    @abstractmethod
    def kind(self) -> str:
        """What a line says of all rows that have it in common."""

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return dict(vars(self))


Row = TypeVar("Row", bound=ReducedRow)


@dataclass
class ReducedRows(ABC, Generic[Row]):
    """The operators of a kind.

    Attributes:
        noun: one of them.
        rows: one for each.
        measured_on: what errors were measured on; empty where they were not.
    """

    noun: ClassVar[str]
    rows: list[Row] = field(default_factory=list)
    measured_on: str = ""

    @property
    def reduced(self) -> tuple[str, ...]:
        """The names of those that may compute in the precision."""
        return tuple(row.node for row in self.rows if row.reduced)

    @abstractmethod
    def say_reduced(self, precision: str, count: str, kind: str) -> str:
        """That ``count`` operators of a kind compute in a precision."""

    def lines(self, precision: str) -> list[str]:
        """A line for each kind of operator in the precision, and for each reason of others."""
        groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
        for row in self.rows:
            groups[("", row.kind) if row.reduced else (row.reason, "")].append(row)
        lines = []
        for (reason, kind), rows in groups.items():
            count = f"{len(rows)} {self.noun}{'' if len(rows) == 1 else 's'}"
            if reason:
                lines.append(f"  full precision in {count}: {reason}")
                continue
            errors = [row.relative_rms for row in rows if row.relative_rms is not None]
            error = f"; relative RMS error up to {max(errors):.2g}" if errors else ""
            lines.append(f"  {self.say_reduced(precision, count, kind)}{error}")
        if self.measured_on:
            lines.append(f"errors of {self.noun}s: relative RMS against fp64, on {self.measured_on}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return {"rows": [row.to_json() for row in self.rows], "measured_on": self.measured_on}
