# SPDX-License-Identifier: Apache-2.0
"""Lets attentions, GEMMs and sparse MLPs of an optimized model compute in reduced precision where errors are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import onnx

from stof.arguments.precisions import BF16, Precision, RoundedOperands
from stof.attention_precision.eight_bits import apply_eight_bits, report_eight_bits
from stof.attention_precision.errors import measure_errors
from stof.attention_precision.layers import check_library, find_precision_rows, put_precision
from stof.attention_precision.measured import draw_sets, longest_sets
from stof.attention_precision.mlp_errors import measure_mlp_errors
from stof.attention_precision.mlp_nodes import put_mlp_precision, report_mlps
from stof.errors import ArgumentError, UnsupportedError, VerifyError
from stof.execution.given_inputs import GivenFeed
from stof.execution.session_process import release_sessions
from stof.gemm_precision.apply import judge_rows, put_gemms, report_gemms
from stof.gemm_precision.errors import describe_rows, measure_gemm_errors
from stof.gemm_precision.selection import GEMM_SELECTION
from stof.gemm_precision.sites import FoundGemms, find_gemms
from stof.op_rewrite import Job, Measure
from stof.options import Options
from stof.report import Report
from stof.runtime.bf16_kernel import cpu_bf16_gemm_kernel
from stof.runtime.library import has_cpu_gemm
from stof.sparsify.gemm_report import GemmReport
from stof.sparsify.mlp_precision_report import MlpPrecisionReport
from stof.sparsify.precision_report import PrecisionReport, count_attentions
from stof.sparsify.reduced_report import ReducedPrecisionReport
from stof.sparsify.reduced_rows import ReducedRows, Row
from stof.sparsify.threshold_report import OutputCosines
from stof.stages import Stage, find_model_inputs, typed_attributes_of_bf16
from stof.symbolic import Symbolic
from stof.thresholds.measure_cosines import check_cosines, measure_cosines
from stof.thresholds.measured_sets import MeasuredSets, find_sets
from stof.verification.site_error import SiteError

_Judge = Callable[[PrecisionReport, Job, Mapping[str, SiteError], str], None]


def allowed_precision(options: Options) -> Precision | None:
    """The precision that options allow attentions to compute in; None: full precision."""
    return BF16 if options.allow_bf16 else None


def report_precision(report: Report, job: Job, stages: Sequence[Stage]) -> ReducedPrecisionReport | None:
    """Has the report say what may compute in reduced precision, before errors are measured; gives that part of it.

    Raises:
        ArgumentError: when the library does not know it, or the plan is of another model.
    """
    if job.options.eight_bits:
        return report_eight_bits(report, job, stages)
    found = _report_attentions(report, job, stages)
    if found is not None and stages:
        written, facts = stages[-1].written, stages[-1].facts
        found.gemms = _report_gemms(_find_gemms(job, written, facts), job, found.precision)
        found.mlps = _report_mlps(job, written, facts, found.precision)
    return found


def _report_attentions(report: Report, job: Job, stages: Sequence[Stage]) -> PrecisionReport | None:
    """The part of the report with the rows of attentions alone."""
    precision = allowed_precision(job.options)
    if precision is None:
        return None
    check_library(precision)
    bound = precision.max_error if job.options.max_error is None else job.options.max_error
    found = report.attention_precision = PrecisionReport(precision=precision, max_error=bound)
    if not any(s.decided.has_replaced for s in stages):
        return found
    names = _planned(None if job.plan is None else job.plan.attention_precision, precision)
    found.rows = find_precision_rows(stages[-1].written, stages[-1].facts, precision, names)
    return found


def _planned(plan: Mapping[str, Precision] | None, precision: Precision) -> list[str] | None:
    """The names of operators that a plan gives a precision; None: it does not decide."""
    return None if plan is None else [name for name, kind in plan.items() if kind is precision]


def _find_gemms(job: Job, model: onnx.ModelProto, facts: Symbolic) -> FoundGemms | None:
    """The matmuls by constant weights; None where options or the library leave these to the runtime."""
    return find_gemms(model, facts, job.source.parent) if job.options.products and has_cpu_gemm() else None


def _report_gemms(gemms: FoundGemms | None, job: Job, precision: Precision) -> GemmReport:
    selection = job.selections.get(GEMM_SELECTION)
    if gemms is None:
        if selection is not None:
            left = "the library has no GEMM" if job.options.products else "--products off leaves matmuls as they are"
            selection.refuse_all(left)
        return GemmReport()
    names = _planned(None if job.plan is None else job.plan.gemm_precision, precision)
    return report_gemms(gemms, cpu_bf16_gemm_kernel(), precision, names, selection)


def _report_mlps(job: Job, model: onnx.ModelProto, facts: Symbolic, precision: Precision) -> MlpPrecisionReport:
    names = _planned(None if job.plan is None else job.plan.mlp_precision, precision)
    return report_mlps(model, facts, precision, names)


def apply_precision(
    report: Report,
    job: Job,
    model: onnx.ModelProto,
    stages: Sequence[Stage],
    folder: Path,
    user_inputs: Sequence[GivenFeed],
    measure: Measure,
) -> onnx.ModelProto:
    """A model whose operators may compute in the precision that options allow; itself where none does.

    Args:
        report: gets errors, and cosines where there are inputs.
        job: the optimization.
        model: the last stage's, perhaps with run-time masks.
        stages: whose model it is, verified in full precision.
        folder: for temporary files.
        user_inputs: the user's sets of inputs.
        measure: times a step.

    Raises:
        ArgumentError: for prompts and inputs that the model does not run on.
        VerifyError: when memory does not suffice, or cosines are below ``--min-cosine``.
    """
    if job.options.eight_bits:
        return apply_eight_bits(report, job, model, stages, folder, user_inputs, measure)
    found = _report_attentions(report, job, stages)  # again: verification may have dropped rewrites
    if found is None:
        return model
    found.is_decided = True
    facts = stages[-1].facts if model is stages[-1].written else job.facts.of(model)
    gemms = _find_gemms(job, model, facts)
    gemms = None if gemms is None else gemms.checked()
    found.gemms = _report_gemms(gemms, job, found.precision)
    found.mlps = _report_mlps(job, model, facts, found.precision)
    if gemms is None and job.plan is not None and job.plan.gemm_precision:
        why = "the library has no GEMM" if job.options.products else "--products off leaves matmuls"
        found.warnings.append(f"the plan's gemm_precision is not applied: {why}")
    if not found.changes_outputs:
        return model
    sets = find_sets(job.model, job.prompts, user_inputs)
    with measure("errors"):
        _measure_all_errors(found, job, stages, gemms, sets, folder)
    if any(row.reduced and not row.kernel for row in found.rows):
        found.warnings.append(
            f"this machine has no {found.precision.name} kernel: errors and loss, where measured, are those of full precision"
        )
    reduced = model if gemms is None else _put_gemms(found, gemms, model)
    if found.reduced:
        reduced = put_precision(reduced, found.precision, found.reduced)
    if found.mlps.reduced:
        reduced = put_mlp_precision(reduced, found.precision, found.mlps.reduced)
    if sets is not None and not sets.prompts and found.changes_outputs:
        with measure("inputs"):
            _measure_cosines(found, job, stages, sets, reduced, folder)
    return reduced


def _put_gemms(found: PrecisionReport, gemms: FoundGemms, model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with StofGemm for the report's matmuls; itself, with a reason in each row, where they do not fit together."""
    if not found.gemms.reduced:
        return model
    try:
        return put_gemms(gemms, found.precision, found.gemms.reduced)
    except UnsupportedError as error:
        found.gemms.rows = [
            replace(row, reduced=False, reason=str(error)) if row.reduced else row for row in found.gemms.rows
        ]
        return model


