# SPDX-License-Identifier: Apache-2.0
"""The steps of an optimization: load, then find, decide and emit for each op of ``stof.ops``, verify, write, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx

from stof.errors import ArgumentError, ModelError, StofError, VerifyError, explained
from stof.execution.session_process import RuntimeFailure, has_onnxruntime, release_sessions
from stof.files import check_outputs, temporary_folder, write_text
from stof.graph.external_data import check_output_folder, data_to_copy, external_files
from stof.graph.load_save import load, save
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.ops import OPS, PLAN_FORMATS
from stof.options import Options
from stof.plan import Plan, PlanEntry
from stof.plan import load as load_plan
from stof.recursion import deep_recursion
from stof.report import Report
from stof.runtime.library import build_info
from stof.target_support import missing_for
from stof.tuning_cache import cache_path

if TYPE_CHECKING:
    from stof.verification.result import Verification

_LONGEST_REASON = 300


def optimize(model: str | Path, output: str | Path | None = None, options: Options | None = None) -> Report:
    """Writes an equivalent model with sparse attention.

    Args:
        model: the ONNX file; it is never modified. External data must lie beside it.
        output: the file to write, by default ``<name>.stof.onnx`` beside the input. Nothing is written when there is no
            site to replace, or with ``options.dry_run``.
        options: see :class:`stof.options.Options`.

    Raises:
        ArgumentError: wrong arguments, an output that cannot be written.
        ModelError: the input is no model that can be read, or none that ONNX Runtime can run.
        VerifyError: the result differs from the original; nothing was written but the report.
    """
    options = options or Options()
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


@dataclass(frozen=True)
class _Stage:
    """One op's part of an optimization: its decisions, and the models before and after they were emitted."""

    op: OpRewrite[Any, Any]
    decided: Decisions
    before: Callable[[], onnx.ModelProto]
    model: Callable[[], onnx.ModelProto]


def _optimize(report: Report, source: Path, target: Path, options: Options) -> None:
    _check_files({"input": source}, target, options, report.dry_run)
    if options.verify and not report.dry_run and not has_onnxruntime():
        raise ArgumentError(
            "verification needs onnxruntime, which is not installed: pip install onnxruntime, or use --no-verify"
        )
    plan = load_plan(options.plan, PLAN_FORMATS) if options.plan else None
    if plan is not None and options.tune and all(op.key in plan.entries for op in OPS):
        raise ArgumentError(
            f"--tune has nothing to measure: {options.plan} decides all sites and chains; leave --tune or --plan out"
        )
    with _timed(report, "load"), _as_model_error(source):
        graph = load(source)
    data = {f"external data {name!r}": source.parent / name for name in sorted(external_files(graph))}
    copies = {f"external data {c.location!r}": c.target for c in data_to_copy(graph, target, source)}
    _check_files(data, target, options, report.dry_run, copies)
    job = Job(options, source, graph, report.library, plan, partial(_timed_step, report, source))
    report.sections = {op.key: op.empty_section() for op in OPS}
    for op in OPS:
        if (earlier := op.find_earlier_result(job)) is not None:
            report.sections[op.key] = earlier.section
            _save_plan({op.key: earlier.plan}, options)
            return
    stages = _rewrite(report, job)
    if not report.dry_run and any(s.decided.has_replaced for s in stages):
        check_output_folder(stages[-1].model(), target, source)
        with _runtime_failures_as_model_errors(source):
            stages = _verify_and_write(report, job, stages, target)
    _save_plan({s.op.key: s.decided.plan for s in stages}, options)


def _rewrite(report: Report, job: Job) -> list[_Stage]:
    """Every op's decisions, each about the model that the ops before it have written."""
    stages: list[_Stage] = []
    model: Callable[[], onnx.ModelProto] = partial(_same, job.model)
    for op in OPS:
        found = op.find(job, model)
        if found is None:
            continue
        decided = op.decide(job, found)
        report.sections[op.key] = decided.section
        report.nodes_before = len(job.model.graph.node)
        stages.append(_Stage(op, decided, model, cache(partial(_emit, job, op, model, decided))))
        model = stages[-1].model
    return stages


