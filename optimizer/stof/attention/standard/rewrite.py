# SPDX-License-Identifier: Apache-2.0
"""Attention as an op of the pipeline that writes ONNX's own operator: masked attention becomes ``Attention``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import onnx

from stof.attention.decide.site_decider import Choice, keep_site
from stof.attention.expand.flex_attention import PREVIEW
from stof.attention.report import SiteReport, SiteSection, Step
from stof.attention.rewrite import AttentionDecisions, AttentionRewrite, DescribedScopes, draw_pictures
from stof.attention.standard.decide import StandardDecider, StandardRewrite
from stof.attention.standard.emit import emit_standard, with_opset_of
from stof.attention.standard.runtime import installed_runtime
from stof.errors import UnsupportedError
from stof.graph.index import all_nodes, opset_of
from stof.mask.draw_masks import draw_masks
from stof.op_rewrite import Job
from stof.selection import NamedCandidate

if TYPE_CHECKING:
    from stof.attention.standard.checks import StandardChecks


class StandardAttentionRewrite(AttentionRewrite):
    """Finds attention as stof's own operator does, and writes what ``Attention`` of ONNX expresses where that gains."""

    op_types: frozenset[str] = frozenset()

    def decide(self, job: Job, described: DescribedScopes) -> AttentionDecisions:
        with job.step("choose"):
            choices = self._with_one_opset(job, described, tuple(self._decide_sites(job, described)))
        refused = [SiteReport(f.site, False, f.reason) for scope in described.scopes for f in scope.findings]
        section = SiteSection([*refused, *(c.report for c in choices)])
        decided = AttentionDecisions(described.scopes, choices, section)
        section.pictures = draw_pictures(decided.rewrites)
        if job.options.report is not None:
            section.drawings = draw_masks((r.site, r.mask) for r in decided.rewrites)
        return decided

    def _decide_sites(self, job: Job, described: DescribedScopes) -> Iterator[Choice]:
        runtime, folder, sites = installed_runtime(), job.source.parent, iter(described.sites)
        for scope in described.scopes:
            decider = StandardDecider(job.options, scope, self.choice(job), runtime, folder)
            for _ in scope.sites:
                yield decider.decide(next(sites))

    def _with_one_opset(self, job: Job, described: DescribedScopes, choices: tuple[Choice, ...]) -> tuple[Choice, ...]:
        """The choices, where the model can have the opset of all of them; else no site is replaced."""
        rewrites = _rewrites_of(choices)
        if not rewrites:
            return choices
        scope = described.scopes[0]
        try:
            with_opset_of(scope, rewrites)
        except UnsupportedError as error:
            reason = (
                f"the model has opset {opset_of(scope.working.base)}, which {error}; export it with opset 23 or later"
            )
            return tuple(c if c.rewrite is None else self._keep(job, c, reason) for c in choices)
        return choices

    def _keep(self, job: Job, choice: Choice, reason: str) -> Choice:
        assert choice.rewrite is not None
        site = choice.rewrite.site
        kept = self.choice(job).reason_kept(NamedCandidate(site.name, site.index), reason)
        row = replace(choice.report, replaced=False, empty_rows="", kernel="", predicted_gain=None, length=0)
        return keep_site(row, Step.KERNEL, kept)

    def emit(self, job: Job, decided: AttentionDecisions) -> onnx.ModelProto:
        with job.step("emit"):
            emitted = emit_standard(decided.scopes[0], _rewrites_of(decided.choices))
        if not any(n.domain == PREVIEW for n in all_nodes(emitted.graph.node)):  # what had it is replaced
            for i in reversed(range(len(emitted.opset_import))):
                if emitted.opset_import[i].domain == PREVIEW:
                    del emitted.opset_import[i]
        return emitted

    def site_checks(self, job: Job, decided: AttentionDecisions) -> StandardChecks:
        # A tenth of all imports, which --no-verify and --dry-run do not need.
        from stof.attention.standard.checks import StandardChecks

        return StandardChecks(decided.scopes, _rewrites_of(decided.choices))


def _rewrites_of(choices: Sequence[Choice]) -> list[StandardRewrite]:
    return [c.rewrite for c in choices if isinstance(c.rewrite, StandardRewrite)]


STANDARD_ATTENTION = StandardAttentionRewrite()
