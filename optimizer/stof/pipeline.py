# SPDX-License-Identifier: Apache-2.0
"""The steps of an optimization: load, prepare, find to emit for each op of ``stof.ops``, verify, write, report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from stof import progress
from stof.dequantize.declare import check_dequantized_plan, dequantize_attention
from stof.dequantize.measure import hold_to_float
from stof.errors import ArgumentError, MemoryLimitError, ModelError, StofError, VerifyError, explained
from stof.execution.given_inputs import GivenFeed, read_given_inputs
from stof.execution.runtime_faults import refuse_old_runtimes
from stof.execution.session_process import RuntimeFailure, has_onnxruntime
from stof.files import check_input, check_outputs, write_text
from stof.gemm_precision.selection import GEMM_NAMES, GEMM_SELECTION, check_gemm_options
from stof.graph.data_copies import check_output_folder, data_to_copy
from stof.graph.external_data import external_files, read_constants
from stof.graph.index import DOMAIN, all_nodes, opset_of
from stof.graph.load_save import copy_model, load, load_with_opset, save
from stof.html_report import to_html
from stof.memory.memory_report import MemoryReport
from stof.memory_bound.stage_memory import StageMemory
from stof.op_parts import Measures, ReadsOptions
from stof.op_rewrite import Job, OpSettings
from stof.ops import OPS, PLAN_FORMATS, STANDARD_OPS
from stof.options import STANDARD_OUTPUT, Options
from stof.plan import Plan, PlanEntry
from stof.plan import load as load_plan
from stof.prompts.files import PromptSet, check_vocabulary, read_prompts
from stof.recursion import deep_recursion
from stof.report import Report, describe_registration
from stof.run_facts.command import command_of
from stof.run_facts.facts import RunFacts, collect_facts, count_bytes
from stof.run_time_masks.apply import (
    apply_run_time_masks,
    mark_written,
    report_run_time_masks,
    stated_thresholds,
)
from stof.run_time_masks.checks import check_calibration, check_plan, declare_sparsity
from stof.run_time_masks.loss import measure_loss_on_prompts
from stof.runtime.library import build_info, library_path
from stof.selection import select
from stof.sparsify.sparsity import digest_of
from stof.sparsify.spec import parse_spec
from stof.stages import Stage, find_model_inputs, rewrite
from stof.target_support import missing_for
from stof.terminal import say
from stof.tuning_cache import cache_path
from stof.verify_stages import find_padded_batches, verify_stages


def optimize(model: str | Path, output: str | Path | None = None, options: Options | None = None) -> Report:
    """Writes an equivalent model with sparse attention.

    Args:
        model: the ONNX file; it is never modified. External data must lie beside it.
        output: the file to write, by default ``<name>.stof.onnx`` beside the input. When there is nothing to replace, a
            file that is named here or in ``options`` becomes a copy of the input, and the default one is not written.
            ``options.dry_run`` writes neither.
        options: see :class:`stof.options.Options`.

    Raises:
        ArgumentError: wrong arguments, an output that cannot be written.
        ModelError: the input is no model that can be read, or none that ONNX Runtime can run.
        MemoryLimitError: a run of the result is estimated to take more than ``options.memory_limit``; as below.
        VerifyError: the result differs from the original; nothing was written but the report.
    """
    options = options or Options()
    source = Path(model)
    # Not by with_name, which raises a ValueError of its own for "." and "/".
    target = Path(output or options.output or source.parent / f"{source.stem}.stof.onnx")
    return run(source, target, options, str(source), copies_unchanged=bool(output or options.output))


def run(
    source: Path,
    target: Path,
    options: Options,
    name: str,
    *,
    copies_unchanged: bool,
    is_output: bool = True,
    facts: RunFacts | None = None,
    when_failed: Callable[[Report], None] | None = None,
) -> Report:
    """Does the steps for one file; :func:`optimize` has the errors.

    Args:
        source: the model's file.
        target: the file to write.
        options: the settings; their ``output`` does not count.
        name: of the model in the report.
        copies_unchanged: a model with nothing to replace is copied to ``target``.
        is_output: ``target`` is an output of the user's, which the report names; else a temporary file.
        facts: of a run of which this is a part, and whose report has this one; None: it writes reports of its own.
        when_failed: gets the report where verification fails.
    """
    report = Report(name, dry_run=options.dry_run or options.explain is not None, library=build_info())
    report.emit = options.emit
    is_part = facts is not None
    command = command_of(name, replace(options, output=target if copies_unchanged else None))
    report.facts = facts or collect_facts(command if name == str(source) else "", report.library, options.tuned_for)
    report.notes = missing_for(options, report.library)
    try:
        with deep_recursion():
            _optimize(report, source, target, options)
            if report.output is None and not report.dry_run and copies_unchanged:
                _copy(report, source, target)
    except (MemoryLimitError, VerifyError) as error:
        report.failure = str(error)
        if when_failed is not None:
            when_failed(report)
        if not is_part:
            _write_report(report, options)
        raise
    except OSError as error:  # a full disk where temporary files lie, for instance
        file = f"{error.filename}: " if error.filename else ""
        raise ArgumentError(f"{source} cannot be optimized: {file}{error.strerror or error}") from error
    if report.has_result and report.output is not None:
        report.how_to_run = _describe_run(target, options)
    if not is_output:
        report.output = None
    if not is_part:
        _write_report(report, options)
    return report


def _describe_run(target: Path, options: Options) -> str:
    """What runs a written model with stof's operators."""
    if not options.emission.needs_library:
        return "it is plain ONNX: ONNX Runtime runs it without a library"
    if options.tuned_for.keeps_plugins:
        return f"build an engine: stof-trt build {target}"
    library = library_path()
    return f"{library.name}: {describe_registration(str(library))}; without it the model runs, slowly"