def _same(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def _emit(
    job: Job, op: OpRewrite[Any, Any], model: Callable[[], onnx.ModelProto], decided: Decisions
) -> onnx.ModelProto:
    return op.emit(job, model(), decided)


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
    except Exception as error:
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


def _verify_and_write(report: Report, job: Job, stages: list[_Stage], target: Path) -> list[_Stage]:
    """Verifies and writes the model. Rewrites of ops that change outputs are undone, those of the last op first.

    Returns:
        The stages as they were written.
    """
    if job.options.verify:
        stages = _verify(report, job, stages, target)
    if not any(s.decided.has_replaced for s in stages):
        return stages
    final = stages[-1].model()
    report.nodes_after = len(final.graph.node)
    with _timed(report, "write"):
        save(final, target, job.source)
    report.output = str(target)
    return stages


def _verify(report: Report, job: Job, stages: list[_Stage], target: Path) -> list[_Stage]:
    verify_seconds = 0.0
    while any(s.decided.has_replaced for s in stages):
        last = max(i for i, s in enumerate(stages) if s.decided.changes_model)
        stage = stages[last]
        verification: Verification | None = None
        try:
            verification = _verification(job, stages, target)
            verify_seconds += verification.seconds
            failure = verification.failures[0].message() if verification.failures else ""
        except RuntimeFailure as error:
            failure = f"ONNX Runtime does not run the model: {str(error)[:_LONGEST_REASON]}"
            if stage.decided.undo(failure) is None:
                raise
        # A difference that comes with the last op's rewrites is no reason against those of the others.
        kept = stage.decided.undo(failure) if failure else None
        if kept is not None:
            stages[last] = _Stage(stage.op, kept, stage.before, stage.before)
            # Later ops changed nothing: their model is the one before, too.
            for i in range(last + 1, len(stages)):
                stages[i] = replace(stages[i], before=stage.before, model=stage.before)
            report.sections[stage.op.key] = kept.section
            continue
        report.verification = verification
        report.seconds["verify"] = verify_seconds
        if verification is not None and failure:
            raise VerifyError(stages[0].op.explain_failure(stages[0].decided, verification))
        break
    return stages


def _verification(job: Job, stages: list[_Stage], target: Path) -> Verification:
    source, final = job.source, stages[-1].model()
    try:
        _check_inputs(source, final)
        with temporary_folder(target.parent) as scratch:
            for stage in stages:
                found = stage.op.verify(job, stage.decided, stage.model(), final, scratch)
                if found is not None:
                    return found
        raise AssertionError("no op verifies the model")
    except OSError as error:
        raise ArgumentError(
            f"files for verification cannot be written to {target.parent}: {error.strerror or error}; make room there, "
            "choose another folder with -o, or leave verification out with --no-verify"
        ) from error
    except (KeyError, MemoryError, TypeError, ValueError) as error:  # inputs that cannot be drawn or are too large
        raise ModelError(
            f"{source} cannot be verified ({type(error).__name__}: {explained(error)}); --no-verify leaves that out. "
            "Nothing was written"
        ) from error
    finally:
        release_sessions()


def _check_inputs(source: Path, model: onnx.ModelProto) -> None:
    """Arrays of types that NumPy has not cannot be handed to the runtime; bfloat16 is widened."""
    given = {t.name for t in model.graph.initializer}
    for value in model.graph.input:
        kind = value.type.tensor_type.elem_type
        if value.name in given or kind in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.BFLOAT16):
            continue
        if onnx.helper.tensor_dtype_to_np_dtype(kind).isbuiltin != 1:
            raise ModelError(
                f"{source} cannot be verified, because ONNX Runtime's Python interface takes no inputs of element type "
                f"{onnx.TensorProto.DataType.Name(kind)}, which {value.name!r} has; --no-verify leaves that out. "
                "Nothing was written"
            )
