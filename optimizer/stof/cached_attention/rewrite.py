# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache as an op of the pipeline: nodes become StofCachedAttention, those over pages StofPagedAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import onnx

from stof.cached_attention.cost import estimate_curve, estimate_gain
from stof.cached_attention.declare import declare_patterns
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.find import CacheCandidate, find_candidates, reads_cache
from stof.cached_attention.node_site import MICROSOFT
from stof.cached_attention.paged.emit import emit_pages
from stof.cached_attention.paged.site import OP as PAGED_OP
from stof.cached_attention.paged.site import PAGED, PagedSite
from stof.cached_attention.plan_entry import CachePlan, read_cache_plan
from stof.cached_attention.problem import CacheProblem
from stof.cached_attention.report import KEY, NAMES, CacheReport, CacheSection
from stof.cached_attention.site import GROUP_QUERY, OP, SPARSE, CacheSite
from stof.graph.index import DOMAIN, all_nodes
from stof.graph.inline import inline, inline_all
from stof.graph.names import FreshNames
from stof.mask.families import picture
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.plan import EntryFormat
from stof.report import MaskPicture, TileGrid
from stof.result_shapes import ResultRules
from stof.runtime.library import LibraryError, op_limits
from stof.selection import NamedCandidate
from stof.symbolic import Symbolic

if TYPE_CHECKING:
    from stof.verification.site_checks import SiteChecks

_PICTURE_LENGTH = 4096


@dataclass(frozen=True, eq=False)
class CacheModel:
    """A model with its candidates.

    Attributes:
        model: with the functions inlined that hold candidates.
        symbolic: its facts; None where there is no candidate.
        candidates: in the order of the graph.
    """

    model: onnx.ModelProto
    symbolic: Symbolic | None = None
    candidates: tuple[CacheCandidate, ...] = ()


@dataclass(frozen=True, eq=False)
class DescribedCaches:
    """A model with its candidates, and the problem of each; None where it cannot be replaced anywhere."""

    cache_model: CacheModel
    problems: tuple[CacheProblem | None, ...]


@dataclass(frozen=True, eq=False)
class CacheDecisions(Decisions):
    """The decision for each candidate of a model."""

    cache_model: CacheModel
    caches: CacheSection
    sites: tuple[CacheSite | PagedSite, ...] = ()

    @property
    def section(self) -> CacheSection:
        return self.caches

    @property
    def plan(self) -> tuple[CachePlan, ...]:
        return tuple(
            CachePlan(r.cache, r.replaced, r.predicted_gain, "" if r.replaced else r.reason) for r in self.caches.rows
        )

    @property
    def candidates(self) -> tuple[NamedCandidate, ...]:
        return tuple(NamedCandidate(r.cache, r.index) for r in self.caches.rows)

    @property
    def has_replaced(self) -> bool:
        return bool(self.sites)

    def undo(self, reason: str) -> CacheDecisions:
        return replace(self, caches=self.caches.without(reason), sites=())


