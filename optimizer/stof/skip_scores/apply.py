# SPDX-License-Identifier: Apache-2.0
"""Gives an optimized model its thresholds of skip by score: stated, of a plan, or calibrated; and measures what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx

from stof.errors import ArgumentError, VerifyError
from stof.execution.given_inputs import GivenFeed
from stof.execution.ort_sessions import Sessions
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure, release_sessions, session_environment, take_skip_counts
from stof.files import temporary_folder
from stof.op_parts import StatesOutputs
from stof.op_rewrite import Job
from stof.options import Options
from stof.progress import Progress
from stof.prompt_runs.limits import prompt_limits
from stof.prompt_runs.measure_loss import measure_loss
from stof.prompts.files import PromptSet
from stof.runtime.skip_counts import skips_scores
from stof.skip_scores.calibrate import RUNS_OF_LAYER, calibrate
from stof.skip_scores.cosines import CosineMeter
from stof.skip_scores.layers import SkipLayer, check_target, find_layers, put_thresholds
from stof.skip_scores.measured_sets import LEAST_KEYS, MeasuredSets, find_sets
from stof.skip_scores.runs import SkipRuns
from stof.skip_scores.switched_off import check_switched_off, draw_unpadded
from stof.sparsify.skip_report import COSINE, KL, OutputCosines, SkippedLayer, SkipReport
from stof.sparsify.spec import SparsitySpec
from stof.stages import Stage, find_model_inputs
from stof.targets import CPU


def check_request(spec: SparsitySpec, job: Job, given: Sequence[GivenFeed]) -> None:
    """Refuses what cannot be: a target whose kernels skip nothing, and calibration without prompts or inputs.

    Raises:
        ArgumentError: saying what to give.
        LibraryError: without a library, and for one of an earlier version.
    """
    check_target(job.target, spec)
    is_planned = job.plan is not None and bool(job.plan.skip_thresholds)
    if any(c.threshold is None for c in spec.skip_clauses) and not is_planned and job.prompts is None and not given:
        raise ArgumentError(
            f"--sparsify {spec.text!r}: threshold=auto is calibrated on runs; give --prompts FILE for a model with logits, "
            "--inputs FILE for any other, or a number: threshold=0.5 for instance"
        )


def report_layers(job: Job, spec: SparsitySpec, report: SkipReport, model: onnx.ModelProto) -> tuple[SkipLayer, ...]:
    """The attentions of the model. The report gets their rows and the thresholds that are stated, before any is calibrated.

    Raises:
        ArgumentError: as :func:`stof.skip_scores.layers.find_layers`, and for a plan of another model.
    """
    layers = find_layers(model, spec, job.target)
    report.thresholds = _stated_thresholds(job, layers)
    report.rows = [_row_of(x, report.thresholds.get(x.name)) for x in layers]
    return layers


@dataclass(frozen=True, eq=False)
class SkippingModel:
    """A model that skips by score.

    Attributes:
        model: the model with thresholds; the one without where nothing skips.
        prompts: to measure the loss on; None: those of the job.
    """

    model: onnx.ModelProto
    prompts: PromptSet | None = None


def skip_by_score(
    job: Job, spec: SparsitySpec, report: SkipReport, stages: Sequence[Stage], folder: Path, given: Sequence[GivenFeed]
) -> SkippingModel:
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
    skipping = [x.name for x in layers if not x.reason]
    searched = [name for name in skipping if name not in report.thresholds]
    sets = find_sets(job.model, job.prompts, given)
    if sets is None:
        model = put_thresholds(exact, report.thresholds)
        _check_switched_off(job, stages, folder, model, draw_unpadded(find_model_inputs(job, stages)))
        return SkippingModel(model)
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
        return SkippingModel(exact)
    model = put_thresholds(exact, report.thresholds) if report.skipping else exact
    if report.skipping:
        first = sets.feeds(measurement.inputs.maker, calibrating[:1])
        _check_switched_off(job, stages, folder, model, [feed() for feed in first])
    report.measured_on = sets.describe(held_out)
    if sets.prompts:
        return SkippingModel(model, sets.prompt_set(held_out))
    with counted_skipping(report):
        meter = measurement.cosines(model, held_out)
    report.cosines = OutputCosines(sets.describe(held_out), len(held_out), meter.means())
    check_cosines(report.cosines, job.options)
    return SkippingModel(model)


def _check_switched_off(
    job: Job, stages: Sequence[Stage], folder: Path, model: onnx.ModelProto, feeds: Sequence[Mapping[str, np.ndarray]]
) -> None:
    """Compares the model with thresholds with the verified one, where options ask for verification.

    Raises:
        VerifyError: when outputs differ, or memory does not suffice.
    """
    if not job.options.verify:
        return
    try:
        for feed in feeds:
            with temporary_folder(folder) as scratch:
                sessions = Sessions(job.source.parent.resolve(), scratch, prompt_limits(job.options.verify_memory))
                check_switched_off(sessions, stages[-1].written, model, feed)
    except RuntimeFailure:
        return  # it does not run here: verification has said so
    except LimitReached as error:
        raise VerifyError(f"skip-scores could not be verified: {error}") from error


def _find_thresholds(
    report: SkipReport,
    measurement: _Measurement,
    layers: Sequence[SkipLayer],
    skipping: Sequence[str],
    searched: Sequence[str],
) -> None:
    """Calibrates, and gives the report thresholds and what each layer alone costs.

    Args:
        report: has the thresholds that are stated.
        measurement: runs the model.
        layers: all attentions.
        skipping: the names of those that skip.
        searched: of those whose threshold is not stated.
    """
    stated, reasons = report.thresholds, dict[str, str]()
    with measurement.open(skipping, searched) as runs:
        if searched:
            found = calibrate(
                searched, runs.run, lambda c: measurement.loss_together({**stated, **c}), measurement.allowed
            )
            report.thresholds = {**stated, **found.thresholds}
            report.calibrated_on = measurement.sets.describe(measurement.calibrating)
            reasons |= found.reasons
        trials = {name: runs.run(name, c) for name, c in report.thresholds.items() if c > 0}
        report.runs = runs.count
    rows = [_row_of(x, report.thresholds.get(x.name), reasons.get(x.name, "")) for x in layers]
    for i, row in enumerate(rows):
        if (trial := trials.get(row.node)) is not None:
            rows[i] = replace(row, share=trial.share, loss=trial.loss, mass_kept=trial.mass_kept)
    report.rows = [replace(row, is_calibrated=row.skips and row.node in searched) for row in rows]


@contextmanager
def counted_skipping(report: SkipReport | None) -> Iterator[None]:
    """Sessions meanwhile skip, whatever this process's environment says, and the report gets the share of what they skip."""
    if report is None or not report.skipping:
        yield
        return
    with session_environment(STOF_SKIP_SCORES="1"):
        take_skip_counts()  # holds the library, which else goes with its last session, and with it the counts
        yield
        counts = take_skip_counts()
        report.share = None if counts is None or not counts.scored else counts.share


