# SPDX-License-Identifier: Apache-2.0
"""What the report says of skip by score: the threshold of each attention, what it leaves out, and what that costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

KL, COSINE = "kl", "cosine"


@dataclass(frozen=True)
class SkippedLayer:
    """An attention that became an operator.

    Attributes:
        node: the operator's name.
        layer: its index among the attentions that are operators, in the order of the graph.
        skips: whether it skips by score.
        reason: why it does not.
        threshold: c; 0: every key tile is computed, or it is not calibrated yet.
        is_calibrated: whether runs chose the threshold.
        mass_bound: the share of a row's mass that it leaves out at most, c / (1 + c).
        share: of the pairs of queries and keys that were scored, those skipped where this layer alone skips; None: not
            measured.
        loss: where this layer alone skips: the mean KL divergence in nats, or 1 minus the cosine; None: not measured.
        mass_kept: the mean share of the softmax's mass that was computed then; None: not measured.
    """

    node: str
    layer: int
    skips: bool
    reason: str = ""
    threshold: float = 0.0
    is_calibrated: bool = False
    mass_bound: float = 0.0
    share: float | None = None
    loss: float | None = None
    mass_kept: float | None = None


@dataclass(frozen=True)
class OutputCosines:
    """How far outputs are from the original's.

    Attributes:
        source: where the inputs come from.
        sets: how many sets of inputs ran.
        outputs: the mean cosine of each output by its name: of its rows [.., N] where it is [B, S, N], else of each [B, ..].
    """

    source: str
    sets: int
    outputs: Mapping[str, float]

    @property
    def least(self) -> tuple[str, float]:
        """The output with the least cosine, and that; no name and 1 where all outputs are empty."""
        return min(self.outputs.items(), key=lambda item: item[1], default=("", 1.0))

    def line(self) -> str:
        """For people."""
        name, cosine = self.least
        sets = f"{self.sets} set{'' if self.sets == 1 else 's'} of inputs"
        return f"loss on {sets}: cosine of output {name!r} with the original's {cosine:.6f}"


@dataclass
class SkipReport:
    """What skip by score does in a model.

    Attributes:
        rows: one for each attention that became an operator.
        thresholds: those that are known, by the names of operators, for a plan; 0: every key tile is computed.
        measure: of ``loss`` in rows: ``kl``, ``cosine``, or empty where nothing was measured.
        share: of the pairs scored in layers that skip, those skipped with all thresholds; None: not measured.
        cosines: of outputs, on ``--inputs``; None: not measured.
        calibrated_on: what thresholds were calibrated on; empty where none was.
        measured_on: what the loss in all was measured on; empty where it was not.
        runs: of the model over what it was calibrated on.
        warnings: what makes the measurement weak.
    """

    rows: list[SkippedLayer] = field(default_factory=list)
    thresholds: Mapping[str, float] = field(default_factory=dict)
    measure: str = ""
    share: float | None = None
    cosines: OutputCosines | None = None
    calibrated_on: str = ""
    measured_on: str = ""
    runs: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def skipping(self) -> int:
        """How many attentions skip."""
        return sum(row.skips for row in self.rows)

    @property
    def must_calibrate(self) -> bool:
        """Whether a threshold is not known yet: no model was written."""
        return any(row.skips and not row.threshold for row in self.rows)

    @property
    def headline(self) -> str:
        """For the report's first line, behind the name of the option; empty where nothing skips."""
        return f"skips by score in {self.skipping} of {len(self.rows)} attentions" if self.skipping else ""

    def mark_unwritten(self, reason: str) -> None:
        """Says that no model that skips is written."""
        self.thresholds = {}
        self.rows = [replace(SkippedLayer(r.node, r.layer, False), reason=r.reason or reason) for r in self.rows]

    def lines(self) -> list[str]:
        """A line or two for each kind of row, and what holds for all of them."""
        groups: dict[SkippedLayer, list[SkippedLayer]] = defaultdict(list)
        for row in self.rows:
            groups[replace(row, node="", layer=0)].append(row)
        lines = [line for group in groups.values() for line in self._group_lines(group)]
        if not self.rows:
            return ["  no attention became an operator, which could skip by score"]
        if self.calibrated_on:
            lines.append(f"thresholds: calibrated on {self.calibrated_on}, with {self.runs} runs of the model")
        if self.share is not None:
            lines.append(
                f"layers that skip leave out {_percent(self.share)} of their pairs of queries and keys, on {self.measured_on}"
            )
        if self.skipping:
            lines.append(
                "STOF_SKIP_SCORES=0 computes every key tile: outputs are then those that verification compares"
            )
        return [*lines, *(f"warning: {words}" for words in self.warnings)]

    def loss_lines(self) -> list[str]:
        """The loss on inputs."""
        return [] if self.cosines is None else [self.cosines.line()]

    def _group_lines(self, group: list[SkippedLayer]) -> list[str]:
        first, layers = group[0], ", ".join(number_ranges([r.layer for r in group]))
        if not first.skips:
            return [f"  every key tile in layer {layers}: {first.reason}"]
        if not first.threshold:
            return [f"  skip by score in layer {layers}: calibrated where a model is written"]
        chosen = ", calibrated" if first.is_calibrated else ""
        lines = [
            f"  skip by score in layer {layers}: c = {first.threshold:g}{chosen}; at most {_percent(first.mass_bound)} of a "
            "row's mass is left out"
        ]
        if first.loss is not None:
            loss = f"KL divergence {first.loss:.4g}" if self.measure == KL else f"cosine {1 - first.loss:.6f}"
            share = "" if first.share is None else f"{_percent(first.share)} of the pairs skipped, "
            kept = "" if first.mass_kept is None else f", {100 * first.mass_kept:.4f} % of the mass kept"
            lines.append(f"        alone: {share}{loss}{kept}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key."""
        cosines = self.cosines
        return {
            "layers": [asdict(row) for row in self.rows],
            "measure": self.measure,
            "share": self.share,
            "cosines": None if cosines is None else dict(cosines.outputs),
            "calibrated_on": self.calibrated_on,
            "measured_on": self.measured_on,
            "runs": self.runs,
            "warnings": list(self.warnings),
        }


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"


def number_ranges(numbers: list[int]) -> list[str]:
    """Sorted numbers as texts, neighbours as ranges."""
    ranges: list[list[int]] = []
    for n in numbers:
        if ranges and n == ranges[-1][1] + 1:
            ranges[-1][1] = n
        else:
            ranges.append([n, n])
    return [str(a) if a == b else f"{a} to {b}" for a, b in ranges]