def _optimize(report: Report, source: Path, target: Path, options: Options) -> None:
    check_input(source)
    _check_files({"input": source}, target, options, report.dry_run)
    if options.verify and not report.dry_run and not has_onnxruntime():
        raise ArgumentError(
            "verification needs onnxruntime, which is not installed: pip install onnxruntime, or use --no-verify"
        )
    if options.verify and not report.dry_run:
        refuse_old_runtimes()
    _check_time_option(options, report.dry_run)
    ops = OPS if options.emission.needs_library else STANDARD_OPS
    names = {op.key: op.names for op in ops} | {GEMM_SELECTION: GEMM_NAMES}
    selections = dict(zip(names, select(options, [*names.values()]), strict=True))
    check_gemm_options(selections[GEMM_SELECTION], options)
    plan = _load_plan(options)
    with _measure_seconds(report, "load"), _as_model_error(source):
        graph, opset = load_with_opset(source)
    data = {f"external data {name!r}": source.parent / name for name in sorted(external_files(graph))}
    copies = {f"external data {c.location!r}": c.target for c in data_to_copy(graph, target, source)}
    _check_files(data, target, options, report.dry_run, copies)
    _note_sizes(report, model_bytes=count_bytes(source, external_files(graph)))
    user_inputs = read_given_inputs(options.inputs, graph)
    job = Job(options, source, graph, report.library, plan, partial(_measure_step, report, source), selections)
    report.sections = {op.key: op.empty_section() for op in OPS}
    report.optimized_before = dict(Counter(n.op_type for n in all_nodes(graph.graph.node) if n.domain == DOMAIN))
    earlier = {op.key: result for op in OPS if (result := op.find_earlier_result(job)) is not None}
    if earlier:
        _refuse_changes_of_optimized(options)
        if options.memory_limit:
            report.memory = MemoryReport(missing="the model was optimized before", limit=options.memory_limit)
        for key, result in earlier.items():
            selections[key].check(result.candidates)
            report.sections[key] = result.section
        empty: dict[str, tuple[PlanEntry, ...]] = {op.key: () for op in OPS if op.plan_format.required}
        entries = empty | {key: result.plan for key, result in earlier.items()}
        _save_plan(Plan(entries, options.tuned_for, options.emission), options)
        return
    if plan is not None:
        plan.check_is_for(options.tuned_for, options.emission)
        plan.check_precisions(options.precisions)
    check_dequantized_plan(plan, options)
    job = _prepare(report, _read_options(job, target, report.dry_run), target, user_inputs)
    stages = rewrite(job, ops)
    report.sections |= {s.op.key: s.decided.section for s in stages}
    report.nodes_before = len(graph.graph.node)
    memory = StageMemory(job)
    _estimate_memory(report, memory, stages)
    report_run_time_masks(report, job, stages)
    if options.precisions:
        from stof.attention_precision.apply import report_precision

        report_precision(report, job, stages)
    if not report.dry_run and (report.has_result or any(s.decided.has_replaced for s in stages)):
        check_output_folder(stages[-1].model, target, source)
        with _runtime_failures_as_model_errors(source):
            stages = _verify_and_write(report, job, stages, target, user_inputs, memory)
    mark_written(report, stages)
    if opset < opset_of(graph) and report.has_result:
        report.converted_opset = (opset, opset_of(graph))
    _save_plan(_plan_of(report, job, stages), options)


