# SPDX-License-Identifier: Apache-2.0
"""Gives an optimized model its thresholds: stated, of a plan, or calibrated; and measures what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from stof.arguments.threshold_kinds import ThresholdSite
from stof.errors import ArgumentError, VerifyError
from stof.execution.given_inputs import GivenFeed
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure, release_sessions, session_environment, take_skip_counts
from stof.files import temporary_folder
from stof.op_rewrite import Job
from stof.progress import Progress
from stof.prompt_runs.limits import prompt_limits
from stof.prompt_runs.measure_loss import measure_loss
from stof.prompts.files import PromptSet
from stof.runtime.limits import leaves_out
from stof.sparsify.spec import SparsitySpec
from stof.sparsify.threshold_report import COSINE, KL, OutputCosines, ThresholdReport, ThresholdRow
from stof.stages import Stage, find_model_inputs
from stof.targets import CPU
from stof.thresholds.calibrate import Ladder, calibrate
from stof.thresholds.cosines import CosineMeter
from stof.thresholds.layers import ThresholdLayer, Thresholds, find_layers, put_thresholds
from stof.thresholds.measure_cosines import check_cosines, measure_cosines
from stof.thresholds.measured_sets import LEAST_KEYS, MeasuredSets, find_sets
from stof.thresholds.runs import ThresholdRuns


def report_layers(
    job: Job, spec: SparsitySpec, report: ThresholdReport, model: onnx.ModelProto
) -> tuple[ThresholdLayer, ...]:
    """The attentions of the model, for each kind of threshold. The report gets their rows and the thresholds that are stated.

    Raises:
        ArgumentError: as :func:`stof.thresholds.layers.find_layers`, and for a plan of another model.
    """
    layers = tuple(x for kind in spec.threshold_kinds for x in find_layers(model, spec, kind, job.target))
    report.thresholds = _stated_thresholds(job, layers)
    report.rows = [_row_of(x, report.thresholds.get(x.site)) for x in layers]
    return layers


@dataclass(frozen=True, eq=False)
class ThresholdModel:
    """A model with thresholds.

    Attributes:
        model: the model with thresholds; the one without where nothing is left out.
        prompts: to measure the loss on; None: those of the job.
        feeds: functions that give sets of inputs, on which the model is compared with the verified one.
    """

    model: onnx.ModelProto
    prompts: PromptSet | None = None
    feeds: tuple[Callable[[], Mapping[str, np.ndarray]], ...] = ()


def apply_thresholds(
    job: Job,
    spec: SparsitySpec,
    report: ThresholdReport,
    stages: Sequence[Stage],
    folder: Path,
    given: Sequence[GivenFeed],
) -> ThresholdModel:
    """The model with its thresholds.

    Args:
        job: the optimization.
        spec: what --sparsify says.
        report: gets rows, and what was measured.
        stages: whose model it is; verified without thresholds.
        folder: for temporary files.
        given: the user's sets of inputs.

    Raises:
        ArgumentError: as :func:`report_layers`; for prompts and inputs that the model does not run on, or that are too short.
        VerifyError: when memory does not suffice, or cosines are below ``--min-cosine``.
    """
    exact = stages[-1].written
    layers = report_layers(job, spec, report, exact)
    skipping = [x.site for x in layers if not x.reason]
    searched = [site for site in skipping if site not in report.thresholds]
    sets = find_sets(job.model, job.prompts, given)
    if sets is None:
        return ThresholdModel(put_thresholds(exact, report.thresholds))
    calibrating, held_out = sets.split()
    if not searched:
        held_out = list(range(sets.count))
    _check_lengths(sets, held_out, report, is_calibrated=bool(searched))
    report.warnings += _unmeasured(layers, report.thresholds)
    report.measure = KL if sets.prompts else COSINE
    measurement = _Measurement(job, stages, folder, sets, calibrating)
    _find_thresholds(report, measurement, layers, skipping, searched)
    has_patterns = job.sparsity is not None and bool(job.sparsity.patterns)
    if not report.skipping and (sets.prompts or not has_patterns):
        return ThresholdModel(exact)
    model = put_thresholds(exact, report.thresholds) if report.skipping else exact
    first = tuple(sets.feeds(measurement.inputs.maker, calibrating[:1]))
    report.measured_on = sets.describe(held_out)
    if sets.prompts:
        return ThresholdModel(model, sets.prompt_set(held_out), first)
    with counted_skipping(report):
        meter = measurement.cosines(model, held_out)
    report.cosines = OutputCosines(sets.describe(held_out), len(held_out), meter.means())
    check_cosines(report.cosines, job.options)
    return ThresholdModel(model, feeds=first)


def _find_thresholds(
    report: ThresholdReport,
    measurement: _Measurement,
    layers: Sequence[ThresholdLayer],
    skipping: Sequence[ThresholdSite],
    searched: Sequence[ThresholdSite],
) -> None:
    """Calibrates, and gives the report thresholds and what each one alone costs.

    Args:
        report: has the thresholds that are stated.
        measurement: runs the model.
        layers: all attentions, for each kind.
        skipping: what has a threshold.
        searched: those of them whose threshold is not stated.
    """
    stated, reasons = report.thresholds, dict[ThresholdSite, str]()
    with measurement.open(skipping, searched) as runs:
        if searched:
            ladders = {site: _ladder_of(site) for site in searched}
            found = calibrate(
                ladders, runs.run, lambda c: measurement.loss_together({**stated, **c}), measurement.allowed
            )
            report.thresholds = {**stated, **found.thresholds}
            report.calibrated_on = measurement.sets.describe(measurement.calibrating)
            reasons |= found.reasons
        trials = {site: runs.run(site, c) for site, c in report.thresholds.items() if c > 0}
        report.runs = runs.count
    rows = []
    for layer in layers:
        row = _row_of(layer, report.thresholds.get(layer.site), reasons.get(layer.site, ""))
        if (trial := trials.get(layer.site)) is not None:
            row = replace(row, share=trial.share, loss=trial.loss, mass_kept=trial.mass_kept)
        rows.append(replace(row, is_calibrated=row.skips and layer.site in searched))
    report.rows = rows


@contextmanager
def counted_skipping(report: ThresholdReport | None) -> Iterator[None]:
    """Sessions meanwhile leave out keys, whatever this process's environment says, and the report gets their share."""
    if report is None or not report.skipping:
        yield
        return
    with session_environment(STOF_SKIP_SCORES="1"):
        take_skip_counts()  # holds the library, which else goes with its last session, and with it the counts
        yield
        counts = take_skip_counts()
        report.share = None if counts is None or not counts.scored else counts.share