def check_cosines(cosines: OutputCosines, options: Options) -> None:
    """Refuses outputs that are too far from the original's.

    Raises:
        VerifyError: naming the output and both numbers.
    """
    name, cosine = cosines.least
    if cosine >= options.min_cosine or options.force:
        return
    raise VerifyError(
        f"--sparsify changes outputs too much: the cosine of output {name!r} with the original's is {cosine:.6f} on "
        f"{cosines.source}, --min-cosine allows {options.min_cosine:g}. Nothing was written; choose a smaller threshold, lower "
        "--min-cosine, or write it anyway with --force"
    )


def _stated_thresholds(job: Job, layers: Sequence[SkipLayer]) -> dict[str, float]:
    """The thresholds that the plan or the option states, by the names of attentions.

    Raises:
        ArgumentError: when the plan has one of an attention that the model has not, or none of one that skips.
    """
    skipping = [x for x in layers if not x.reason]
    planned = {} if job.plan is None else job.plan.skip_thresholds
    if unknown := sorted(set(planned) - {x.name for x in layers}):
        raise ArgumentError(f"the plan has a threshold of {unknown[0]!r}, and the optimized model no such attention")
    if planned and (missing := [x.name for x in skipping if x.name not in planned]):
        raise ArgumentError(f"the plan has no threshold of {missing[0]!r}, which skips by score; save the plan again")
    if planned:
        return {x.name: planned[x.name] for x in skipping}
    return {x.name: x.clause.threshold for x in skipping if x.clause is not None and x.clause.threshold is not None}


