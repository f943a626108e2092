# SPDX-License-Identifier: Apache-2.0
"""Attention as an op of the pipeline: masked attention becomes StofAttention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx

from stof.attention.decide.kernels import check_tune, kernels_for
from stof.attention.decide.site_decider import (
    Choice,
    SiteDecider,
    candidates_of,
    check_masks,
    check_shapes,
)
from stof.attention.describe.site_describer import DescribedSite, SiteDescriber
from stof.attention.emit import Rewrite
from stof.attention.expand.declare import declare_on_sites
from stof.attention.expand.expanders import is_fused, make_working_copy
from stof.attention.find import is_softmax
from stof.attention.function_body import OP
from stof.attention.plan_entry import SitePlan, read_site_plan
from stof.attention.quantized.function_body import QUANTIZED_OP
from stof.attention.report import KEY, NAMES, SiteReport, SiteSection
from stof.attention.subgraphs import Scope, emit_scopes, find_scopes
from stof.graph.index import DOMAIN, all_nodes
from stof.graph.names import FreshNames
from stof.mask.draw_masks import draw_masks
from stof.mask.expression import MaskExpression
from stof.mask.families import picture
from stof.mask.site import tables_of
from stof.op_parts import ExplainsFailures
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.plan import EntryFormat
from stof.runtime.library import LibraryError
from stof.selection import NamedCandidate

if TYPE_CHECKING:
    from stof.attention.checks.site_checks import AttentionChecks
    from stof.verification.result import Verification

_MOST_PICTURES = 6


@dataclass(frozen=True)
class AttentionDecisions(Decisions):
    """The sites of the main graph and of subgraphs, with what becomes of each."""

    scopes: tuple[Scope, ...]
    choices: tuple[Choice, ...]
    sites: SiteSection

    @property
    def section(self) -> SiteSection:
        return self.sites

    @property
    def rewrites(self) -> list[Rewrite]:
        """The sites that are replaced, in the order of the graph."""
        return [c.rewrite for c in self.choices if c.rewrite is not None]

    @property
    def plan(self) -> tuple[SitePlan, ...]:
        return tuple(c.plan for c in self.choices)

    @property
    def candidates(self) -> tuple[NamedCandidate, ...]:
        if not self.scopes:  # of a model that was optimized before
            return tuple(NamedCandidate(row.site) for row in self.sites.rows)
        return _candidates(self.scopes)

    @property
    def has_replaced(self) -> bool:
        return bool(self.rewrites)

    @property
    def changes_model(self) -> bool:
        # Functions that hold a softmax are inlined, whether it is replaced or not.
        return self.has_replaced or any(s.working.base is not s.working.original for s in self.scopes[:1])


@dataclass(frozen=True)
class DescribedScopes:
    """The main graph and subgraphs, with a description of each site."""

    scopes: tuple[Scope, ...]
    sites: tuple[DescribedSite, ...]


class AttentionRewrite(
    OpRewrite[tuple[Scope, ...], DescribedScopes, AttentionDecisions], ExplainsFailures[AttentionDecisions]
):
    """Finds attention at each softmax, lifts its mask, and decides by checks, kernels and the cost model."""

    key = KEY
    op_types = frozenset({OP, QUANTIZED_OP})
    names = NAMES
    plan_format = EntryFormat("site", read_site_plan, required=True)

    def prepare(self, job: Job) -> Job:
        return declare_on_sites(job, KEY)

    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> tuple[Scope, ...]:
        check_tune(job.options)
        with job.step("match"):
            scopes = tuple(find_scopes(make_working_copy(model())))
        sites = [site for scope in scopes for site in scope.sites]
        job.selections[KEY].check(_candidates(scopes))
        check_masks(job.options, sites)
        check_shapes(job.options, job.model)
        self.check_plan(job, candidates_of(sites, ()))
        return scopes

    def describe(self, job: Job, scopes: tuple[Scope, ...]) -> DescribedScopes:
        ignored_rows = frozenset() if job.sparsity is None else frozenset(job.sparsity.ignored_rows)
        described: list[DescribedSite] = []
        with job.step("lift"):
            for scope in scopes:
                describer = SiteDescriber(
                    scope.working.model,
                    scope.symbolic,
                    job.options,
                    self.choice(job),
                    job.source.parent,
                    ignored_rows,
                )
                described += [describer.describe(site) for site in scope.sites]
        return DescribedScopes(scopes, tuple(described))

    def decide(self, job: Job, described: DescribedScopes) -> AttentionDecisions:
        with job.step("choose"):
            kernels = kernels_for(job.options, str(job.library.get("cpu_isa", "")), job.tuning.started)
            decider = SiteDecider(job.options, kernels, self.choice(job))
            choices = tuple(decider.decide(site) for site in described.sites)
            job.tuning.spent += kernels.tuned_seconds
        refused = [SiteReport(f.site, False, f.reason) for scope in described.scopes for f in scope.findings]
        section = SiteSection([*refused, *(c.report for c in choices)], earlier=kernels.earlier_measurements)
        decided = AttentionDecisions(described.scopes, choices, section)
        section.pictures = draw_pictures(decided.rewrites)
        if job.options.report is not None:
            section.curves = {c.report.site: c.curve for c in choices if c.curve}
            section.drawings = draw_masks((r.site, r.mask) for r in decided.rewrites)
        return decided

    def emit(self, job: Job, decided: AttentionDecisions) -> onnx.ModelProto:
        with job.step("emit"):
            return emit_scopes(decided.scopes, decided.rewrites)

    def empty_section(self) -> SiteSection:
        return SiteSection()

    def find_earlier_result(self, job: Job) -> AttentionDecisions | None:
        if not any(_is_done(n) for n in all_nodes(job.model.graph.node)):
            return None
        rows = _rows_of_optimized(job.model)
        check_masks(job.options, [])
        kept = tuple(Choice(row, SitePlan(row.site, False, reason=row.reason)) for row in rows)
        return AttentionDecisions((), kept, SiteSection(rows))

    def site_checks(self, job: Job, decided: AttentionDecisions) -> AttentionChecks:
        # A tenth of all imports, which --no-verify and --dry-run do not need.
        from stof.attention.checks.site_checks import AttentionChecks

        return AttentionChecks(decided.scopes, decided.rewrites)

    def explain_failure(self, decided: AttentionDecisions, verification: Verification) -> str:
        failures = verification.failures
        sites = verification.faulty_sites()
        if sites:
            masks = {r.site.name: r.mask.expression.text for r in decided.rewrites}
            first = next(c for c in failures if c.site == sites[0])
            return (
                f"verification failed at site {sites[0]!r} (mask {masks.get(sites[0], '')!r}): error "
                f"{first.difference:.3e}, allowed {first.budget:.3e}{first.detail and '; '}{first.detail}. {len(sites)} "
                f"faulty site(s): {', '.join(sites)}. Nothing was written; --skip SITE leaves a site as it is"
            )
        first = failures[0]
        if verification.suspects:
            names = [repr(name) for name in verification.suspects]
            others = "" if verification.suspects_suffice else " and others before them"
            words = (
                f"the difference comes with site {names[0]} alone"
                if len(names) == 1
                else f"the difference comes when sites {', '.join(names)}{others} are replaced together, not with fewer "
                "of them"
            )
            return (
                f"verification failed: {first.message()}. Every site by itself computes what it should; {words}. Nothing "
                "was written; --skip SITE leaves a site as it is"
            )
        return f"verification failed: {first.what}{first.detail and ': '}{first.detail}. Nothing was written"


def _candidates(scopes: Sequence[Scope]) -> tuple[NamedCandidate, ...]:
    sites = [site for scope in scopes for site in scope.sites]
    return candidates_of(sites, [finding for scope in scopes for finding in scope.findings])


def _is_done(node: onnx.NodeProto) -> bool:
    return node.domain == DOMAIN and node.op_type in (OP, QUANTIZED_OP)


def _rows_of_optimized(graph: onnx.ModelProto) -> list[SiteReport]:
    """What there is in a model that was optimized before: its operators, and attention that was left or came later."""
    functions = [f for f in graph.functions if f.domain != DOMAIN]
    nodes = [*all_nodes(graph.graph.node), *(n for f in functions for n in all_nodes(f.node))]
    rows: list[SiteReport] = []
    names = FreshNames()
    for node in nodes:
        if _is_done(node):
            mask = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "mask"), "")
            name = names.make(node.name or node.op_type)
            rows.append(SiteReport(name, False, f"is {node.op_type} already", mask=mask))
        elif is_softmax(node) or is_fused(node):
            name = names.make(node.name or f"{node.op_type} of {node.output[0]}")
            reason = (
                f"the model holds {OP} already, and its calls share one function: optimize the model from which it was "
                "made, where all sites can be replaced together"
            )
            rows.append(SiteReport(name, False, reason))
    return rows


def draw_pictures(rewrites: Sequence[Rewrite]) -> dict[str, list[str]]:
    """A drawing of each distinct mask, by its text."""
    pictures: dict[str, list[str]] = {}
    tried: set[MaskExpression] = set()
    for rewrite in rewrites:
        mask = rewrite.mask
        by_document = mask.expression.vectors & {"segment_q", "segment_k"}
        if mask.expression.window() == (-1, -1):
            continue  # every tile is full, or a bias says which are not
        if mask.expression not in tried and not by_document and len(pictures) < _MOST_PICTURES:
            tried.add(mask.expression)
            length = rewrite.site.dims[3].constant if rewrite.site.dims[2] == rewrite.site.dims[3] else 0
            with suppress(LibraryError):  # a picture is decoration; a mask of fixed size may not stretch to its length
                pictures[mask.expression.text] = picture(mask.expression, tables_of(mask), length or 0)
    return pictures


ATTENTION = AttentionRewrite()