def _measure_all_errors(
    found: PrecisionReport,
    job: Job,
    stages: Sequence[Stage],
    gemms: FoundGemms | None,
    sets: MeasuredSets | None,
    folder: Path,
) -> None:
    """Gives all operators their errors, on drawn inputs where the user gives none."""
    measured = sets or draw_sets(job, stages)
    if measured is None:
        unknown = "there is nothing to measure it on; give --inputs or --prompts"
        _judge_rows(found, job, {}, unknown)
        _judge_gemms(found, job, {}, unknown)
        _judge_mlps(found, job, {}, unknown)
        return
    _measure_errors(found, job, stages, measured, folder, is_drawn=sets is None)
    _measure_gemms(found, job, stages, gemms, measured, folder, is_drawn=sets is None)
    _measure_mlps(found, job, stages, measured, folder, is_drawn=sets is None)


def _measure_cosines(
    found: PrecisionReport,
    job: Job,
    stages: Sequence[Stage],
    sets: MeasuredSets,
    reduced: onnx.ModelProto,
    folder: Path,
) -> None:
    """The loss of the whole model on --inputs.

    Raises:
        VerifyError: when it is too large.
    """
    every = list(range(sets.count))
    try:
        typed = typed_attributes_of_bf16(job.model, stages)
        meter = measure_cosines(job, stages, find_model_inputs(job, stages), sets, every, reduced, folder, typed)
    finally:
        release_sessions()
    found.cosines = OutputCosines(sets.describe(every), len(every), meter.means())
    check_cosines(found.cosines, job.options, found.precision.option)


