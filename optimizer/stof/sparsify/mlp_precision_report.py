# SPDX-License-Identifier: Apache-2.0
"""What the report says of sparse MLPs whose weights are rounded: which, and their errors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class MlpPrecisionRow:
    """An MLP that became StofSparseMLP.

    Attributes:
        node: the operator's name.
        neurons: how many it has; 0: not known.
        reduced: whether its weights may be rounded to the precision.
        reason: why they may not.
        relative_rms: the root mean square error of its output over that of fp64, the largest of all sets; None: not measured.
    """

    node: str
    neurons: int
    reduced: bool
    reason: str = ""
    relative_rms: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return dict(vars(self))


@dataclass
class MlpPrecisionReport:
    """The sparse MLPs of a model.

    Attributes:
        rows: one for each.
        measured_on: the tokens and sets that errors were measured on; empty where they were not.
    """

    rows: list[MlpPrecisionRow] = field(default_factory=list)
    measured_on: str = ""

    @property
    def reduced(self) -> tuple[str, ...]:
        """The names of those whose weights may be rounded."""
        return tuple(row.node for row in self.rows if row.reduced)

    def lines(self, precision: str) -> list[str]:
        """A line for each kind of MLP with rounded weights, and for each reason of others."""
        groups: dict[tuple[str, int], list[MlpPrecisionRow]] = defaultdict(list)
        for row in self.rows:
            groups[("", row.neurons) if row.reduced else (row.reason, 0)].append(row)
        lines = []
        for (reason, neurons), rows in groups.items():
            count = f"{len(rows)} sparse MLP{'' if len(rows) == 1 else 's'}"
            if reason:
                lines.append(f"  full precision in {count}: {reason}")
                continue
            size = f" of {neurons} neurons" if neurons else ""
            errors = [row.relative_rms for row in rows if row.relative_rms is not None]
            error = f"; relative RMS error up to {max(errors):.2g}" if errors else ""
            lines.append(f"  {precision} weights in {count}{size}{error}")
        if self.measured_on:
            lines.append(f"errors of sparse MLPs: relative RMS against fp64, on {self.measured_on}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return {"rows": [row.to_json() for row in self.rows], "measured_on": self.measured_on}
