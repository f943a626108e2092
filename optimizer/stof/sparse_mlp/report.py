# SPDX-License-Identifier: Apache-2.0
"""What the report says of MLPs: those whose activation gives zeros, and those whose neurons are predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stof.report import Gain, PageRow, PageTable, Section
from stof.selection import CandidateNames, NamedCandidate

KEY = "mlps"
NAMES = CandidateNames("MLP", "mlp:")


@dataclass(frozen=True)
class MlpReport:
    """An MLP; options name it behind ``mlp:`` by its name or ``index``.

    Attributes:
        density: the share of neurons that are computed, on given inputs or held-out prompts; None: not measured.
        idle: the share of neurons that were never active or selected, and are stored last; None: neurons keep their order.
        predicted_gain: the dense MLP's estimated time for one token, over the operator's: the ratio of bytes of weights, and on a
            CPU whose caches hold the weights one of bytes, rows and calls, which is smaller.
        selection: ``nonzero``: outputs stay; ``magnitude``, ``predictor``: they change.
        prediction: how neurons are predicted; None: they are not.
    """

    mlp: str
    index: int | None
    replaced: bool
    reason: str
    activation: str = ""
    sizes: str = ""
    density: float | None = None
    idle: float | None = None
    predicted_gain: float | None = None
    selection: str = "nonzero"
    prediction: PredictionReport | None = None

    @property
    def changes_outputs(self) -> bool:
        """Whether it was replaced and leaves out neurons that are not zero."""
        return self.replaced and self.selection != "nonzero"


@dataclass(frozen=True)
class PredictionReport:
    """How the neurons of an MLP are predicted, and how well on held-out prompts; None: not measured.

    Attributes:
        kind: ``magnitude``, ``svd``, ``trained``, ``powerinfer``, ``teal`` or ``predictors``.
        rank: of the predictor; 0: there is none.
        precision: of the computed neurons, how many are active.
        recall: of the active neurons, how many are computed.
        output_error: of the MLP's output, relative to its size.
        tokens: that were measured.
    """

    kind: str
    rank: int
    precision: float | None = None
    recall: float | None = None
    output_error: float | None = None
    tokens: int = 0


@dataclass
class MlpSection(Section):
    """The report of a model's MLPs; ``rows`` are in the order of the graph.

    Attributes:
        spec: the text of --sparse-mlp; empty: neurons are not predicted.
        calibration: the prompts that predictions are from; empty: there are none.
        held_out: those that they are measured on; empty: there are none.
    """

    names = NAMES
    is_explained_by_default = True
    rows: list[MlpReport] = field(default_factory=list)
    spec: str = ""
    calibration: str = ""
    held_out: str = ""
    has_logits: bool = True

    @property
    def predicted(self) -> int:
        """How many MLPs leave out neurons that are not zero."""
        return sum(row.changes_outputs for row in self.rows)

    @property
    def changes_outputs(self) -> bool:
        return self.predicted > 0

    @property
    def verified_form(self) -> str:
        return "with every neuron active: the loss says what leaving out neurons changes"

    def without(self, reason: str) -> MlpSection:
        """The section where no MLP is replaced, for one reason."""
        rows = [replace(r, replaced=False, reason=reason, predicted_gain=None) if r.replaced else r for r in self.rows]
        return replace(self, rows=rows)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = {KEY: [asdict(row) for row in self.rows], "sparse_mlp": None}
        if self.spec:
            fields["sparse_mlp"] = {
                "spec": self.spec,
                "outputs_change": self.changes_outputs,
                "calibration": self.calibration,
                "held_out": self.held_out,
                "loss": None if self.loss is None else asdict(self.loss.whole),
                "decode_loss": None if self.loss is None or self.loss.decoded is None else asdict(self.loss.decoded),
            }
        return fields

    def headline(self, dry_run: bool) -> str:
        if not self.rows:
            return "--sparse-mlp changes nothing: the model has no MLP" if self.spec else ""
        can = "can be replaced" if dry_run else "replaced"
        exact = self.replaced - self.predicted
        if not self.spec:
            return f"{exact} of {len(self.rows)} MLPs with zeros {can}"
        if not self.predicted:
            return f"--sparse-mlp changes nothing, {exact} of {len(self.rows)} MLPs {can}"
        others = f", {exact} others {can} without a change" if exact else ""
        where = f"{self.predicted} of {len(self.rows)} MLPs{others}"
        return f"OUTPUTS CHANGE: --sparse-mlp computes only selected neurons in {where}"

    def nothing_found(self) -> str:
        return "no MLP" if self.spec else "no MLP whose activation gives zeros"

    def lines(self) -> list[str]:
        groups: dict[tuple[Any, ...], list[MlpReport]] = defaultdict(list)
        for r in self.rows:
            kind = None if r.prediction is None else (r.prediction.kind, r.prediction.rank)
            groups[(r.replaced, r.reason, r.activation, r.sizes, r.selection, kind)].append(r)
        return [line for group in groups.values() for line in _group_lines(group)] + self._loss_lines()

    def _loss_lines(self) -> list[str]:
        """By how much outputs change, and on which prompts that was measured."""
        if not self.predicted:
            return []
        if self.loss is not None:
            prompts_line = (
                f"  calibrated on {self.calibration}; measured on {self.held_out}" if self.calibration else ""
            )
            return [line for lines in self.loss.lines() for line in lines] + ([prompts_line] if prompts_line else [])
        if not self.has_logits:
            errors = (
                f"output errors on {self.held_out} are all" if self.held_out else "give --prompts for output errors"
            )
            return [f"loss: the model has no output 'logits'; {errors}"]
        return ["loss: not measured" + (" in a dry run" if self.held_out else "; --prompts FILE measures it")]

    def page_table(self) -> PageTable:
        columns = ("activation", "size", "neurons", "computed", "estimated", "details")
        return PageTable("MLPs", columns, tuple(map(_page_row, self.rows)))

    def page_gains(self) -> list[Gain]:
        groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for r in self.rows:
            if r.replaced and r.predicted_gain is not None:
                groups[(r.activation, r.sizes, r.selection)].append(r.predicted_gain)
        return [
            Gain(
                f"one token, MLP with {activation}, {sizes}{'' if selection == 'nonzero' else ', selected neurons'}",
                len(gains),
                sum(gains) / len(gains),
                measured=False,
                advice="--skip mlp:NAME leaves one as it is",
            )
            for (activation, sizes, selection), gains in groups.items()
        ]

    def explain_rows(self, pattern: str) -> list[str]:
        chosen = [r for r in self.rows if NamedCandidate(r.mlp, r.index).matches(pattern)]
        return [line for row in chosen for line in _explain_row(row)]


def _format_range(values: Sequence[float], digits: int = 1) -> str:
    """Shares as percentages, from the least to the largest."""
    low, high = (f"{100 * x:.{digits}f}" for x in (min(values), max(values)))
    return f"{low if low == high else f'{low} to {high}'} %"


def _describe_active(rows: Sequence[MlpReport]) -> str:
    """How many neurons are computed, for people."""
    shares = [r.density for r in rows if r.density is not None]
    if rows[0].prediction is not None:
        return f"{_format_range(shares)} of the neurons computed" if shares else "computed neurons not measured"
    if not shares:
        return "active neurons not measured: --inputs gives runs to count them in"
    return f"{_format_range(shares)} of the neurons active on the given inputs"


def _describe_never_active(rows: Sequence[MlpReport]) -> str:
    """How many neurons never were active or selected, for people."""
    shares = [r.idle for r in rows if r.idle is not None]
    return f"{_format_range(shares)} of them never, stored last" if shares else ""


def _describe_gain(rows: Sequence[MlpReport]) -> str:
    gains = [r.predicted_gain for r in rows if r.predicted_gain is not None]
    return f"estimated {sum(gains) / len(gains):.1f}x for one token" if gains else ""


def _describe_kind(prediction: PredictionReport) -> str:
    """The kind of a prediction for people."""
    return f"{prediction.kind}, rank {prediction.rank}" if prediction.rank else prediction.kind


def _describe_quality(rows: Sequence[MlpReport]) -> str:
    """How well neurons are predicted; empty where that was not measured."""
    predictions = [r.prediction for r in rows if r.prediction is not None]
    errors = [p.output_error for p in predictions if p.output_error is not None]
    recalls = [p.recall for p in predictions if p.recall is not None]
    precisions = [p.precision for p in predictions if p.precision is not None]
    words = [
        f"precision {_format_range(precisions)}" if precisions else "",
        f"recall {_format_range(recalls)}" if recalls else "",
        f"output error {_format_range(errors)}" if errors else "",
    ]
    return ", ".join(filter(None, words))


def _group_lines(group: list[MlpReport]) -> list[str]:
    first = group[0]
    if not first.replaced:
        return [f"  kept  {r.mlp}: {r.reason}" for r in group]
    facts = ", ".join(filter(None, [_describe_active(group), _describe_never_active(group), _describe_gain(group)]))
    if first.prediction is None:
        return [f"  {len(group):3d} x MLP with zeros of {first.activation}: {first.sizes}", f"        {facts}"]
    quality = _describe_quality(group)
    head = (
        f"  {len(group):3d} x MLP with {first.activation}, neurons by {_describe_kind(first.prediction)}: {first.sizes}"
    )
    return [head, f"        {facts}", *([f"        {quality}"] if quality else [])]


def _page_row(row: MlpReport) -> PageRow:
    active = "" if row.density is None else f"{100 * row.density:.1f} %"
    gain = "" if row.predicted_gain is None else f"{row.predicted_gain:.1f}×"
    how = "not zero" if row.prediction is None else _describe_kind(row.prediction)
    details = _describe_quality([row]) if row.replaced else row.reason
    return PageRow(row.mlp, row.replaced, (row.activation, row.sizes, how, active, gain, details))


def _explain_row(row: MlpReport) -> list[str]:
    lines = [f"MLP {'-' if row.index is None else row.index}  {row.mlp}"]
    if row.sizes:
        of = "zeros of " if row.prediction is None else ""
        lines.append(f"  match  {row.sizes}, {of}{row.activation}")
        lines.append(f"  active {_describe_active([row])}")
    if row.prediction is not None:
        quality = _describe_quality([row])
        lines.append(f"  predict {_describe_kind(row.prediction)}{f': {quality}' if quality else ''}")
    if row.idle is not None:
        lines.append(f"  idle   {_describe_never_active([row])}")
    if row.predicted_gain is not None:
        lines.append(f"  cost   {_describe_gain([row])}")
    lines.append("  -> replaced" if row.replaced else f"  stopped: {row.reason}")
    return lines
