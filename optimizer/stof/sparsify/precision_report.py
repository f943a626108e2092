# SPDX-License-Identifier: Apache-2.0
"""What the report says of reduced precision: which attentions and GEMMs, on what kernels, their errors, and the loss."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stof.arguments.precisions import Precision
from stof.prompts.loss import Loss
from stof.sparsify.gemm_report import GemmReport
from stof.sparsify.threshold_report import OutputCosines, number_ranges

_OVER_CACHES = ("StofCachedAttention", "StofPagedAttention")  # whose few queries a step are computed in fp32


@dataclass(frozen=True)
class PrecisionRow:
    """An attention that became an operator.

    Attributes:
        node: the operator's name.
        layer: its index among the attentions that are operators, in the order of the graph.
        op: the operator.
        reduced: whether it may compute its matmuls in the precision.
        reason: why it may not.
        kernel: that runs it in the precision on this machine; empty: none, it computes as without the option.
        predicted_gain: the estimated time of the operator without the option over that with it, here; None: no such kernel, one
            that was not timed, or a head size that is not known.
        relative_rms: the root mean square error of its output over that of fp64, the largest of all sets; None: not measured.
    """

    node: str
    layer: int
    op: str
    reduced: bool
    reason: str = ""
    kernel: str = ""
    predicted_gain: float | None = None
    relative_rms: float | None = None


def count_attentions(count: int) -> str:
    """A number of attentions in words."""
    return f"{count} attention{'' if count == 1 else 's'}"


@dataclass
class PrecisionReport:
    """What an option like --allow-bf16 did.

    Attributes:
        precision: that it allows.
        max_error: the largest relative RMS error with which an attention takes it.
        rows: one for each attention that became an operator.
        gemms: the matmuls by constant weights.
        measured_on: what errors were measured on; empty where they were not.
        loss: of the whole model on prompts; None: not measured.
        decode_loss: of single tokens over the cache; None: not measured.
        cosines: of outputs on ``--inputs``; None: not measured.
        warnings: reasons why errors or loss may not be those of the target machine, or are not known.
        is_decided: whether the rows are those of a model that was written.
    """

    precision: Precision
    max_error: float
    rows: list[PrecisionRow] = field(default_factory=list)
    gemms: GemmReport = field(default_factory=GemmReport)
    measured_on: str = ""
    loss: Loss | None = None
    decode_loss: Loss | None = None
    cosines: OutputCosines | None = None
    warnings: list[str] = field(default_factory=list)
    is_decided: bool = False

    @property
    def reduced(self) -> tuple[str, ...]:
        """The names of operators that may compute in the precision."""
        return tuple(row.node for row in self.rows if row.reduced)

    def by_plan(self) -> dict[str, Precision] | None:
        """The precisions of attentions as a plan has them; None where no model was written, which errors may yet decide."""
        return dict.fromkeys(self.reduced, self.precision) if self.is_decided else None

    def gemms_by_plan(self) -> dict[str, Precision] | None:
        """The same of GEMMs."""
        return dict.fromkeys(self.gemms.reduced, self.precision) if self.is_decided else None

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
        if not counts:
            return f"{self.precision.option} changes nothing"
        count = " and ".join(counts)
        return f"OUTPUTS CHANGE: {self.precision.option} lets {count} compute matmuls in {self.precision.name}"

    def lines(self) -> list[str]:
        """A line for each kind of row, the error where it is the largest, and the loss."""
        if not self.rows and not self.gemms.rows:
            name = self.precision.name
            return [f"  there is neither an attention nor a matmul by a constant weight that could compute in {name}"]
        groups: dict[PrecisionRow, list[PrecisionRow]] = defaultdict(list)
        for row in self.rows:
            kind = replace(row, node="", layer=0, relative_rms=None)
            groups[kind if row.reduced else replace(kind, relative_rms=row.relative_rms)].append(row)
        lines = [line for group in groups.values() for line in self._group_lines(group)]
        lines += self.gemms.lines(self.precision.name)
        if self.measured_on:
            lines.append(f"errors of attentions: relative RMS against fp64, on {self.measured_on}")
        if self.reduced:
            lines += self._comparison_lines()
        if self.reduced or self.gemms.reduced:
            measured = [line for found in self._losses() for line in found]
            measured += [] if self.cosines is None else [self.cosines.line()]
            lines += measured or ["loss: not measured; --prompts FILE or --inputs FILE measures it"]
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

    @property
    def loss_headlines(self) -> list[str]:
        """A line for each loss that was measured."""
        return [*(lines[0] for lines in self._losses()), *([] if self.cosines is None else [self.cosines.line()])]

    def _losses(self) -> list[list[str]]:
        losses = (("loss", self.loss), ("loss of decoding", self.decode_loss))
        return [loss.lines(what) for what, loss in losses if loss is not None]

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
        return {
            "precision": self.precision.name,
            "max_error": self.max_error,
            "layers": [asdict(row) for row in self.rows],
            "gemms": self.gemms.to_json(),
            "measured_on": self.measured_on,
            "loss": None if self.loss is None else asdict(self.loss),
            "decode_loss": None if self.decode_loss is None else asdict(self.decode_loss),
            "cosines": None if self.cosines is None else dict(self.cosines.outputs),
            "warnings": list(self.warnings),
        }