def _plan_of(report: Report, job: Job, stages: Sequence[Stage]) -> Plan:
    """What this optimization decided, as a plan."""
    options, masks = job.options, job.run_time_masks
    digest, clauses = digest_of(job.sparsity, masks), () if masks is None else masks.threshold_texts
    entries = {s.op.key: s.decided.plan for s in stages}
    found = report.attention_precision
    precisions = () if found is None else (found.by_plan(), found.gemms_by_plan(), found.mlps_by_plan())
    return Plan(
        entries,
        options.tuned_for,
        options.emission,
        digest,
        stated_thresholds(report),
        clauses,
        options.dequantize_attention,
        *precisions,
    )


def _refuse_changes_of_optimized(options: Options) -> None:
    for option, value in (("--sparsify", options.sparsify), ("--sparse-mlp", options.sparse_mlp)):
        if value:
            raise ArgumentError(
                f"{option} is for a dense model, and this one was optimized before; give the one it was made from"
            )
    if options.precisions:
        option, *_ = options.precisions[0].option.split()
        raise ArgumentError(
            f"{option} is for operators that are written in the same run, and this model was optimized before; give the "
            "one it was made from"
        )
    if not options.emission.needs_library:
        raise ArgumentError(
            f"--emit {options.emit} is for a model without stof's operators, and this one was optimized before; give the one "
            "it was made from"
        )


def _read_options(job: Job, target: Path, dry_run: bool) -> Job:
    """The job with the prompts of --prompts and the settings of ops; faults of files are found here, before steps that take long.

    Raises:
        ArgumentError: for files that cannot be read or would be overwritten, and for wrong options of ops.
    """
    options, read = job.options, dict[str, Path]()
    if options.prompts is not None and (options.sparsify or options.sparse_mlp or options.precisions):
        prompts = read_prompts(options.prompts, [job.source.parent])
        check_vocabulary(options.prompts, prompts, job.model.graph)
        if not has_onnxruntime():
            raise ArgumentError("--prompts needs onnxruntime, which is not installed: pip install onnxruntime")
        job = replace(job, prompts=PromptSet(f"--prompts {options.prompts}", tuple(prompts)))
        read["prompts file"] = options.prompts
    if options.float_model is not None:
        read["float model"] = options.float_model
    settings: dict[str, OpSettings] = {}
    for op in OPS:
        if isinstance(op, ReadsOptions) and (op_settings := op.read_options(job)) is not None:
            settings[op.key] = op_settings
            read |= op_settings.files
    _check_files(read, target, options, dry_run)
    return replace(job, settings=settings)


