# SPDX-License-Identifier: Apache-2.0
"""Lets attentions of an optimized model compute with 8-bit operands (``--attention-precision``), and measures what that costs.

Kernels of it run on CUDA alone. Errors and the loss come from models of their rounding, which run here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx

from stof.arguments.precisions import AUTO, EightBits, Precision
from stof.attention.checks.eight_bit_error import EightBitErrors
from stof.attention.checks.site_checks import AttentionChecks
from stof.attention.decide.cost_cpu import mask_tile_density, tile_density
from stof.attention.decide.cost_eight_bits import AttentionSizes, estimate_gain
from stof.attention.describe.site_problem import SiteProblem
from stof.attention.emit import Rewrite
from stof.attention_precision.eight_bit_emulation import emulate_eight_bits
from stof.attention_precision.eight_bit_kernels import CAPABILITY, LEAST_CAPABILITY, MOST_DECODED, why_not_in_8_bits
from stof.attention_precision.eight_bit_report import EightBitReport, EightBitRow
from stof.attention_precision.errors import Captured, Layers, attentions_of_sites, visit_sites
from stof.attention_precision.layers import check_library, put_precisions
from stof.attention_precision.measured import draw_sets, longest_sets
from stof.cached_attention.checks.site_checks import CacheChecks
from stof.cached_attention.site import CacheSite
from stof.errors import ArgumentError, VerifyError
from stof.execution.given_inputs import GivenFeed
from stof.execution.session_process import release_sessions
from stof.op_rewrite import Job, Measure
from stof.options import Options
from stof.report import Report
from stof.runtime.cuda import device_info
from stof.runtime.library import LibraryError
from stof.sparsify.precision_report import count_attentions
from stof.sparsify.threshold_report import OutputCosines
from stof.stages import Stage, find_model_inputs, typed_attributes_to_widen
from stof.symbolic import Symbolic
from stof.thresholds.layers import nodes_by_layer
from stof.thresholds.measure_cosines import check_cosines, measure_cosines
from stof.thresholds.measured_sets import MeasuredSets, find_sets
from stof.verification.site_checks import SiteChecks

_TILE = (128, 128)  # query rows x keys of the kernels
_LONGEST = 32768  # keys up to which the share of tiles is counted; beyond it hardly changes
_UNKNOWN = "it lies in a subgraph, reads tensors that only the result has, or its output is 0 or not finite"
_FEW_QUERIES = f"every step over its cache had {MOST_DECODED} queries or fewer; give longer prompts"


@dataclass(frozen=True)
class MeasuredSite:
    """What was measured of one attention: errors and estimated gains by the name of the precision; keys of the longest run."""

    errors: Mapping[str, float]
    gains: Mapping[str, float]
    length: int


def report_eight_bits(report: Report, job: Job, stages: Sequence[Stage]) -> EightBitReport:
    """Has the report say which attentions kernels with 8-bit operands take, before errors are measured; gives that part of it.

    Raises:
        ArgumentError: when the library does not know the attribute, or the plan is of another model.
    """
    options = job.options
    precisions = options.eight_bits
    check_library(precisions[0])
    found = EightBitReport(asked=options.attention_precision, bounds=_bounds(options))
    report.attention_precision = found
    if any(s.decided.has_replaced for s in stages):
        found.rows = [*_find_rows(stages[-1].written, stages[-1].facts, options, _planned(job))]
    return found


def apply_eight_bits(
    report: Report,
    job: Job,
    model: onnx.ModelProto,
    stages: Sequence[Stage],
    folder: Path,
    user_inputs: Sequence[GivenFeed],
    measure: Measure,
) -> onnx.ModelProto:
    """A model whose attentions may compute with 8-bit operands; itself where none does.

    Args:
        report: gets errors, and cosines where there are inputs.
        job: the optimization.
        model: the last stage's, perhaps with run-time masks.
        stages: whose model it is, verified in full precision.
        folder: for temporary files.
        user_inputs: the user's sets of inputs.
        measure: times a step.

    Raises:
        ArgumentError: for prompts and inputs that the model does not run on, and where errors decide and there are neither.
        VerifyError: when memory does not suffice, or cosines are below ``--min-cosine``.
    """
    found = report_eight_bits(report, job, stages)  # again: verification may have dropped rewrites
    found.is_decided = True
    planned = _planned(job)
    rows = _find_rows(model, stages[-1].facts, job.options, planned)
    found.rows = [*rows]
    if not found.reduced:
        return model
    sets = find_sets(job.model, job.prompts, user_inputs)
    few = frozenset[str]()
    measured, unknown = dict[str, MeasuredSite](), "there is nothing to measure it on; give --inputs or --prompts"
    if sets is None and job.options.attention_precision == AUTO and planned is None:
        raise ArgumentError(f"{found.option} chooses by the errors of attentions, and {unknown}")
    with measure("errors"):
        if (used := sets or draw_sets(job, stages)) is not None:
            try:
                measured, few = _measure(found, job, stages, used, folder)
                unknown = _UNKNOWN
            except (ArgumentError, VerifyError) as error:
                if sets is not None:  # what the user gives has to be measured
                    raise
                unknown = str(error)
    reasons = {row.node: _FEW_QUERIES if row.node in few else unknown for row in rows}
    rows = [_decide(row, measured.get(row.node), job.options, planned, reasons[row.node]) for row in rows]
    found.rows = [*rows]
    found.warnings += _warnings(rows, job.options, reasons)
    if not found.reduced:
        return model
    reduced = put_precisions(model, found.by_name)
    if sets is not None and not sets.prompts:
        with measure("inputs"):
            _measure_cosines(found, job, stages, sets, reduced, folder)
    return reduced


def _planned(job: Job) -> Mapping[str, Precision] | None:
    return None if job.plan is None else job.plan.attention_precision


def _bounds(options: Options) -> dict[str, float]:
    """The largest errors by the name of the precision; empty: any are taken."""
    if options.max_error is None and options.attention_precision != AUTO:
        return {}
    return {p.name: p.max_error if options.max_error is None else options.max_error for p in options.eight_bits}


def _find_rows(
    model: onnx.ModelProto, facts: Symbolic, options: Options, planned: Mapping[str, Precision] | None
) -> list[EightBitRow]:
    """The attentions of an optimized model in the order of the graph, and which of them kernels take."""
    rows, everywhere = [], _why_not_on_device(options)
    at_hand = _capability()
    kernel = "sm90" if at_hand == CAPABILITY else "sm80" if at_hand >= LEAST_CAPABILITY else ""
    default = options.eight_bits[0].name if len(options.eight_bits) == 1 else ""
    for index, (name, nodes) in enumerate(nodes_by_layer(model).items()):
        reasons = [words for node in nodes if (words := why_not_in_8_bits(node, facts))]
        reason = reasons[0] if reasons else everywhere
        precision = default
        if planned is not None:
            reason = reason or ("" if name in planned else "the plan says so")
            precision = planned[name].name if name in planned else ""
        row = EightBitRow(
            name, index, nodes[0].op_type, not reason, reason, kernel, precision="" if reason else precision
        )
        rows.append(row)
    if unknown := sorted(set(planned or ()) - {row.node for row in rows}):
        assert planned is not None
        raise ArgumentError(
            f"the plan computes {unknown[0]!r} in {planned[unknown[0]].name}, and the optimized model has no such attention"
        )
    return rows


def _capability() -> int:
    """That of the CUDA device at hand; 0: there is none."""
    try:
        return device_info().capability
    except LibraryError:
        return 0


def _why_not_on_device(options: Options) -> str:
    """Why the device that the model is for runs no kernel with 8-bit operands; empty where it may."""
    at_hand = _capability() if options.attention_precision == AUTO else 0
    capability = options.capability or at_hand
    if capability in (0, CAPABILITY):
        return ""
    device = f"the device has {capability // 10}.{capability % 10}"
    if options.attention_precision == AUTO:
        return f"gains are estimated for compute capability 9.0 alone, {device}"
    if any(precision.has_fp8 for precision in options.eight_bits):
        return f"fp8 needs compute capability 9.0, {device}"
    return "" if capability >= LEAST_CAPABILITY else f"scores in int8 need compute capability 8.0 or later, {device}"


def _measure(
    found: EightBitReport, job: Job, stages: Sequence[Stage], sets: MeasuredSets, folder: Path
) -> tuple[dict[str, MeasuredSite], frozenset[str]]:
    """Errors and gains of the attentions that kernels take, by the names of operators; those that ran on few queries alone."""
    precisions, names = job.options.eight_bits, found.reduced
    sites: dict[str, list[tuple[Rewrite | CacheSite, EightBitErrors]]] = {}
    few: set[str] = set()

    def visit(checks: SiteChecks, emitted: onnx.ModelProto, layers: Layers, captured: Captured) -> None:
        if isinstance(checks, AttentionChecks):
            for rewrite, errors in checks.measure_eight_bits(emitted, captured, precisions, layers):
                sites.setdefault(layers[rewrite.site.name], []).append((rewrite, errors))
        elif isinstance(checks, CacheChecks):
            for site, errors in checks.measure_eight_bits(emitted, captured, precisions, layers):
                if errors.sizes[3] > MOST_DECODED:
                    sites.setdefault(layers[site.name], []).append((site, errors))
                else:  # decode kernels compute it, in full precision
                    few.add(layers[site.name])

    some = longest_sets(sets)
    tokens = visit_sites(
        job,
        stages,
        "8 bits",
        names,
        (sets, some),
        folder,
        _unchanged,
        visit,
        attentions_of_sites,
        holds_all_scores=False,
    )
    found.measured_on = sets.describe(some)
    if tokens:
        found.measured_on = f"the first {tokens} tokens of {found.measured_on}"
    every = [errors for of_site in sites.values() for _, errors in of_site]
    found.measured_rows = sum(e.rows for e in every), sum(e.all_rows for e in every)
    return {name: _join(of_site, precisions) for name, of_site in sites.items()}, frozenset(few - sites.keys())


def _unchanged(model: onnx.ModelProto) -> onnx.ModelProto:
    return model


def _join(
    measured: Sequence[tuple[Rewrite | CacheSite, EightBitErrors]], precisions: Sequence[EightBits]
) -> MeasuredSite:
    """The largest errors of all sets; the gains on the one with the most pairs of queries and keys."""
    errors: dict[str, float] = {}
    for _, found in measured:
        for name, error in found.relative_rms.items():
            errors[name] = max(error, errors.get(name, 0.0))
    site, longest = max(measured, key=lambda m: m[1].sizes[3] * m[1].sizes[4])
    batch, heads, kv_heads, queries, keys, head_size = longest.sizes
    density, length = 1.0, min(keys, _LONGEST)
    if isinstance(site, CacheSite):  # its queries are the last ones
        first = max(0, length - queries)
        density = mask_tile_density(site.mask, site.mask_tables, heads, length, _TILE, first)
    elif queries == keys:
        density = tile_density(SiteProblem.of(site.site, site.mask), length, _TILE)
    sizes = AttentionSizes(batch, heads, kv_heads, queries, keys, head_size, density)
    return MeasuredSite(errors, {p.name: estimate_gain(sizes, p) for p in precisions}, keys)


def _decide(
    row: EightBitRow, site: MeasuredSite | None, options: Options, planned: Mapping[str, Precision] | None, unknown: str
) -> EightBitRow:
    """A row with its errors, and with the precision that it gets: a plan's, the only one, or the faster one within its bound."""
    if not row.reduced:
        return row
    errors = {} if site is None else site.errors
    row = replace(row, errors=tuple(errors.items()), length=0 if site is None else site.length)
    if planned is not None or options.attention_precision != AUTO:
        chosen, reason = row.precision, ""
        if planned is None:
            reason = _why_beyond_bounds(errors, _bounds(options), unknown, force=options.force)
    else:
        chosen, reason = _choose(site, _bounds(options), unknown)
    gain = None if site is None or not chosen else site.gains[chosen]
    return replace(
        row,
        reduced=not reason,
        reason=reason,
        precision="" if reason else chosen,
        predicted_gain=gain,
        relative_rms=errors.get(chosen),
    )


