# SPDX-License-Identifier: Apache-2.0
"""What the report says of skip by score and choose blocks: thresholds, what each leaves out, what it costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stof.arguments.threshold_kinds import ThresholdKind, ThresholdSite

KL, COSINE = "kl", "cosine"


@dataclass(frozen=True)
class ThresholdRow:
    """An attention that became an operator, and a kind of threshold.

    Attributes:
        kind: skip by score or choose blocks.
        node: the operator's name.
        layer: its index among the attentions that are operators, in the order of the graph.
        skips: whether it leaves out keys in this way.
        reason: why it does not.
        threshold: c; 0: nothing is left out, or it is not calibrated yet.
        is_calibrated: whether runs chose the threshold.
        mass_bound: the share of a row's mass that c leaves out at most; None: c is no bound of it.
        share: of the pairs of queries and keys that masks leave, those left out with this threshold alone; None: not measured.
        loss: with this threshold alone: the mean KL divergence in nats, or 1 minus the cosine; None: not measured.
        mass_kept: the mean share of the softmax's mass that was computed then; None: not measured.
    """

    kind: ThresholdKind
    node: str
    layer: int
    skips: bool
    reason: str = ""
    threshold: float = 0.0
    is_calibrated: bool = False
    mass_bound: float | None = None
    share: float | None = None
    loss: float | None = None
    mass_kept: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key; ``mass_bound`` where the kind has one."""
        keys = (
            "node",
            "layer",
            "skips",
            "reason",
            "threshold",
            "is_calibrated",
            "mass_bound",
            "share",
            "loss",
            "mass_kept",
        )
        found = {key: getattr(self, key) for key in keys}
        if not self.kind.bounds_mass:
            del found["mass_bound"]
        return found


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
        return f"loss on {sets}: 1 - cosine of output {name!r} with the original's: {1 - cosine:.3g}"


@dataclass
class ThresholdReport:
    """What thresholds do in a model.

    Attributes:
        kinds: of those that the option names.
        rows: for each kind, one for each attention that became an operator.
        thresholds: those that are known, for a plan; 0: nothing is left out.
        measure: of ``loss`` in rows: ``kl``, ``cosine``, or empty where nothing was measured.
        share: of the pairs that masks leave in layers with thresholds, those left out with all of them; None: not measured.
        cosines: of outputs, on ``--inputs``; None: not measured.
        calibrated_on: what thresholds were calibrated on; empty where none was.
        measured_on: what the loss in all was measured on; empty where it was not.
        runs: of the model over what it was calibrated on.
        warnings: what makes the measurement weak.
    """

    kinds: tuple[ThresholdKind, ...] = ()
    rows: list[ThresholdRow] = field(default_factory=list)
    thresholds: Mapping[ThresholdSite, float] = field(default_factory=dict)
    measure: str = ""
    share: float | None = None
    cosines: OutputCosines | None = None
    calibrated_on: str = ""
    measured_on: str = ""
    runs: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def skipping(self) -> int:
        """How many thresholds leave out keys."""
        return sum(row.skips for row in self.rows)

    @property
    def must_calibrate(self) -> bool:
        """Whether a threshold is not known yet: no model was written."""
        return any(row.skips and not row.threshold for row in self.rows)

    @property
    def headline(self) -> str:
        """For the report's first line, behind the name of the option; empty where nothing is left out."""
        texts = []
        for kind in self.kinds:
            rows = self._rows_of(kind)
            if skipping := sum(row.skips for row in rows):
                texts.append(f"{kind.third_person} in {skipping} of {len(rows)} attentions")
        return " and ".join(texts)

    def by_plan(self) -> dict[ThresholdKind, dict[str, float]]:
        """The thresholds of each kind as a plan has them; empty where one is not calibrated yet."""
        if self.must_calibrate:
            return {}
        found = {k: {site.name: c for site, c in self.thresholds.items() if site.kind is k} for k in self.kinds}
        return {kind: thresholds for kind, thresholds in found.items() if thresholds}

    def warn_of_pages(self) -> None:
        """Says that a loss on inputs is measured without the pages that the model chooses besides."""
        if self.cosines is not None:
            self.warnings.append("choose-pages is not in the loss on inputs: --prompts measures it")

    def mark_unwritten(self, reason: str) -> None:
        """Says that no model with thresholds is written."""
        self.thresholds = {}
        self.rows = [
            ThresholdRow(
                r.kind, r.node, r.layer, False, r.reason or reason, mass_bound=0.0 if r.kind.bounds_mass else None
            )
            for r in self.rows
        ]

    def lines(self) -> list[str]:
        """A line or two for each kind of row, and what holds for all of them."""
        groups: dict[ThresholdRow, list[ThresholdRow]] = defaultdict(list)
        for row in self.rows:
            groups[replace(row, node="", layer=0)].append(row)
        lines = [line for group in groups.values() for line in self._group_lines(group)]
        if not self.rows:
            verbs = " or ".join(kind.verb for kind in self.kinds)
            return [f"  no attention became an operator, which could {verbs}"]
        if self.calibrated_on:
            lines.append(f"thresholds: calibrated on {self.calibrated_on}, with {self.runs} runs of the model")
        if self.share is not None:
            lines.append(
                f"layers with thresholds leave out {_percent(self.share)} of their pairs of queries and keys, "
                f"on {self.measured_on}"
            )
        if self.skipping:
            unit = next(row.kind.unit for row in self.rows if row.skips)
            lines.append(f"STOF_SKIP_SCORES=0 computes every {unit}: outputs are then those that verification compares")
        return [*lines, *(f"warning: {words}" for words in self.warnings)]

    def loss_lines(self) -> list[str]:
        """The loss on inputs."""
        return [] if self.cosines is None else [self.cosines.line()]

    def _rows_of(self, kind: ThresholdKind) -> list[ThresholdRow]:
        return [row for row in self.rows if row.kind is kind]

    def _group_lines(self, group: list[ThresholdRow]) -> list[str]:
        first, layers = group[0], ", ".join(number_ranges([r.layer for r in group]))
        if not first.skips:
            return [f"  every {first.kind.unit} in layer {layers}: {first.reason}"]
        if not first.threshold:
            return [f"  {first.kind.verb} in layer {layers}: calibrated where a model is written"]
        chosen = ", calibrated" if first.is_calibrated else ""
        bound = ""
        if first.mass_bound is not None:
            bound = f"; at most {_percent(first.mass_bound)} of a row's mass is left out"
        lines = [f"  {first.kind.verb} in layer {layers}: c = {first.threshold:g}{chosen}{bound}"]
        if first.loss is not None:
            loss = f"KL divergence {first.loss:.4g}" if self.measure == KL else f"1 - cosine {first.loss:.3g}"
            share = "" if first.share is None else f"{_percent(first.share)} of the pairs skipped, "
            kept = "" if first.mass_kept is None else f", {100 * first.mass_kept:.4f} % of the mass kept"
            lines.append(f"        alone: {share}{loss}{kept}")
        return lines

    def to_json(self, kind: ThresholdKind) -> dict[str, Any] | None:
        """Every fact of a kind by its key, with what was measured of all; None: the option does not name the kind."""
        if kind not in self.kinds:
            return None
        cosines = self.cosines
        return {
            "layers": [row.to_json() for row in self._rows_of(kind)],
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
