# SPDX-License-Identifier: Apache-2.0
"""What the report says of --allow-bf16: which attentions, GEMMs and sparse MLPs, on what kernels, their errors, and the loss."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

from stof.arguments.precisions import Precision
from stof.sparsify.gemm_report import GemmReport
from stof.sparsify.mlp_precision_report import MlpPrecisionReport
from stof.sparsify.reduced_report import PrecisionRow, ReducedPrecisionReport
from stof.sparsify.threshold_report import number_ranges

_OVER_CACHES = ("StofCachedAttention", "StofPagedAttention")  # whose few queries a step are computed in fp32


def count_attentions(count: int) -> str:
    """A number of attentions in words."""
    return f"{count} attention{'' if count == 1 else 's'}"


@dataclass(kw_only=True)
class PrecisionReport(ReducedPrecisionReport):
    """What --allow-bf16 did.

    Attributes:
        precision: that it allows.
        max_error: the largest relative RMS error with which an operator takes it.
        gemms: the matmuls by constant weights.
        mlps: the sparse MLPs.
    """

    precision: Precision
    max_error: float
    gemms: GemmReport = field(default_factory=GemmReport)
    mlps: MlpPrecisionReport = field(default_factory=MlpPrecisionReport)

    @property
    def changes_outputs(self) -> bool:
        """Whether any operator may compute in the precision."""
        return bool(self.reduced or self.gemms.reduced or self.mlps.reduced)

    def by_plan(self) -> dict[str, Precision] | None:
        """As of the base class."""
        return self._by_plan(self.reduced)

    def gemms_by_plan(self) -> dict[str, Precision] | None:
        """As of the base class."""
        return self._by_plan(self.gemms.reduced)

    def mlps_by_plan(self) -> dict[str, Precision] | None:
        """As of the base class."""
        return self._by_plan(self.mlps.reduced)

    def _by_plan(self, names: tuple[str, ...]) -> dict[str, Precision] | None:
        return dict.fromkeys(names, self.precision) if self.is_decided else None

    @property
    def adds_operators(self) -> bool:
        """Whether matmuls become StofGemm."""
        return bool(self.gemms.reduced)

    @property
    def option(self) -> str:
        """What the user gave."""
        return self.precision.option

    @property
    def headline(self) -> str:
        """For the report's first line."""
        counts = [f"{len(self.reduced)} of {len(self.rows)} attentions"] if self.reduced else []
        if self.gemms.reduced:
            counts.append(f"{len(self.gemms.reduced)} of {len(self.gemms.rows)} GEMMs")
        name = self.precision.name
        effects = [f"{' and '.join(counts)} compute matmuls in {name}"] if counts else []
        if self.mlps.reduced:
            effects.append(
                f"{len(self.mlps.reduced)} of {len(self.mlps.rows)} sparse MLPs round weights, and many tokens, to {name}"
            )
        if not effects:
            return f"{self.precision.option} changes nothing"
        return f"OUTPUTS CHANGE: {self.precision.option} lets {', and '.join(effects)}"

    def lines(self) -> list[str]:
        """A line for each kind of row, the error where it is the largest, and the loss."""
        if not self.rows and not self.gemms.rows and not self.mlps.rows:
            name = self.precision.name
            return [f"  there is no attention, sparse MLP or matmul by a constant weight that could compute in {name}"]
        groups: dict[PrecisionRow, list[PrecisionRow]] = defaultdict(list)
        for row in self.rows:
            kind = replace(row, node="", layer=0, relative_rms=None)
            groups[kind if row.reduced else replace(kind, relative_rms=row.relative_rms)].append(row)
        lines = [line for group in groups.values() for line in self._group_lines(group)]
        lines += self.gemms.lines(self.precision.name)
        lines += self.mlps.lines(self.precision.name)
        if self.measured_on:
            lines.append(f"errors of attentions: relative RMS against fp64, on {self.measured_on}")
        if self.reduced:
            lines += self._comparison_lines()
        if self.changes_outputs:
            lines += self._loss_lines("--prompts FILE or --inputs FILE measures it")
        return [*lines, *(f"warning: {words}" for words in self.warnings)]

    def _comparison_lines(self) -> list[str]:
        """What of the attentions in reduced precision was compared with their definition; nothing where none ran."""
        if not self.measured_on:
            return []
        name, reduced = self.precision.name, [row for row in self.rows if row.reduced]
        if not any(row.kernel for row in reduced):
            return [f"no attention in {name} was compared with its definition: this machine has no {name} kernel"]
        held = sum(bool(row.kernel) and row.relative_rms is not None for row in reduced)
        return [
            f"verification compares outputs in full precision; {held} of {len(reduced)} attentions in {name} are held to the "
            "definition that rounds as their kernels do"
        ]

    def _group_lines(self, group: list[PrecisionRow]) -> list[str]:
        first, layers = group[0], ", ".join(number_ranges([r.layer for r in group]))
        if not first.reduced:
            return [f"  full precision in layer {layers}: {first.reason}"]
        kernel = (
            f"kernel {first.kernel}" if first.kernel else "no kernel of this machine: it computes as without the option"
        )
        gain = "" if first.predicted_gain is None else f", estimated {first.predicted_gain:.1f}x over full precision"
        if first.kernel and first.predicted_gain is None:
            gain = ", not timed"
        if first.op in _OVER_CACHES:
            gain += "; prompts alone, decode steps stay fp32"
        errors = [r.relative_rms for r in group if r.relative_rms is not None]
        most = "up to " if len(errors) > 1 else ""
        error = f"; relative RMS error {most}{max(errors):.2g}" if errors else ""
        return [f"  {self.precision.name} in layer {layers}: {kernel}{gain}{error}"]

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        return super().to_json() | {
            "precision": self.precision.name,
            "max_error": self.max_error,
            "gemms": self.gemms.to_json(),
            "mlps": self.mlps.to_json(),
        }