def _why_beyond_bounds(errors: Mapping[str, float], bounds: Mapping[str, float], unknown: str, *, force: bool) -> str:
    """Why no precision is within its bound; empty where one is, or where there is no bound."""
    if not bounds:
        return ""
    if not errors:
        return "" if force else f"its error is not known: {unknown}"
    if any(errors[name] <= bound for name, bound in bounds.items() if name in errors):
        return ""
    words = [f"{errors[name]:.2g} in {name}, allowed {bound:g}" for name, bound in bounds.items() if name in errors]
    return f"its relative RMS error is {'; '.join(words)} (--max-error)"


def _choose(site: MeasuredSite | None, bounds: Mapping[str, float], unknown: str) -> tuple[str, str]:
    """The precision with the largest gain of those within their bounds, and why it is none."""
    errors = {} if site is None else site.errors
    if site is None or (reason := _why_beyond_bounds(errors, bounds, unknown, force=False)):
        return "", reason if site is not None else f"its error is not known: {unknown}"
    gains = {name: gain for name, gain in site.gains.items() if name in errors and errors[name] <= bounds[name]}
    best = max(gains, key=lambda name: gains[name])
    if gains[best] <= 1.0:
        return "", f"no gain is estimated at {site.length} keys: {gains[best]:.2f}x in {best}"
    return best, ""


