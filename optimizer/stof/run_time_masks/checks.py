# SPDX-License-Identifier: Apache-2.0
"""Checks of what options that change outputs ask for, before anything is decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stof.errors import ArgumentError
from stof.execution.given_inputs import GivenFeed
from stof.op_rewrite import Job
from stof.report import Report
from stof.sparsify.pages_report import PagesReport
from stof.sparsify.report import SparsityReport
from stof.sparsify.sparsity import Sparsity
from stof.sparsify.spec import SparsitySpec
from stof.sparsify.threshold_report import ThresholdReport


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