class CacheRewrite(OpRewrite[CacheModel, DescribedCaches, CacheDecisions]):
    """Replaces attention nodes with a KV cache, wherever the operator supports the node: it never reads more of the cache."""

    key = KEY
    op_types = frozenset({OP, PAGED_OP})
    result_rules = ResultRules(in_place=op_types)
    names = NAMES
    plan_format = EntryFormat("cache", read_cache_plan)

    def prepare(self, job: Job) -> Job:
        return declare_patterns(job, KEY)

    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> CacheModel:
        before = model()
        nodes = [*all_nodes(before.graph.node), *(n for f in before.functions for n in all_nodes(f.node))]
        cache_model = CacheModel(before)
        if any(reads_cache(n) for n in nodes):
            with job.step("caches"):
                base = inline(before, {(MICROSOFT, GROUP_QUERY), (MICROSOFT, SPARSE), (MICROSOFT, PAGED)})
                inlined = inline_all(base)
                symbolic = Symbolic(base, None if inlined is base else Symbolic(inlined))
                candidates = find_candidates(base, symbolic, job.options.target)
                cache_model = CacheModel(base, symbolic, tuple(_with_pattern(job, c) for c in candidates))
        self.check_plan(job, [NamedCandidate(c.name, i) for i, c in enumerate(cache_model.candidates)])
        return cache_model

    def describe(self, job: Job, cache_model: CacheModel) -> DescribedCaches:
        sites = (c.site for c in cache_model.candidates)
        return DescribedCaches(cache_model, tuple(None if s is None else CacheProblem.of(s) for s in sites))

    def decide(self, job: Job, described: DescribedCaches) -> CacheDecisions:
        cache_model = described.cache_model
        rows: list[CacheReport] = []
        sites: list[CacheSite | PagedSite] = []
        taken: list[CacheProblem] = []
        for index, (candidate, problem) in enumerate(zip(cache_model.candidates, described.problems, strict=True)):
            row = _row_of(candidate, index)
            first = None if not sites else (sites[0].name, taken[0])
            reason = candidate.reason if problem is None else _reason_impossible(job, problem, first)
            gain, length = None, 0
            if problem is not None and not problem.is_paged:
                gain, length = estimate_gain(problem, job.target, job.options.shapes)
                if not reason and not self.is_replaced_by_plan(job, candidate.name):
                    reason = _reason_slow(job, problem, gain)
            if reason := self.choice(job).reason_kept(NamedCandidate(candidate.name, index), reason):
                rows.append(replace(row, reason=reason))
                continue
            assert candidate.site is not None
            assert problem is not None
            row = replace(row, replaced=True, reason="replaced")
            if gain is not None:
                row = replace(row, predicted_gain=round(gain, 3), length=length)
            rows.append(row)
            sites.append(candidate.site)
            taken.append(problem)
        section = CacheSection(rows)
        if job.options.report is not None:
            section.pictures = _pictures([s for s in sites if isinstance(s, CacheSite)])
            section.curves = {
                s.name: estimate_curve(p, job.target, job.options.shapes)
                for s, p in zip(sites, taken, strict=True)
                if not p.is_paged
            }
        return CacheDecisions(cache_model, section, tuple(sites))

    def emit(self, job: Job, decided: CacheDecisions) -> onnx.ModelProto:
        with job.step("emit"):
            emitted = decided.cache_model.model
            if caches := [s for s in decided.sites if isinstance(s, CacheSite)]:
                emitted = emit_caches(emitted, caches)
            if pages := [s for s in decided.sites if isinstance(s, PagedSite)]:
                emitted = emit_pages(emitted, pages)
            return emitted

    def empty_section(self) -> CacheSection:
        return CacheSection()

    def find_earlier_result(self, job: Job) -> CacheDecisions | None:
        if not any(_is_done(n) for n in all_nodes(job.model.graph.node)):
            return None
        return CacheDecisions(CacheModel(job.model), CacheSection(_rows_of_optimized(job.model)))

    def site_checks(self, job: Job, decided: CacheDecisions) -> SiteChecks | None:
        if not decided.sites:
            return None
        # A tenth of all imports, which --no-verify and --dry-run do not need.
        from stof.cached_attention.checks.site_checks import CacheChecks
        from stof.cached_attention.paged.checks import PagedChecks

        cache_model = decided.cache_model
        assert cache_model.symbolic is not None
        if pages := [s for s in decided.sites if isinstance(s, PagedSite)]:
            return PagedChecks(cache_model.model, cache_model.symbolic, pages, job.options.shapes)
        caches = [s for s in decided.sites if isinstance(s, CacheSite)]
        return CacheChecks(job.model, cache_model.model, cache_model.symbolic, caches, job.options.shapes)


def _reason_impossible(job: Job, problem: CacheProblem, first: tuple[str, CacheProblem] | None) -> str:
    """Why a problem cannot be solved on the target; empty where it can.

    Args:
        job: the optimization.
        problem: the candidate's.
        first: the name and the problem of the first node that is replaced; None: this one is.
    """
    op = PAGED_OP if problem.is_paged else OP
    if not job.target.has_inplace_ops:
        return f"{op} has no TensorRT plugin: plugins cannot append to a cache in place"
    if op not in op_limits():
        return f"the plugin library has no {op}; install one of this version"
    if first is None:
        return ""
    name, other = first
    if other.is_paged != problem.is_paged:
        return f"its cache is not of the kind of {name!r}: contiguous caches and pages are not verified together"
    if other.dtype != problem.dtype:
        return f"its element type is not that of {name!r}: the calls share one function body"
    if other.cache_dtype != problem.cache_dtype:
        return f"the element type of its cache is not that of {name!r}: the calls share one function body"
    return ""