def _measure_errors(
    found: PrecisionReport, job: Job, stages: Sequence[Stage], sets: MeasuredSets, folder: Path, *, is_drawn: bool
) -> None:
    """Gives rows their errors, and full precision where these are too large or not known."""
    some = longest_sets(sets)
    if not found.reduced:
        return
    try:
        measured = measure_errors(job, stages, found.precision, found.reduced, sets, some, folder)
    except (ArgumentError, VerifyError) as error:
        if not is_drawn:  # what the user gives has to be measured
            raise
        _judge_rows(found, job, {}, str(error))
        return
    found.measured_on = sets.describe(some)
    if measured.tokens:
        found.measured_on = f"the first {measured.tokens} tokens of {found.measured_on}"
    _judge_rows(
        found,
        job,
        measured.sites,
        "it lies in a subgraph, reads tensors that only the result has, or its output is 0 or not finite",
    )


def _measure_gemms(
    found: PrecisionReport,
    job: Job,
    stages: Sequence[Stage],
    gemms: FoundGemms | None,
    sets: MeasuredSets,
    folder: Path,
    *,
    is_drawn: bool,
) -> None:
    """Gives GEMMs their errors; those with large or unknown ones stay as they are."""
    if gemms is None or not found.gemms.reduced:
        return
    precision, some = _rounded_operands(found), longest_sets(sets)
    with _judged_without(found, job, _judge_gemms, is_drawn=is_drawn):
        errors = measure_gemm_errors(job, stages, gemms, precision, sets, some, folder)
        found.gemms.measured_on = describe_rows(sets, some)
        _judge_gemms(found, job, errors, "its output is 0 or not finite")


def _judge_gemms(found: PrecisionReport, job: Job, sites: Mapping[str, SiteError], unknown: str) -> None:
    plan = None if job.plan is None else job.plan.gemm_precision
    _judge_operators(found.gemms, plan, found, job, sites, unknown)


def _measure_mlps(
    found: PrecisionReport, job: Job, stages: Sequence[Stage], sets: MeasuredSets, folder: Path, *, is_drawn: bool
) -> None:
    """Gives sparse MLPs their errors; those with large or unknown ones keep their weights."""
    if not found.mlps.reduced:
        return
    precision, some = _rounded_operands(found), longest_sets(sets)
    with _judged_without(found, job, _judge_mlps, is_drawn=is_drawn):
        names = found.mlps.reduced
        errors, found.mlps.measured_on = measure_mlp_errors(job, stages, precision, names, sets, some, folder)
        _judge_mlps(found, job, errors, "it reads tensors that only the result has, or its output is 0 or not finite")


def _judge_mlps(found: PrecisionReport, job: Job, sites: Mapping[str, SiteError], unknown: str) -> None:
    plan = None if job.plan is None else job.plan.mlp_precision
    _judge_operators(found.mlps, plan, found, job, sites, unknown)


def _rounded_operands(found: PrecisionReport) -> RoundedOperands:
    assert isinstance(found.precision, RoundedOperands)
    return found.precision


@contextmanager
def _judged_without(found: PrecisionReport, job: Job, judge: _Judge, *, is_drawn: bool) -> Iterator[None]:
    """Where errors of drawn inputs cannot be measured, operators are judged without them. What the user gives has to be."""
    try:
        yield
    except (ArgumentError, VerifyError) as error:
        if not is_drawn:
            raise
        judge(found, job, {}, str(error))


def _judge_operators(
    operators: ReducedRows[Row],
    plan: Mapping[str, Precision] | None,
    found: PrecisionReport,
    job: Job,
    sites: Mapping[str, SiteError],
    unknown: str,
) -> None:
    """Gives rows their errors; those with a large or an unknown one stay as they are."""
    operators.rows = judge_rows(
        operators.rows, sites, found.max_error, unknown, is_planned=plan is not None, force=job.options.force
    )


def _judge_rows(found: PrecisionReport, job: Job, sites: Mapping[str, SiteError], unknown: str) -> None:
    """Gives rows their errors; those with a large or an unknown one keep full precision.

    A plan takes the place of both bounds, ``--force`` that of unknown errors; then a warning counts these.

    Args:
        found: has the rows.
        job: the optimization.
        sites: what was measured, by the names of operators.
        unknown: why errors of others are not known.
    """
    is_planned = job.plan is not None and job.plan.attention_precision is not None
    rows = []
    for row in found.rows:
        error, reason = sites.get(row.node, SiteError()), ""
        if not row.reduced:
            rows.append(row)
            continue
        if error.fault:
            reason = f"it differs from the definition that rounds as its kernels do: {error.fault}"
        elif error.relative_rms is None and not (is_planned or job.options.force):
            reason = f"its error is not known: {unknown}; --force allows {found.precision.name} all the same"
        elif error.relative_rms is not None and error.relative_rms > found.max_error and not is_planned:
            reason = f"its relative RMS error is {error.relative_rms:.2g}, --max-error allows {found.max_error:g}"
        rows.append(replace(row, relative_rms=error.relative_rms, reduced=not reason, reason=reason))
    found.rows = rows
    if count := sum(row.reduced and row.relative_rms is None for row in rows):
        found.warnings.append(f"the error of {count_attentions(count)} is not known: {unknown}")