def _row_of(layer: SkipLayer, threshold: float | None, reason: str = "") -> SkippedLayer:
    """The report's row of an attention. A threshold of None is not known yet."""
    reason = layer.reason or reason or ("the plan says so" if threshold == 0 else "")
    c = threshold or 0.0
    return SkippedLayer(layer.name, layer.layer, not reason, reason, c, mass_bound=c / (1 + c))


def _check_lengths(sets: MeasuredSets, held_out: Sequence[int], report: SkipReport, *, is_calibrated: bool) -> None:
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
            f"{words}, and thresholds are calibrated on {LEAST_KEYS} at least: shorter ones have few key tiles to skip, and "
            "prove nothing of longer ones; give longer ones, or a number as threshold"
        )
    report.warnings.append(f"{words}; below {LEAST_KEYS} hardly a key tile is skipped, so that the loss proves little")


def _unmeasured(layers: Sequence[SkipLayer], stated: Mapping[str, float]) -> list[str]:
    """A warning where the CPU, on which all is measured, skips nothing of what the target skips."""
    ops = sorted({x.op for x in layers if stated.get(x.name, 0) > 0 and not skips_scores(x.op, CPU.name)})
    return [f"runs on the CPU compute every key tile of {op}: the loss is that without skipping" for op in ops]


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
    def open(self, skipping: Sequence[str], searched: Sequence[str]) -> Iterator[SkipRuns]:
        """Sessions that skip, in a process of their own.

        Args:
            skipping: the names of attentions that skip.
            searched: of those whose threshold is not stated.
        """
        most = len(searched) * RUNS_OF_LAYER + len(skipping)
        line = Progress()
        limits = prompt_limits(self.job.options.verify_memory)
        sets = self.sets
        try:
            with temporary_folder(self.folder) as scratch, session_environment(STOF_SKIP_SCORES="1"):
                sessions = Sessions(self.job.source.parent.resolve(), scratch, limits)
                yield SkipRuns(
                    sessions,
                    self.exact,
                    skipping,
                    sets.feeds(self.inputs.maker, self.calibrating),
                    sets.outputs,
                    sets.new_meter,
                    lambda run: line.show(f"skip by score: run {run} of at most {most}"),
                )
        except RuntimeFailure as error:
            raise ArgumentError(f"{sets.source}: the optimized model does not run on it: {error}") from error
        except LimitReached as error:
            raise VerifyError(f"the loss of skip-scores could not be measured: {error}") from error
        finally:
            line.close()
            release_sessions()

    def loss_together(self, thresholds: Mapping[str, float]) -> float:
        """The loss against the original on what calibrates."""
        model = put_thresholds(self.exact, thresholds)
        if self.sets.prompts:
            prompts = self.sets.prompt_set(self.calibrating)
            job = self.job
            return measure_loss(job.source, model, self.inputs, prompts, self.folder, job.options).worst_kl
        return self.cosines(model, self.calibrating).loss()

    def cosines(self, model: onnx.ModelProto, some: Sequence[int]) -> CosineMeter:
        """The cosines of a model's outputs with the original's.

        Raises:
            ArgumentError: when a model does not run on a set.
            VerifyError: when memory does not suffice.
        """
        meter = CosineMeter(self.sets.outputs)
        try:
            with temporary_folder(self.folder) as scratch:
                limits = prompt_limits(self.job.options.verify_memory)
                sessions = Sessions(self.job.source.parent.resolve(), scratch, limits)
                original = sessions.make(self._original(), optimized=True, library=False)
                result = sessions.make(model, optimized=True, library=True)
                for feed in self.sets.feeds(self.inputs.maker, some):
                    arrays = feed()
                    meter.add(*(session.run(self.sets.outputs, arrays) for session in (original, result)))
        except RuntimeFailure as error:
            raise ArgumentError(f"{self.sets.source}: a model does not run on it: {error}") from error
        except LimitReached as error:
            raise VerifyError(f"the loss of skip-scores could not be measured: {error}") from error
        return meter

    def _original(self) -> onnx.ModelProto | Path:
        """The original, with outputs as options state them."""
        if self.inputs.original is not None:
            return self.inputs.original
        if self.job.sparsity is not None:
            return self.job.source
        model = self.job.model
        for stage in self.stages:
            if isinstance(stage.op, StatesOutputs):
                model = stage.op.stated_form(model, stage.decided)
        return self.job.source if model is self.job.model else model