def _reason_slow(job: Job, problem: CacheProblem, gain: float) -> str:
    """Why the runtime's node stays on a CUDA device, where it is estimated to be faster; empty where it is not."""
    if not job.target.uses_gpu or gain >= 1.0:
        return ""
    return (
        f"ONNX Runtime's CUDA kernel is faster for {problem.num_heads} query heads on {problem.kv_num_heads} KV heads of "
        f"{problem.head_size} elements that attend all keys, in batches as --shape states them: estimated {gain:.2f}x. A plan "
        "with replace: true replaces it"
    )


def _with_pattern(job: Job, candidate: CacheCandidate) -> CacheCandidate:
    """The candidate with the pattern that --sparsify declared."""
    site = candidate.site
    declared = None if job.sparsity is None or site is None else job.sparsity.patterns.get(site.node.output[0])
    if site is None or declared is None:
        return candidate
    return replace(candidate, site=replace(site, declared=declared))


def _row_of(candidate: CacheCandidate, index: int) -> CacheReport:
    site = candidate.site
    if site is None:
        return CacheReport(candidate.name, index, False, candidate.reason)
    return CacheReport(candidate.name, index, False, "", site.mask.text, site.heads, site.head_size, site.features)


def _is_done(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type in (OP, PAGED_OP)


def _rows_of_optimized(model: onnx.ModelProto) -> list[CacheReport]:
    """The rows of a model that was optimized before: its operators, and the nodes with a cache that were kept."""
    functions = [f for f in model.functions if f.domain != DOMAIN]
    rows: list[CacheReport] = []
    names = FreshNames()
    for node in [*all_nodes(model.graph.node), *(n for f in functions for n in all_nodes(f.node))]:
        if _is_done(node):
            mask = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "mask"), "")
            name = names.make(node.name or node.op_type)
            rows.append(CacheReport(name, len(rows), False, f"is {node.op_type} already", mask))
        elif reads_cache(node):
            name = names.make(node.name or f"{node.op_type} of {node.output[0]}")
            reason = (
                f"the model holds {OP} already, and its calls share one function: optimize the model from which it was "
                "made, where all nodes can be replaced together"
            )
            rows.append(CacheReport(name, len(rows), False, reason))
    return rows


def _pictures(sites: Sequence[CacheSite]) -> list[MaskPicture]:
    """Each distinct mask over a prompt, for the report's page."""
    pictures = []
    drawn: dict[object, list[CacheSite]] = {}
    for site in sites:
        drawn.setdefault(site.mask if site.declared is None else site.declared.pattern.key, []).append(site)
    for sharing in drawn.values():
        reach, declared = sharing[0].reach, sharing[0].declared
        length = min(_PICTURE_LENGTH, max(64, 4 * reach)) if reach else _PICTURE_LENGTH
        length = length if sharing[0].layout is None else min(length, sharing[0].layout.length)
        facts = [
            f"{len(sharing)} attention{'' if len(sharing) == 1 else 's'} over a KV cache",
            f"a prompt of {length} tokens",
        ]
        with suppress(LibraryError):  # a picture is decoration
            grid = TileGrid("", tuple(picture(sharing[0].mask, sharing[0].mask_tables, length=length)))
            title = f"causal, window of {sharing[0].window} keys" if sharing[0].window else "causal"
            if sharing[0].layout is not None:
                title = f"causal, blocks of {sharing[0].layout.block_size}"
            if declared is not None:
                title, facts = f"declared: {declared.pattern.label}", [*facts, "head 0"]
            pictures.append(MaskPicture(title, sharing[0].mask.text, tuple(facts), length, length, (grid,)))
    return pictures


CACHED_ATTENTION = CacheRewrite()
