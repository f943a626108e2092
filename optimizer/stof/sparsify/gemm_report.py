# SPDX-License-Identifier: Apache-2.0
"""What the report says of GEMMs in reduced precision: which, on what kernel, and their errors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class GemmRow:
    """A matmul by a constant weight.

    Attributes:
        node: its name.
        operators: those that become one operator with it.
        weights: the shape of its weight.
        reduced: whether it may compute in the precision.
        reason: why it may not.
        relative_rms: the root mean square error of its output over that of fp64, the largest of all sets; None: not measured.
    """

    node: str
    operators: str
    weights: str
    reduced: bool
    reason: str = ""
    relative_rms: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return dict(vars(self))


@dataclass
class GemmReport:
    """The matmuls of a model by constant weights.

    Attributes:
        kernel: that computes them in the precision on this machine; empty: none, and they stay as they are.
        rows: one for each.
        measured_on: the rows and sets that errors were measured on; empty where they were not.
    """

    kernel: str = ""
    rows: list[GemmRow] = field(default_factory=list)
    measured_on: str = ""

    @property
    def reduced(self) -> tuple[str, ...]:
        """The names of those that may compute in the precision."""
        return tuple(row.node for row in self.rows if row.reduced)

    def lines(self, precision: str) -> list[str]:
        """A line for each kind of GEMM in the precision, and for each reason of others."""
        groups: dict[tuple[str, str], list[GemmRow]] = defaultdict(list)
        for row in self.rows:
            groups[("", row.operators) if row.reduced else (row.reason, "")].append(row)
        lines = []
        for (reason, operators), rows in groups.items():
            if reason:
                lines.append(f"  full precision in {_count(rows)}: {reason}")
                continue
            errors = [row.relative_rms for row in rows if row.relative_rms is not None]
            error = f"; relative RMS error up to {max(errors):.2g}" if errors else ""
            lines.append(f"  {precision} in {_count(rows)} of {operators}: kernel {self.kernel}{error}")
        if self.measured_on:
            lines.append(f"errors of GEMMs: relative RMS against fp64, on {self.measured_on}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return {"kernel": self.kernel, "rows": [row.to_json() for row in self.rows], "measured_on": self.measured_on}


def _count(rows: list[GemmRow]) -> str:
    return f"{len(rows)} GEMM{'' if len(rows) == 1 else 's'}"
