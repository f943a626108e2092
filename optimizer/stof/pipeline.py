# SPDX-License-Identifier: Apache-2.0
"""The steps of an optimization: load, then find, decide and emit for each op of ``stof.ops``, verify, write, report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from stof.errors import ArgumentError, ModelError, StofError, VerifyError, explained
from stof.execution.given_inputs import GivenFeed, InputSource, read_given_inputs
from stof.execution.session_process import RuntimeFailure, has_onnxruntime
from stof.files import check_outputs, write_text
from stof.graph.external_data import check_output_folder, data_to_copy, external_files
from stof.graph.load_save import load, save
from stof.op_rewrite import Job
from stof.ops import OPS
from stof.options import Options
from stof.plan import Plan, PlanEntry
from stof.plan import load as load_plan
from stof.recursion import deep_recursion
from stof.report import Report
from stof.runtime.library import build_info
from stof.selection import select
from stof.stages import Stage, rewrite
from stof.target_support import missing_for
from stof.tuning_cache import cache_path
from stof.verify_stages import verify_stages


def optimize(
    model: str | Path,
    output: str | Path | None = None,
    options: Options | None = None,
    inputs: InputSource | None = None,
) -> Report:
    """Writes an equivalent model with sparse attention.

    Args:
        model: the ONNX file; it is never modified. External data must lie beside it.
        output: the file to write, by default ``<name>.stof.onnx`` beside the input. Nothing is written when there is no
            site to replace, or with ``options.dry_run``.
        options: see :class:`stof.options.Options`.
        inputs: what verification runs on before drawn inputs: arrays by name, several of these, a callable that gives some,
            or what ``options.inputs`` takes, which it replaces.

    Raises:
        ArgumentError: wrong arguments, an output that cannot be written.
        ModelError: the input is no model that can be read, or none that ONNX Runtime can run.
        VerifyError: the result differs from the original; nothing was written but the report.
    """
    options = options or Options()
    if inputs is not None:
        options = replace(options, inputs=inputs)
    source = Path(model)
    # Not by with_name, which raises a ValueError of its own for "." and "/".
    target = Path(output or options.output or source.parent / f"{source.stem}.stof.onnx")
    report = Report(str(source), dry_run=options.dry_run or options.explain is not None, library=build_info())
    report.notes = missing_for(options, report.library)
    try:
        with deep_recursion():
            _optimize(report, source, target, options)
    except VerifyError:
        _write_report(report, options)
        raise
    except OSError as error:  # a full disk where temporary files lie, for instance
        place = f"{error.filename}: " if error.filename else ""
        raise ArgumentError(f"{source} cannot be optimized: {place}{error.strerror or error}") from error
    _write_report(report, options)
    return report


def _optimize(report: Report, source: Path, target: Path, options: Options) -> None:
    _check_files({"input": source}, target, options, report.dry_run)
    if options.verify and not report.dry_run and not has_onnxruntime():
        raise ArgumentError(
            "verification needs onnxruntime, which is not installed: pip install onnxruntime, or use --no-verify"
        )
    selections = dict(zip((op.key for op in OPS), select(options, [op.names for op in OPS]), strict=True))
    plan = _load_plan(options)
    with _timed(report, "load"), _as_model_error(source):
        graph = load(source)
    data = {f"external data {name!r}": source.parent / name for name in sorted(external_files(graph))}
    copies = {f"external data {c.location!r}": c.target for c in data_to_copy(graph, target, source)}
    _check_files(data, target, options, report.dry_run, copies)
    given = read_given_inputs(options.inputs, graph)
    job = Job(options, source, graph, report.library, plan, partial(_timed_step, report, source), selections)
    report.sections = {op.key: op.empty_section() for op in OPS}
    for op in OPS:
        if (earlier := op.find_earlier_result(job)) is not None:
            selections[op.key].check(earlier.candidates)
            report.sections[op.key] = earlier.section
            _save_plan({op.key: earlier.plan}, options)
            return
    if plan is not None and plan.target != options.target:
        raise ArgumentError(f"the plan is for target {plan.target}, not {options.target}; use --target {plan.target}")
    stages = rewrite(job, OPS)
    report.sections |= {s.op.key: s.decided.section for s in stages}
    report.nodes_before = len(graph.graph.node)
    if not report.dry_run and any(s.decided.has_replaced for s in stages):
        check_output_folder(stages[-1].model, target, source)
        with _runtime_failures_as_model_errors(source):
            stages = _verify_and_write(report, job, stages, target, given)
    _save_plan({s.op.key: s.decided.plan for s in stages}, options)


def _load_plan(options: Options) -> Plan | None:
    if options.plan is None:
        return None
    plan = load_plan(options.plan, {op.key: op.plan_format for op in OPS})
    if options.tune and not any(op.has_to_measure(options, plan) for op in OPS):
        kinds = " and ".join(f"{op.names.kind}s" for op in OPS)
        raise ArgumentError(
            f"--tune has nothing to measure: {options.plan} decides all {kinds}; leave --tune or --plan out"
        )
    return plan


def _save_plan(entries: dict[str, tuple[PlanEntry, ...]], options: Options) -> None:
    if options.save_plan is not None:
        Plan(entries, options.target).save(options.save_plan)


def _check_files(
    read: dict[str, Path], target: Path, options: Options, dry_run: bool, copies: Mapping[str, Path] | None = None
) -> None:
    written = {"report": options.json, "saved plan": options.save_plan, "output": None if dry_run else target}
    if options.plan is not None:
        read = {**read, "plan": options.plan}
    if options.tune:
        read = {**read, "tuning cache": cache_path()}
    check_outputs(read, {name: path for name, path in written.items() if path is not None}, {} if dry_run else copies)


def _write_report(report: Report, options: Options) -> None:
    if options.json is not None:
        write_text("report", options.json, [report.to_json()])


@contextmanager
def _runtime_failures_as_model_errors(source: Path) -> Iterator[None]:
    """What ONNX Runtime says about a model that it cannot load or run is a fact about the model, not a fault of ours."""
    try:
        yield
    except RuntimeFailure as error:
        raise ModelError(
            f"{source} cannot be verified, because ONNX Runtime's CPU provider cannot load or run it: {error}. "
            "Where it needs operators that you register yourself, use --no-verify; nothing was written"
        ) from error


@contextmanager
def _as_model_error(source: Path) -> Iterator[None]:
    """A graph that breaks the standard's rules may break any assumption: that is a fact about the model, too."""
    try:
        yield
    except (StofError, OSError):
        raise
    except Exception as error:  # whatever a damaged graph makes fail
        raise ModelError(
            f"{source} cannot be analyzed ({type(error).__name__}: {explained(error)}); onnx.checker.check_model(model, "
            "full_check=True) may tell what is wrong with it. If it finds nothing, please report this model"
        ) from error


@contextmanager
def _timed_step(report: Report, source: Path, step: str) -> Iterator[None]:
    with _timed(report, step), _as_model_error(source):
        yield


@contextmanager
def _timed(report: Report, step: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    report.seconds[step] = time.monotonic() - start


def _verify_and_write(
    report: Report, job: Job, stages: list[Stage], target: Path, given: Sequence[GivenFeed]
) -> list[Stage]:
    """Verifies and writes the model, without rewrites that change its outputs.

    Returns:
        The stages as they were written.
    """
    if job.options.verify:
        stages = verify_stages(report, OPS, stages, target.parent, given)
    if not any(s.decided.has_replaced for s in stages):
        return stages
    final = stages[-1].model
    report.nodes_after = len(final.graph.node)
    with _timed(report, "write"):
        save(final, target, job.source)
    report.output = str(target)
    return stages