def _prepare(report: Report, job: Job, target: Path, user_inputs: Sequence[GivenFeed]) -> Job:
    """The job with the model that the ops rewrite: constants are read, and attentions have the patterns of --sparsify.

    Raises:
        ArgumentError: when they do not fit the model, are others than those of the plan, or an output would replace their file.
    """
    with _as_model_error(job.source):
        read_constants(job.source, job.model)
    if job.options.dequantize_attention:
        job = dequantize_attention(job, user_inputs, report.dry_run)
        report.dequantized = job.dequantized
    spec = parse_spec(job.options.sparsify) if job.options.sparsify else None
    check_plan(job, spec)
    if spec is not None:
        _check_files({f"pattern file {path}": path for path in spec.files}, target, job.options, report.dry_run)
        job = declare_sparsity(report, job, spec)
        if spec.clauses:
            with job.step("sparsify"):
                for op in OPS:
                    job = op.prepare(job)
    stated = "" if job.plan is None else job.plan.sparsity
    digest = digest_of(job.sparsity, job.run_time_masks)
    if job.plan is not None and stated != digest:
        has = "patterns of --sparsify that are not those given" if stated else "no patterns of --sparsify"
        raise ArgumentError(f"the plan has {has}; give the --sparsify that it was saved with")
    check_calibration(job, user_inputs)
    return job


def _check_time_option(options: Options, dry_run: bool) -> None:
    if not options.time:
        return
    if not options.tuned_for.times_models:
        raise ArgumentError(
            f"--time measures on the CPU; for --target {options.target} time both models in your own program"
        )
    if dry_run:
        raise ArgumentError("--time needs a model that is written; leave --dry-run and --explain out")
    if not has_onnxruntime():
        raise ArgumentError("--time needs onnxruntime, which is not installed: pip install onnxruntime")


def _copy(report: Report, source: Path, target: Path) -> None:
    """Copies a model with nothing to do to the output that the user named, which a build tool for instance waits for."""
    model = load(source)  # again: in the first one, small external data has become part of the model
    check_output_folder(model, target, source)
    with _measure_seconds(report, "write"):
        copy_model(model, target, source)
    report.output, report.copied = str(target), True
    _note_sizes(report, output_bytes=count_bytes(target, external_files(model)))


def _note_sizes(report: Report, model_bytes: int | None = None, output_bytes: int | None = None) -> None:
    """Notes the sizes of files that are known now."""
    if report.facts is not None:
        report.facts = report.facts.with_sizes(model_bytes, output_bytes)


def _load_plan(options: Options) -> Plan | None:
    if options.plan is None:
        return None
    plan = load_plan(options.plan, PLAN_FORMATS)
    if options.tune and not any(isinstance(op, Measures) and op.has_to_measure(options, plan) for op in OPS):
        *first, last = (f"{op.names.kind}s" for op in OPS)
        kinds = f"{', '.join(first)} and {last}"
        raise ArgumentError(
            f"--tune has nothing to measure: {options.plan} decides all {kinds}; leave --tune or --plan out"
        )
    return plan


def _save_plan(plan: Plan, options: Options) -> None:
    if options.save_plan is not None:
        plan.save(options.save_plan)


def _check_files(
    read: dict[str, Path], target: Path, options: Options, dry_run: bool, copies: Mapping[str, Path] | None = None
) -> None:
    written = {
        "report": None if options.json == STANDARD_OUTPUT else options.json,
        "HTML report": options.report,
        "saved plan": options.save_plan,
        "output": None if dry_run else target,
    }
    if options.plan is not None:
        read = {**read, "plan": options.plan}
    if options.tune:
        read = {**read, "tuning cache": cache_path()}
    check_outputs(read, {name: path for name, path in written.items() if path is not None}, {} if dry_run else copies)


