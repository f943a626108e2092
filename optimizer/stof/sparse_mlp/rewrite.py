# SPDX-License-Identifier: Apache-2.0
"""MLPs as an op of the pipeline: those whose activation gives zeros, and those whose neurons are predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import onnx

from stof.errors import ArgumentError
from stof.graph.index import DOMAIN, all_nodes
from stof.graph.names import FreshNames
from stof.op_parts import ChangesOutputs, HoldsPrompts, ReadsOptions
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.plan import EntryFormat
from stof.prompts.files import PromptSet
from stof.prompts.loss import has_logits
from stof.selection import NamedCandidate
from stof.sparse_mlp.calibration.prompt_sets import CalibrationPrompts
from stof.sparse_mlp.calibration.settings import MlpSettings
from stof.sparse_mlp.calibration.spec import OPTION
from stof.sparse_mlp.decide.reasons import (
    ON_PROMPTS,
    estimate_gain,
    reason_inexact,
    reason_no_operator,
    reason_slow,
    reason_slow_for_one_token,
)
from stof.sparse_mlp.dequantize_linear import with_dequantized_tokens
from stof.sparse_mlp.describe import DescribedMlp, DescribedMlps, MlpModel, describe_mlps
from stof.sparse_mlp.emit import emit_mlps, without_selection
from stof.sparse_mlp.find import find_mlps
from stof.sparse_mlp.fused_activations import is_fused_activation, with_separate_activations
from stof.sparse_mlp.model_room import ModelRoom
from stof.sparse_mlp.neuron_order import with_orders
from stof.sparse_mlp.plan_entry import SELECTIONS, MlpPlan, read_mlp_plan
from stof.sparse_mlp.problem import MlpProblem
from stof.sparse_mlp.report import KEY, NAMES, MlpReport, MlpSection, PredictionReport
from stof.sparse_mlp.site import OP, MlpSite

if TYPE_CHECKING:
    from stof.sparse_mlp.calibration.fit import NeuronPrediction
    from stof.sparse_mlp.checks.site_checks import MlpChecks


@dataclass(frozen=True, eq=False)
class MlpDecisions(Decisions, HoldsPrompts):
    """The decision for each candidate of a model."""

    mlp_model: MlpModel
    mlps: MlpSection
    sites: tuple[MlpSite, ...] = ()
    prompts: CalibrationPrompts | None = None

    @property
    def section(self) -> MlpSection:
        return self.mlps

    @property
    def plan(self) -> tuple[MlpPlan, ...]:
        return tuple(
            MlpPlan(
                r.mlp,
                r.replaced,
                r.density,
                "" if r.replaced else r.reason,
                r.selection if r.replaced else SELECTIONS[0],
            )
            for r in self.mlps.rows
        )

    @property
    def candidates(self) -> tuple[NamedCandidate, ...]:
        return tuple(NamedCandidate(r.mlp, r.index) for r in self.mlps.rows)

    @property
    def has_replaced(self) -> bool:
        return bool(self.sites)

    @property
    def held_out(self) -> PromptSet | None:
        return None if self.prompts is None else self.prompts.held_out

    def undo(self, reason: str) -> MlpDecisions:
        return replace(self, mlps=self.mlps.without(reason), sites=())


class SparseMlpRewrite(OpRewrite[MlpModel, DescribedMlps, MlpDecisions], ReadsOptions, ChangesOutputs):
    """Replaces MLPs with zeros in models that decode token by token, and those whose neurons --sparse-mlp predicts.

    Runs with many active neurons stay as fast as before.
    """

    key = KEY
    op_types = frozenset({OP})
    names = NAMES
    plan_format = EntryFormat("mlp", read_mlp_plan)

    def read_options(self, job: Job) -> MlpSettings | None:
        if job.options.sparse_mlp:
            return MlpSettings.read(job)
        for entry in job.plan.entries.get(KEY, ()) if job.plan is not None else ():
            if isinstance(entry, MlpPlan) and entry.replace and entry.selection != SELECTIONS[0]:
                raise ArgumentError(
                    f"the plan selects neurons of MLP {entry.name!r} by {entry.selection}; give the {OPTION} that it was "
                    "saved with"
                )
        return None

    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> MlpModel:
        stored = job.settings.get(KEY)
        settings = stored if isinstance(stored, MlpSettings) else None
        if settings is None and not _may_have_zeros(job.model):
            return MlpModel(job.model)
        before = with_separate_activations(with_dequantized_tokens(model()))
        with job.step("mlps"):
            symbolic = job.facts.of(before)
            candidates = tuple(find_mlps(before, symbolic, any_activation=settings is not None))
        return MlpModel(before, symbolic if candidates else None, candidates, settings)

    def describe(self, job: Job, mlp_model: MlpModel) -> DescribedMlps:
        return describe_mlps(job, mlp_model, self.choice(job))

    def decide(self, job: Job, described: DescribedMlps) -> MlpDecisions:
        mlp_model = described.mlp_model
        rows: list[MlpReport] = []
        sites: list[MlpSite] = []
        self.check_plan(job, [NamedCandidate(c.name, i) for i, c in enumerate(mlp_model.candidates)])
        if mlp_model.settings is None and not mlp_model.candidates:
            job.selections[KEY].refuse_all(f"no activation of the model gives zeros, and {OPTION} is not given")
        room = ModelRoom(mlp_model.model) if mlp_model.candidates else None
        for index, mlp in enumerate(described.mlps):
            name, site = mlp.candidate.name, mlp.site
            row, reason = _row_of(job, mlp, index), _reason_impossible(job, mlp_model, mlp)
            if not reason and not self.is_replaced_by_plan(job, name):
                reason = _reason_slow(job, mlp)
            reason = self.choice(job).reason_kept(NamedCandidate(name, index), reason)
            if site is not None and room is not None and not reason:
                reason = room.take(site)
            if reason or site is None:
                rows.append(replace(row, predicted_gain=None, reason=reason))
                continue
            self._check_selection(job, site)
            rows.append(replace(row, replaced=True, reason="replaced"))
            sites.append(site)
        sites = with_orders(mlp_model.model, sites, described.counts)
        section = _section(job, described, _with_idle(rows, sites))
        return MlpDecisions(mlp_model, section, tuple(sites), described.prompts)

    def _check_selection(self, job: Job, site: MlpSite) -> None:
        """Refuses a plan that was made with another --sparse-mlp.

        Raises:
            ArgumentError: naming the MLP.
        """
        entry = None if job.plan is None else job.plan.of(KEY, site.name)
        if isinstance(entry, MlpPlan) and entry.selection != site.selection:
            raise ArgumentError(
                f"the plan selects neurons of MLP {site.name!r} by {entry.selection}, and {OPTION} by {site.selection}; give the "
                f"{OPTION} that it was saved with"
            )

    def verifiable_form(self, model: onnx.ModelProto) -> onnx.ModelProto:
        return without_selection(model)

    def emit(self, job: Job, decided: MlpDecisions) -> onnx.ModelProto:
        with job.step("emit"):
            return emit_mlps(decided.mlp_model.model, decided.sites, job.source.parent)

    def empty_section(self) -> MlpSection:
        return MlpSection()

    def find_earlier_result(self, job: Job) -> MlpDecisions | None:
        done = [n for n in all_nodes(job.model.graph.node) if n.domain == DOMAIN and n.op_type == OP]
        if not done:
            return None
        names = FreshNames()
        rows = [MlpReport(names.make(n.name or OP), i, False, f"is {OP} already") for i, n in enumerate(done)]
        return MlpDecisions(MlpModel(job.model), MlpSection(rows))

    def site_checks(self, job: Job, decided: MlpDecisions) -> MlpChecks | None:
        if not decided.sites:
            return None
        from stof.sparse_mlp.checks.site_checks import MlpChecks

        mlp_model = decided.mlp_model
        assert mlp_model.symbolic is not None
        return MlpChecks(mlp_model.model, mlp_model.symbolic, decided.sites, job.source.parent)


def _may_have_zeros(model: onnx.ModelProto) -> bool:
    return any(n.op_type in ("QuantizeLinear", "Relu") or is_fused_activation(n) for n in model.graph.node)


def _with_idle(rows: Sequence[MlpReport], sites: Sequence[MlpSite]) -> list[MlpReport]:
    """The rows with the share of neurons that were sorted behind the others."""
    idle = {s.name: 1 - s.order.hot / s.neurons for s in sites if s.order is not None}
    return [replace(r, idle=idle[r.mlp]) if r.mlp in idle else r for r in rows]


def _section(job: Job, described: DescribedMlps, rows: list[MlpReport]) -> MlpSection:
    prompts, settings = described.prompts, described.mlp_model.settings
    fitted, held = (None, None) if prompts is None else (prompts.fitted, prompts.held_out)
    return MlpSection(
        rows,
        job.options.sparse_mlp,
        "" if fitted is None or settings is None else str(settings.spec.prompts),
        "" if held is None else held.source,
        has_logits(job.model),
    )


def _row_of(job: Job, mlp: DescribedMlp, index: int) -> MlpReport:
    """The row of a candidate that is not decided yet."""
    site, problem, prediction = mlp.candidate.site, mlp.problem, mlp.prediction
    row = MlpReport(mlp.candidate.name, index, False, "", density=mlp.density)
    if site is not None:
        row = replace(row, activation=site.activation, sizes=(problem or MlpProblem.of(site)).sizes)
    if prediction is not None:
        row = replace(row, prediction=_report_prediction(prediction))
        if mlp.site is not None:
            row = replace(row, selection=mlp.site.selection)
    if problem is not None and (mlp.tokens is None or mlp.tokens.count == 1):  # the gain is one token's
        row = replace(row, predicted_gain=round(estimate_gain(problem, job.target), 3))
    return row


def _report_prediction(prediction: NeuronPrediction) -> PredictionReport:
    quality, selector = prediction.quality, prediction.selector
    return PredictionReport(
        prediction.kind,
        0 if selector is None else selector.rank,
        None if quality is None else round(quality.precision, 4),
        None if quality is None else round(quality.recall, 4),
        prediction.output_error,
        prediction.tokens,
    )


def _reason_impossible(job: Job, mlp_model: MlpModel, mlp: DescribedMlp) -> str:
    """Why an MLP cannot be replaced; empty where it can."""
    if mlp.problem is None:
        return mlp.reason
    if reason := reason_no_operator(job, mlp.problem.activation) or mlp.reason:
        return reason
    max_error = None if mlp_model.settings is None else mlp_model.settings.spec.max_error
    return "" if mlp.prediction is None else reason_inexact(job, mlp.prediction.output_error, max_error)


def _reason_slow(job: Job, mlp: DescribedMlp) -> str:
    """Why the dense MLP is faster; empty where it is not."""
    if mlp.problem is None:
        return ""
    if mlp.tokens is None:
        return reason_slow_for_one_token(job.target, mlp.problem, ON_PROMPTS)
    return reason_slow(job.target, mlp.problem, mlp.tokens)


SPARSE_MLP = SparseMlpRewrite()