def _warnings(rows: Collection[EightBitRow], options: Options, unknown: Mapping[str, str]) -> list[str]:
    """What a user should know of attentions that kernels may compute in 8 bits whatever their error is.

    Args:
        rows: the attentions.
        options: the user's.
        unknown: why an error is not known, by the operator's name.
    """
    reduced = [row for row in rows if row.reduced]
    reasons = Counter(unknown[row.node] for row in reduced if row.relative_rms is None)
    words = [f"the error of {count_attentions(count)} is not known: {reason}" for reason, count in reasons.items()]
    for precision in options.eight_bits:
        errors = [
            row.relative_rms for row in reduced if row.precision == precision.name and row.relative_rms is not None
        ]
        if count := sum(error > precision.max_error for error in errors):
            bound = f"{precision.max_error:g}, beyond which auto takes none"
            words.append(f"the error of {count_attentions(count)} in {precision.name} is above {bound}")
    return words


def _measure_cosines(
    found: EightBitReport, job: Job, stages: Sequence[Stage], sets: MeasuredSets, reduced: onnx.ModelProto, folder: Path
) -> None:
    """The loss of the whole model on --inputs, with attention that rounds as the kernels do.

    Raises:
        VerifyError: when it is too large, or cannot be measured and --min-cosine is not its default.
    """
    every = list(range(sets.count))
    try:
        emulated = emulate_eight_bits(reduced, found.by_name)
        inputs, typed = find_model_inputs(job, stages), typed_attributes_to_widen(job.model, stages)
        meter = measure_cosines(job, stages, inputs, sets, every, emulated, folder, typed)
    except VerifyError as error:
        if job.options.min_cosine != Options.min_cosine and not job.options.force:
            raise
        found.no_loss = str(error)
        return
    finally:
        release_sessions()
    found.cosines = OutputCosines(sets.describe(every), len(every), meter.means())
    check_cosines(found.cosines, job.options, found.option)