def _stated_thresholds(job: Job, layers: Sequence[ThresholdLayer]) -> dict[ThresholdSite, float]:
    """The thresholds that the plan or the option states.

    Raises:
        ArgumentError: when the plan has one of an attention that the model has not, or none of one that skips.
    """
    skipping = [x for x in layers if not x.reason]
    by_kind = {} if job.plan is None else job.plan.thresholds
    planned = {ThresholdSite(kind, name): c for kind, found in by_kind.items() for name, c in found.items()}
    if unknown := sorted(site.name for site in planned if site not in {x.site for x in layers}):
        raise ArgumentError(f"the plan has a threshold of {unknown[0]!r}, and the optimized model no such attention")
    if missing := [x for x in skipping if x.kind in by_kind and x.site not in planned]:
        raise ArgumentError(
            f"the plan has no threshold of {missing[0].name!r}, which {missing[0].kind.third_person}; save the plan again"
        )
    stated = {x.site: x.clause.threshold for x in skipping if x.clause is not None and x.clause.threshold is not None}
    return {site: c for site, c in stated.items() if site.kind not in by_kind} | {
        x.site: planned[x.site] for x in skipping if x.site in planned
    }


def _ladder_of(site: ThresholdSite) -> Ladder:
    return Ladder(site.kind.ladder, site.kind.spare)


def _row_of(layer: ThresholdLayer, threshold: float | None, reason: str = "") -> ThresholdRow:
    """The report's row of an attention. A threshold of None is not known yet."""
    reason = layer.reason or reason or ("the plan says so" if threshold == 0 else "")
    c = threshold or 0.0
    return ThresholdRow(layer.kind, layer.name, layer.layer, not reason, reason, c, mass_bound=layer.kind.mass_bound(c))