def write_json(path: Path | None, text: str) -> None:
    """Writes a report as JSON, to standard output where that is asked for; None: nowhere."""
    if path == STANDARD_OUTPUT:
        say(*text.split("\n"))
    elif path is not None:
        write_text("report", path, [text])


def _write_report(report: Report, options: Options) -> None:
    write_json(options.json, report.to_json())
    if options.report is not None:
        write_text("HTML report", options.report, [to_html(report)])


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
def _measure_step(report: Report, source: Path, step: str) -> Iterator[None]:
    with _measure_seconds(report, step), _as_model_error(source):
        yield


@contextmanager
def _measure_seconds(report: Report, step: str) -> Iterator[None]:
    start = time.monotonic()
    with progress.step(step):
        yield
    report.seconds[step] = report.seconds.get(step, 0.0) + time.monotonic() - start


def _verify_and_write(
    report: Report,
    job: Job,
    stages: list[Stage],
    target: Path,
    user_inputs: Sequence[GivenFeed],
    memory: StageMemory,
) -> list[Stage]:
    """Verifies and writes the model, without rewrites that change its outputs.

    Returns:
        The stages as they were written.
    """
    if job.options.verify:
        with progress.step("verify"):
            verified = verify_stages(report, OPS, stages, target.parent, user_inputs)
        if verified is not stages:  # some rewrites are dropped
            _estimate_memory(report, memory, verified)
        stages = verified
    has_replaced = any(s.decided.has_replaced for s in stages)
    if not report.has_result:
        return stages
    mark_written(report, stages)
    measure = partial(_measure_seconds, report)
    final, job = apply_run_time_masks(report, job, stages, target.parent, user_inputs, measure)
    if report.attention_precision is not None:
        from stof.attention_precision.apply import apply_precision
        from stof.gemm_precision.verify import verify_gemms

        final = apply_precision(report, job, final, stages, target.parent, user_inputs, measure)
        if not has_replaced:  # verification has seen nothing yet
            if not report.attention_precision.adds_operators:
                return stages
            verify_gemms(report, OPS, stages, final, target.parent, user_inputs)
    measure_loss_on_prompts(report, job, stages, final, target, measure)
    hold_to_float(job, final, target.parent, user_inputs, measure)
    report.nodes_after = len(final.graph.node)
    with _measure_seconds(report, "write"):
        data_files = save(final, target, job.source)
    report.output = str(target)
    _note_sizes(report, output_bytes=count_bytes(target, data_files))
    if job.options.time:
        with _measure_seconds(report, "time"):
            _time_models(report, job, stages, target)
    return stages


def _estimate_memory(report: Report, memory: StageMemory, stages: Sequence[Stage]) -> None:
    """Notes the estimated peak memory before and after.

    Raises:
        MemoryLimitError: when the result takes more than the user allows.
    """
    with _measure_seconds(report, "memory"):
        report.memory = memory.estimate(stages)
    if report.memory.is_above_limit:
        raise MemoryLimitError(report.memory.limit_words())


def _time_models(report: Report, job: Job, stages: list[Stage], target: Path) -> None:
    """Times the original and the written model. What hinders is a note: the model is verified and written."""
    if report.sparsity is not None and report.sparsity.chooses_pages:
        report.notes += ("not timed: --time makes no bounds of pages; time your own decode loop",)
        return
    from stof.verification.model_times import time_models
    from stof.verification.timed_cases import NotTimedError

    try:
        inputs = find_model_inputs(job, stages)
        if report.verification is not None:  # on usual numbers, runs take too long
            inputs.maker.magnitudes.update(report.verification.reduced_inputs)
        padded = find_padded_batches(stages)
        report.times = time_models(job.source, target, inputs, job.options.shapes, None, padded)
        report.notes += tuple(f"not timed: {words}" for words in report.times.left_out)
    except (NotTimedError, RuntimeFailure, StofError, KeyError, MemoryError, TypeError, ValueError) as error:
        report.notes += (f"not timed: {explained(error)}",)
