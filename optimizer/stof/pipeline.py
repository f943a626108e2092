# SPDX-License-Identifier: Apache-2.0
"""The steps in order: load, match, lift, check, choose, emit, verify, report."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import onnx

from stof.attention.decide.site_decider import Chooser, check_plan, check_selection, check_shapes, plan_of
from stof.attention.decide.targets import missing_for, target_of
from stof.attention.emit import Rewrite
from stof.attention.expand.prepare import is_fused, prepare
from stof.attention.find import is_softmax, unique
from stof.attention.function_body import OP
from stof.attention.subgraphs import Scope, emit_scopes, search
from stof.errors import ArgumentError, ModelError, StofError, VerifyError, explained
from stof.execution.session_process import RuntimeFailure, has_onnxruntime, release_sessions
from stof.files import check_outputs, temporary_folder, write_text
from stof.fusion.apply import Chained, apply_chains
from stof.fusion.decide.measured import forms_of, judge_of, leave_all, merges_of
from stof.fusion.decide.selection import Selection
from stof.graph.external_data import check_room, copied_data, external_files, read_constants
from stof.graph.model_graph import DOMAIN, all_nodes, load, save
from stof.mask.expression import MaskExpression
from stof.mask.families import picture
from stof.options import Options
from stof.plan import ChainPlan, Plan, SitePlan
from stof.plan import load as load_plan
from stof.report import Report, SiteReport
from stof.runtime.library import build_info, has_packed
from stof.site import Finding, tables_of
from stof.tuning_cache import cache_path

if TYPE_CHECKING:
    from stof.verification.verifier import Verification

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
    # Not by with_name, which refuses "." and "/" in words of its own.
    target = Path(output or options.output or source.parent / f"{source.stem}.stof.onnx")
    # The interpreter follows chains of movement operators by recursion; each is as deep as the graph writes it.
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
    report = Report(str(source), dry_run=options.dry_run or options.explain is not None, library=build_info())
    report.notes = missing_for(options, report.library)
    try:
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
    plan = load_plan(options.plan) if options.plan else None
    if plan is not None and plan.chains is not None and options.tune:
        raise ArgumentError(
            f"--tune has nothing to measure: {options.plan} decides all sites and chains; leave --tune or --plan out"
        )
    with _timed(report, "load"), _damage(source):
        graph = load(source)
    data = {f"external data {name!r}": source.parent / name for name in sorted(external_files(graph))}
    copies = {f"external data {c.location!r}": c.target for c in copied_data(graph, target, source)}
    _check_files(data, target, options, report.dry_run, copies)
    if any(_is_done(n) for n in all_nodes(graph.graph.node)):
        report.sites = _sites_again(graph)
        check_selection(options, [], [Finding(s.site, False, s.reason) for s in report.sites])
        if options.save_plan is not None:
            Plan(tuple(SitePlan(s.site, False, reason=s.reason) for s in report.sites), options.target).save(
                options.save_plan
            )
        return
    with _timed(report, "match"), _damage(source):
        read_constants(source, graph)
        prepared = prepare(graph)
        scopes = search(prepared)
        sites = [site for scope in scopes for site in scope.sites]
        findings = [finding for scope in scopes for finding in scope.findings]
    check_selection(options, sites, findings)
    check_shapes(options, graph)
    if plan is not None:
        check_plan(plan, sites, options.target)
    report.sites = [SiteReport(f.site, False, f.reason) for f in findings]
    with _timed(report, "lift"), _damage(source):
        tuned_for = target_of(options, str(report.library.get("cpu_isa", "")))
        choices = []
        for scope in scopes:
            chooser = Chooser(scope.prepared.model, scope.symbolic, options, plan, tuned_for, source.parent)
            choices += [chooser.choose(site) for site in scope.sites]
    report.sites += [c.report for c in choices]
    rewrites = [c.rewrite for c in choices if c.rewrite is not None]
    report.nodes_before = len(graph.graph.node)
    _pictures(report, rewrites)
    judge = judge_of(options, report.library)
    selection = Selection.of(options, plan.chains if plan is not None else None)
    if judge is None and selection.planned and options.chains != "off":
        judge = leave_all
    if judge is None and (selection.only or selection.skip):
        raise ArgumentError("--only or --skip names a chain, but no chain is looked for here; see --chains")
    decided: tuple[ChainPlan, ...] | None = None
    if judge is not None or (rewrites and not report.dry_run):
        with _timed(report, "emit"), _damage(source):
            emitted = emit_scopes(scopes, rewrites)
        chained = Chained(emitted, ())
        if judge is not None:
            with _timed(report, "chains"), _damage(source):
                on_gpu = options.target == "cuda"
                merges = merges_of(judge) if on_gpu and plan is None else None
                chained = apply_chains(
                    emitted,
                    judge,
                    selection,
                    forms_of(options, selection.planned),
                    tensorrt=options.target == "tensorrt",
                    separate=on_gpu,
                    merges=merges,
                    packs=options.target != "tensorrt" and has_packed(),
                    on_cpu=options.target == "cpu",
                )
        report.chains = list(chained.reports)
        if not report.dry_run and (rewrites or chained.replaced):
            check_room(chained.model, target, source)
            with _runtime_errors(source):
                chained = _verify_and_write(report, scopes, rewrites, (emitted, chained), source, target, options)
        decided = chained.plans if judge is not None else None
    if options.save_plan is not None:
        plan_of(choices, options.target, decided).save(options.save_plan)


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
def _runtime_errors(source: Path) -> Iterator[None]:
    """What ONNX Runtime says about a model that it cannot load or run is a fact about the model, not a fault of ours."""
    try:
        yield
    except RuntimeFailure as error:
        raise ModelError(
            f"{source} cannot be verified, because ONNX Runtime's CPU provider cannot load or run it: {error}. "
            "Where it needs operators that you register yourself, use --no-verify; nothing was written"
        ) from error


@contextmanager
def _damage(source: Path) -> Iterator[None]:
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
def _timed(report: Report, step: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    report.seconds[step] = time.monotonic() - start


def _is_done(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type == OP


def _sites_again(graph: onnx.ModelProto) -> list[SiteReport]:
    """What there is in a model that was optimized before: its operators, and attention that was left or came later."""
    functions = [f for f in graph.functions if f.domain != DOMAIN]
    nodes = [*all_nodes(graph.graph.node), *(n for f in functions for n in all_nodes(f.node))]
    found: list[SiteReport] = []
    taken: set[str] = set()
    for node in nodes:
        if _is_done(node):
            mask = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "mask"), "")
            found.append(SiteReport(unique(node.name or OP, taken), False, "is StofAttention already", mask=mask))
        elif is_softmax(node) or is_fused(node):
            name = unique(node.name or f"{node.op_type} of {node.output[0]}", taken)
            reason = (
                f"the model holds {OP} already, and its calls share one function: optimize the model from which it was "
                "made, where all sites can be replaced together"
            )
            found.append(SiteReport(name, False, reason))
    return found


def _pictures(report: Report, rewrites: list[Rewrite]) -> None:
    tried: set[MaskExpression] = set()
    for rewrite in rewrites:
        mask = rewrite.mask
        by_document = mask.expression.vectors & {"segment_q", "segment_k"}
        if mask.expression.window() == (-1, -1):
            continue  # every tile is full, or a bias says which are not
        if mask.expression not in tried and not by_document and len(report.pictures) < 6:
            tried.add(mask.expression)
            length = rewrite.site.dims[3].constant if rewrite.site.dims[2] == rewrite.site.dims[3] else 0
            with suppress(Exception):  # a picture is decoration; a mask of fixed size may not stretch to its length
                report.pictures[mask.expression.text] = picture(mask.expression, tables_of(mask), length or 0)


def _verify_and_write(
    report: Report,
    scopes: list[Scope],
    rewrites: list[Rewrite],
    made: tuple[onnx.ModelProto, Chained],
    source: Path,
    target: Path,
    options: Options,
) -> Chained:
    """``made``: the model with attention replaced, and the same with chains replaced. What was written in the end."""
    emitted, chained = made
    if options.verify and chained.model is not emitted:
        # A difference that comes with the chains, or with where attention reads its heads, is no reason against the rest.
        try:
            verification = _verified(scopes, rewrites, made, source, target, options)
            wrong = f"with chains, {_first(verification)}" if verification.failures else ""
        except RuntimeFailure as error:
            wrong = f"ONNX Runtime does not run the model with chains: {str(error)[:_LONGEST_REASON]}"
        if not wrong:
            report.verification = verification
            report.seconds["verify"] = verification.seconds
        else:
            chained = chained.without(emitted, wrong)
            report.chains = list(chained.reports)
            if not rewrites:
                return chained
    if options.verify and report.verification is None:
        verification = _verified(scopes, rewrites, (emitted, chained), source, target, options)
        report.verification = verification
        report.seconds["verify"] = report.seconds.get("verify", 0.0) + verification.seconds
        if verification.failures:
            raise VerifyError(_failure(report, rewrites))
    report.nodes_after = len(chained.model.graph.node)
    with _timed(report, "write"):
        save(chained.model, target, source)
    report.output = str(target)
    return chained


def _first(verification: Verification) -> str:
    first = verification.failures[0]
    return f"{first.what} differs by {first.difference:.3e}, allowed {first.budget:.3e}{first.detail and '; '}{first.detail}"


def _verified(
    scopes: list[Scope],
    rewrites: list[Rewrite],
    made: tuple[onnx.ModelProto, Chained],
    source: Path,
    target: Path,
    options: Options,
) -> Verification:
    from stof.verification.verifier import (
        Verifier,  # a tenth of all imports, which --no-verify and --dry-run do not need
    )

    emitted, chained = made
    try:
        _check_inputs(source, emitted)
        with temporary_folder(target.parent) as scratch:
            verifier = Verifier(scopes, rewrites, options.verify_budget, ignore_empty_rows=options.ignore_empty_rows)
            return verifier.run(source, chained.model, scratch, partial(emit_scopes, scopes), emitted)
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


def _failure(report: Report, rewrites: list[Rewrite]) -> str:
    assert report.verification is not None
    failures = report.verification.failures
    sites = report.verification.faulty_sites()
    if sites:
        masks = {r.site.name: r.mask.expression.text for r in rewrites}
        first = next(c for c in failures if c.site == sites[0])
        return (
            f"verification failed at site {sites[0]!r} (mask {masks.get(sites[0], '')!r}): error {first.difference:.3e}, "
            f"allowed {first.budget:.3e}{_further(first.detail)}. {len(sites)} faulty site(s): {', '.join(sites)}. Nothing was "
            "written; --skip SITE leaves a site as it is"
        )
    first = failures[0]
    if report.verification.suspects:
        names = [repr(name) for name in report.verification.suspects]
        others = "" if report.verification.suspects_suffice else " and others before them"
        words = (
            f"the difference comes with site {names[0]} alone"
            if len(names) == 1
            else f"the difference comes when sites {', '.join(names)}{others} are replaced together, not with fewer of them"
        )
        return (
            f"verification failed: {first.what} differs by {first.difference:.3e}, allowed {first.budget:.3e}"
            f"{_further(first.detail)}. Every site by itself computes what it should; {words}. Nothing was "
            "written; --skip SITE leaves a site as it is"
        )
    return f"verification failed: {first.what}{_further(first.detail, ': ')}. Nothing was written"


def _further(detail: str, mark: str = "; ") -> str:
    return f"{mark}{detail}" if detail else ""