def _check_lengths(
    sets: MeasuredSets, held_out: Sequence[int], report: ThresholdReport, *, is_calibrated: bool
) -> None:
    """Warns of held-out sets in which hardly anything is skipped, and refuses to calibrate where they are such.

    Raises:
        ArgumentError: with the length.
    """
    if not sets.lengths:
        report.warnings.append(
            f"{sets.source}: no integers [B, S] with any S tell the number of keys; below {LEAST_KEYS} the loss proves little"
        )
        return
    longest = max(sets.lengths[i] for i in held_out)
    if longest >= LEAST_KEYS:
        return
    words = f"{sets.source}: the longest that measures the loss has {longest} keys"
    if is_calibrated:
        raise ArgumentError(
            f"{words}, and thresholds are calibrated on {LEAST_KEYS} at least: shorter ones have few keys to leave out, and "
            "prove nothing of longer ones; give longer ones, or a number as threshold"
        )
    report.warnings.append(f"{words}; below {LEAST_KEYS} hardly a key is left out, so that the loss proves little")


def _unmeasured(layers: Sequence[ThresholdLayer], stated: Thresholds) -> list[str]:
    """A warning where the CPU, on which all is measured, leaves out nothing of what the target leaves out."""
    unable = {
        (x.kind.unit, x.op) for x in layers if stated.get(x.site, 0) > 0 and not leaves_out(x.op, CPU.name, x.kind)
    }
    return [
        f"runs on the CPU compute every {unit} of {op}: the loss is that without skipping"
        for unit, op in sorted(unable)
    ]


class _Measurement:
    """Runs of the model on sets of inputs, and the loss against the original.

    Args:
        job: the optimization.
        stages: whose model it is.
        folder: for temporary files.
        sets: what it runs on.
        calibrating: the indices of those that thresholds are found on.
    """

    def __init__(
        self, job: Job, stages: Sequence[Stage], folder: Path, sets: MeasuredSets, calibrating: Sequence[int]
    ) -> None:
        self.job, self.folder, self.sets, self.calibrating = job, folder, sets, calibrating
        self.stages = stages
        self.exact = stages[-1].written
        self.inputs = find_model_inputs(job, stages)
        options = job.options
        self.allowed = options.max_kl if sets.prompts else 1.0 - options.min_cosine

    @contextmanager
    def open(self, skipping: Sequence[ThresholdSite], searched: Sequence[ThresholdSite]) -> Iterator[ThresholdRuns]:
        """Sessions that skip, in a process of their own.

        Args:
            skipping: what has a threshold.
            searched: those of them whose threshold is not stated.
        """
        most = sum(_ladder_of(site).most_runs for site in searched) + len(skipping)
        line = Progress()
        limits = prompt_limits(self.job.options.verify_memory)
        sets = self.sets
        try:
            with temporary_folder(self.folder) as scratch, session_environment(STOF_SKIP_SCORES="1"):
                sessions = Sessions(self.job.source.parent.resolve(), scratch, limits)
                yield ThresholdRuns(
                    sessions,
                    self.exact,
                    list(dict.fromkeys(site.name for site in skipping)),
                    sets.feeds(self.inputs.maker, self.calibrating),
                    sets.outputs,
                    sets.new_meter,
                    lambda run: line.show(f"thresholds: run {run} of at most {most}"),
                )
        except RuntimeFailure as error:
            raise ArgumentError(f"{sets.source}: the optimized model does not run on it: {error}") from error
        except LimitReached as error:
            raise VerifyError(f"the loss of thresholds could not be measured: {error}") from error
        finally:
            line.close()
            release_sessions()

    def loss_together(self, thresholds: Thresholds) -> float:
        """The loss against the original on what calibrates."""
        model = put_thresholds(self.exact, thresholds)
        if self.sets.prompts:
            prompts = self.sets.prompt_set(self.calibrating)
            job = self.job
            return measure_loss(job.source, model, self.inputs, prompts, self.folder, job.options).worst_kl
        return self.cosines(model, self.calibrating).loss()

    def cosines(self, model: onnx.ModelProto, some: Sequence[int]) -> CosineMeter:
        """The cosines of a model's outputs with the original's, as :func:`measure_cosines` has them."""
        return measure_cosines(self.job, self.stages, self.inputs, self.sets, some, model, self.folder)
