# SPDX-License-Identifier: Apache-2.0
"""What an optimization does where options change outputs: run-time masks, what the report says of them, the loss on prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import onnx

from stof.arguments.threshold_kinds import ThresholdKind
from stof.errors import ArgumentError
from stof.execution.given_inputs import GivenFeed
from stof.op_parts import HoldsPrompts
from stof.op_rewrite import Job
from stof.prompts.loss import has_logits
from stof.report import Report
from stof.sparsify.pages_clause import PAGES
from stof.sparsify.pages_report import PagesReport
from stof.sparsify.report import SparsityReport
from stof.sparsify.sparsity import Sparsity
from stof.sparsify.spec import SparsitySpec
from stof.sparsify.threshold_report import ThresholdReport
from stof.stages import Stage, find_model_inputs

Measure = Callable[[str], AbstractContextManager[None]]  # times a step for the report
Feed = Mapping[str, np.ndarray]


def declare_sparsity(report: Report, job: Job, spec: SparsitySpec) -> Job:
    """The job with what --sparsify asks for. The report gets a place for it.

    Raises:
        ArgumentError: for run-time masks that no kernel of the target has.
        LibraryError: without a library, and for one of an earlier version.
    """
    report.sparsity = SparsityReport(spec.text, has_patterns=bool(spec.clauses))
    if spec.threshold_clauses:
        from stof.thresholds.layers import check_target

        check_target(job.target, spec)
        report.sparsity.threshold_report = ThresholdReport(spec.threshold_kinds)
    if spec.pages_clauses:
        from stof.choose_pages.layers import check_pages_target

        check_pages_target(job.target, spec)
        report.sparsity.pages = PagesReport(spec)
    if spec.threshold_clauses or spec.pages_clauses:
        job = replace(job, run_time_masks=spec)
    return replace(job, sparsity=Sparsity(spec, report.sparsity)) if spec.clauses else job


def check_plan(job: Job, spec: SparsitySpec | None) -> None:
    """Refuses a plan that was saved with other thresholds of --sparsify.

    Args:
        job: has the plan.
        spec: what --sparsify says; None: it is not given.

    Raises:
        ArgumentError: with the clauses of both.
    """
    if job.plan is None:
        return
    given = () if spec is None else spec.threshold_texts
    planned = job.plan.threshold_clauses
    if job.plan.sparsity and not planned:  # plans of earlier versions have no clauses
        kinds = () if spec is None else spec.threshold_kinds
        if not job.plan.thresholds or set(kinds) == set(job.plan.thresholds):
            return
        given, planned = (tuple(kind.clause for kind in some) for some in (kinds, job.plan.thresholds))
    if given != planned:
        one, other = ("; ".join(clauses) or "no thresholds" for clauses in (planned, given))
        raise ArgumentError(
            f"the plan was saved with {one}, and --sparsify has {other}; give the --sparsify that it was saved with"
        )


def check_calibration(job: Job, user_inputs: Sequence[GivenFeed]) -> None:
    """Refuses thresholds that are neither stated nor planned, where nothing can calibrate them.

    Raises:
        ArgumentError: saying what to give.
    """
    spec = job.run_time_masks
    planned = {} if job.plan is None else job.plan.thresholds
    clauses = () if spec is None else spec.threshold_clauses
    auto = [c.kind for c in clauses if c.threshold is None and c.kind not in planned]
    if spec is not None and auto and job.prompts is None and not user_inputs:
        raise ArgumentError(
            f"--sparsify {spec.text!r}: threshold=auto is calibrated on runs; give --prompts FILE for a model with logits, "
            f"--inputs FILE for any other, or a number: threshold={auto[0].example} for instance"
        )


def stated_thresholds(report: Report) -> Mapping[ThresholdKind, Mapping[str, float]]:
    """The thresholds that a plan keeps."""
    return {} if report.sparsity is None else report.sparsity.thresholds


def report_run_time_masks(report: Report, job: Job, stages: Sequence[Stage]) -> None:
    """Has the report say which attentions have run-time masks, before thresholds are calibrated.

    Raises:
        ArgumentError: when none can, or the plan has thresholds of others.
    """
    spec, sparsity = job.run_time_masks, report.sparsity
    if spec is None or sparsity is None or not any(s.decided.has_replaced for s in stages):
        return
    if sparsity.threshold_report is not None:
        from stof.thresholds.apply import report_layers

        report_layers(job, spec, sparsity.threshold_report, stages[-1].written)
    if sparsity.pages is not None:
        from stof.choose_pages.apply import report_pages

        report_pages(sparsity.pages, stages[-1].written)


def put_run_time_masks(
    report: Report,
    job: Job,
    stages: Sequence[Stage],
    folder: Path,
    user_inputs: Sequence[GivenFeed],
    measure: Measure,
) -> tuple[onnx.ModelProto, Job]:
    """The last stage's model with its run-time masks, and the job with the prompts that the loss is measured on.

    The model is held to the one that was verified, where options ask for verification.

    Raises:
        ArgumentError, VerifyError: as :func:`stof.thresholds.apply.apply_thresholds`.
        VerifyError: when outputs differ from those that were verified.
    """
    spec, sparsity, exact = job.run_time_masks, report.sparsity, stages[-1].written
    if spec is None or sparsity is None:
        return exact, job
    model, feeds = exact, tuple[Callable[[], Feed], ...]()
    if sparsity.threshold_report is not None:
        from stof.thresholds.apply import apply_thresholds

        with measure(spec.threshold_kinds[0].key):
            found = apply_thresholds(job, spec, sparsity.threshold_report, stages, folder, user_inputs)
        model, feeds = found.model, found.feeds
        job = replace(job, prompts=found.prompts or job.prompts)
    if sparsity.pages is not None:
        from stof.choose_pages.apply import choose_pages

        model = choose_pages(sparsity.pages, model)
        if sparsity.chooses_pages and sparsity.threshold_report is not None:
            sparsity.threshold_report.warn_of_pages()
    if model is not exact and job.options.verify:
        from stof.prompt_runs.switched_off import draw_unpadded

        with measure("verify"):
            inputs = replace(find_model_inputs(job, stages), user_feeds=tuple(user_inputs))
            every = chain((feed() for feed in feeds), draw_unpadded(inputs))
            sparsity.unverified = _check_switched_off(job, spec, exact, model, every, folder)
    return model, job


def _check_switched_off(
    job: Job, spec: SparsitySpec, exact: onnx.ModelProto, model: onnx.ModelProto, feeds: Iterable[Feed], folder: Path
) -> str:
    """Why a model with run-time masks was not compared with the verified one; empty where it was.

    Raises:
        VerifyError: as :meth:`stof.prompt_runs.switched_off.SwitchedOffCheck.run`.
    """
    from stof.prompt_runs.limits import prompt_limits
    from stof.prompt_runs.switched_off import SwitchedOffCheck

    clauses = [*(kind.clause for kind in spec.threshold_kinds), *([PAGES] if spec.pages_clauses else [])]
    check = SwitchedOffCheck(exact, model, " and ".join(clauses))
    return check.run(feeds, job.source, folder, prompt_limits(job.options.verify_memory))


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
