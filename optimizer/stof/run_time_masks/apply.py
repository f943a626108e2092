# SPDX-License-Identifier: Apache-2.0
"""Applies run-time masks to the model that was verified, and has the report say which attentions have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import onnx

from stof.arguments.threshold_kinds import ThresholdKind
from stof.execution.given_inputs import GivenFeed
from stof.op_rewrite import Job, Measure
from stof.report import Report
from stof.sparsify.pages_clause import PAGES
from stof.sparsify.spec import SparsitySpec
from stof.stages import Stage, find_model_inputs

Feed = Mapping[str, np.ndarray]


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


def apply_run_time_masks(
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


def stated_thresholds(report: Report) -> Mapping[ThresholdKind, Mapping[str, float]]:
    """The thresholds that a plan keeps."""
    return {} if report.sparsity is None else report.sparsity.thresholds


def mark_written(report: Report, stages: Sequence[Stage]) -> None:
    """Has the report of --sparsify say which attentions an operator took."""
    if report.sparsity is not None:
        taken = {e.name for s in stages for e in s.decided.plan if e.replace}
        report.sparsity.mark_written(taken, "nothing was replaced, and outputs are those of the original")
