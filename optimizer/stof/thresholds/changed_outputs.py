# SPDX-License-Identifier: Apache-2.0
"""What an optimization does where options change outputs: what the report says of it, thresholds, and the loss on prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import onnx

from stof.arguments.threshold_kinds import ThresholdKind
from stof.execution.given_inputs import GivenFeed
from stof.op_parts import HoldsPrompts
from stof.op_rewrite import Job
from stof.prompts.loss import has_logits
from stof.report import Report
from stof.sparsify.report import SparsityReport
from stof.sparsify.sparsity import Sparsity
from stof.sparsify.spec import SparsitySpec
from stof.sparsify.threshold_report import ThresholdReport
from stof.stages import Stage, find_model_inputs

Measure = Callable[[str], AbstractContextManager[None]]  # times a step for the report


def declare_sparsity(report: Report, job: Job, spec: SparsitySpec, user_inputs: Sequence[GivenFeed]) -> Job:
    """The job with what --sparsify asks for. The report gets a place for it.

    Raises:
        ArgumentError: for thresholds that no kernel of the target reads, or that cannot be calibrated.
    """
    report.sparsity = SparsityReport(spec.text, has_patterns=bool(spec.clauses))
    if spec.threshold_clauses:
        from stof.thresholds.apply import check_request

        check_request(spec, job, user_inputs)
        job = replace(job, thresholds=spec)
        report.sparsity.threshold_report = ThresholdReport(spec.threshold_kinds)
    return replace(job, sparsity=Sparsity(spec, report.sparsity)) if spec.clauses else job


def stated_thresholds(report: Report) -> Mapping[ThresholdKind, Mapping[str, float]]:
    """The thresholds that a plan keeps."""
    return {} if report.sparsity is None else report.sparsity.thresholds


def report_thresholds(report: Report, job: Job, stages: Sequence[Stage]) -> None:
    """Has the report say which attentions have thresholds, before these are calibrated.

    Raises:
        ArgumentError: when none can, or the plan has thresholds of others.
    """
    if job.thresholds is None or not any(s.decided.has_replaced for s in stages):
        return
    from stof.thresholds.apply import report_layers

    report_layers(job, job.thresholds, _threshold_report(report), stages[-1].written)


def put_thresholds(
    report: Report,
    job: Job,
    stages: Sequence[Stage],
    folder: Path,
    user_inputs: Sequence[GivenFeed],
    measure: Measure,
) -> tuple[onnx.ModelProto, Job]:
    """The last stage's model with its thresholds, and the job with the prompts that the loss is measured on.

    Raises:
        ArgumentError, VerifyError: as :func:`stof.thresholds.apply.apply_thresholds`.
    """
    if job.thresholds is None:
        return stages[-1].written, job
    from stof.thresholds.apply import apply_thresholds

    with measure(job.thresholds.threshold_kinds[0].key):
        found = apply_thresholds(job, job.thresholds, _threshold_report(report), stages, folder, user_inputs)
    return found.model, replace(job, prompts=found.prompts or job.prompts)


def _threshold_report(report: Report) -> ThresholdReport:
    """What the report says of thresholds, which the options name."""
    assert report.sparsity is not None
    assert report.sparsity.threshold_report is not None
    return report.sparsity.threshold_report


def mark_written(report: Report, stages: Sequence[Stage]) -> None:
    """Has the report of --sparsify say which attentions an operator took."""
    if report.sparsity is not None:
        taken = {e.name for s in stages for e in s.decided.plan if e.replace}
        report.sparsity.mark_written(taken, "nothing was replaced, and outputs are those of the original")


def measure_loss_on_prompts(
    report: Report, job: Job, stages: Sequence[Stage], final: onnx.ModelProto, target: Path, measure: Measure
) -> None:
    """Measures by how much next tokens change, where options change outputs and there are prompts.

    Raises:
        VerifyError: when it is above --max-kl.
    """
    is_sparsified = report.sparsity is not None and report.sparsity.changes_outputs
    changed = [s.decided.section for s in stages if s.decided.section.changes_outputs]
    decided = [s.decided for s in stages]
    prompts = job.prompts or next(
        (d.held_out for d in decided if isinstance(d, HoldsPrompts) and d.held_out is not None), None
    )
    if prompts is None or not (is_sparsified or changed):
        return
    from stof.prompt_runs.measure_loss import check_loss, measure_loss
    from stof.thresholds.apply import counted_skipping

    # Patterns and pages have no other measure; thresholds and neurons say themselves what they lose.
    by_itself = report.sparsity is None or not (report.sparsity.sparsified or report.sparsity.chooses_pages)
    if by_itself and not has_logits(job.model):
        return
    thresholds = None if report.sparsity is None else report.sparsity.threshold_report
    with measure("prompts"), counted_skipping(thresholds):
        inputs = find_model_inputs(job, stages)
        loss = measure_loss(job.source, final, inputs, prompts, target.parent, job.options)
    if is_sparsified and report.sparsity is not None:
        report.sparsity.loss, report.sparsity.decode_loss = loss.whole, loss.decoded
    for section in changed:
        section.loss = loss
    options = [*(["--sparsify"] if is_sparsified else []), *(["--sparse-mlp"] if changed else [])]
    check_loss(loss, " with ".join(options), job.options)
