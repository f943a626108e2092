# SPDX-License-Identifier: Apache-2.0
"""Gives a job the model in which quantized attention computes in float, where the search finds a site then."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from stof.attention.expand.expanders import make_working_copy
from stof.attention.quantized.core_form import QuantizedCore, with_cores
from stof.attention.quantized.core_search import find_float_cores
from stof.attention.report import KEY
from stof.attention.subgraphs import find_scopes
from stof.errors import ArgumentError
from stof.execution.given_inputs import GivenFeed
from stof.mask.site import AttentionSite
from stof.op_rewrite import Job
from stof.options import Options
from stof.plan import Plan
from stof.selection import NamedCandidate, Selection, UserChoice
from stof.verification.float_distance import DequantizedAttention

_OTHERS = "its float form is no attention that is replaced"


def check_dequantized_plan(plan: Plan | None, options: Options) -> None:
    """Refuses a plan that was saved with the option for a run without it, and the other way round.

    Raises:
        ArgumentError: naming the option.
    """
    if plan is not None and plan.dequantizes_attention != options.dequantize_attention:
        has = "with" if plan.dequantizes_attention else "without"
        raise ArgumentError(
            f"the plan was saved {has} --dequantize-attention; give the options that it was saved with, or another plan"
        )


def dequantize_attention(job: Job, given: Sequence[GivenFeed], is_dry: bool) -> Job:
    """The job with a model in which the quantized attentions that are sites then compute in float.

    Args:
        job: the optimization.
        given: the user's sets of inputs, on which outputs are measured later.
        is_dry: nothing is written, and nothing measured.

    Raises:
        ArgumentError: without inputs; for options that name no site.
    """
    options = job.options
    if not given and not is_dry and not options.force:
        raise ArgumentError(
            "--dequantize-attention changes outputs, and how far is measured on your inputs: give --inputs FILE, or write the "
            "model unmeasured with --force"
        )
    reference = "" if options.float_model is None else str(options.float_model)
    with job.step("dequantize"):
        cores = find_float_cores(job.model)
        if not cores:
            return replace(job, dequantized=DequantizedAttention([], reference=reference))
        found = _find_sites(job, cores)
        choice = UserChoice.of(job.selections[KEY], job.plan, KEY)
        result = DequantizedAttention([], reference=reference)
        chosen: list[QuantizedCore] = []
        for core in cores:
            site = found.of(core)
            reason = found.reason_of(core) if site is None else choice.reason_left_out(_named(site))
            name = core.name if site is None else site.name
            if reason:
                result.kept[name] = reason
            else:
                result.sites.append(name)
                chosen.append(core)
        selections = {**job.selections, KEY: found.selection_by_name(job.selections[KEY])}
        model = with_cores(job.model, chosen)
    return replace(job, model=model, dequantized=result, selections=selections)


def _named(site: AttentionSite) -> NamedCandidate:
    return NamedCandidate(site.name, site.index)


class _FoundSites:
    """The sites of the model in which all quantized cores compute in float."""

    def __init__(self, sites: Sequence[AttentionSite], reasons: dict[str, str]) -> None:
        self._sites = sites
        self._by_softmax = {s.softmax: s for s in sites}
        self._reasons = reasons

    def of(self, core: QuantizedCore) -> AttentionSite | None:
        """The site of a core; None where the search has refused it."""
        return self._by_softmax.get(core.new_softmax)

    def reason_of(self, core: QuantizedCore) -> str:
        """Why the search has refused a core."""
        return self._reasons.get(core.new_softmax, _OTHERS)

    def selection_by_name(self, selection: Selection) -> Selection:
        """What options select, by names: what stays quantized may have another number in the model that the ops get."""
        selected = [s for s in self._sites if not selection.reason_left_out(_named(s))]
        skipped = [s for s in self._sites if any(_named(s).matches(p) for p in selection.skip)]
        return replace(
            selection,
            only=tuple(s.name for s in selected) if selection.only else (),
            skip=tuple(s.name for s in skipped),
        )


def _find_sites(job: Job, cores: Sequence[QuantizedCore]) -> _FoundSites:
    """Raises ArgumentError for options that name no site."""
    scopes = find_scopes(make_working_copy(with_cores(job.model, cores)))
    sites = [site for scope in scopes for site in scope.sites]
    findings = [finding for scope in scopes for finding in scope.findings]
    job.selections[KEY].check([*map(_named, sites), *(NamedCandidate(f.site) for f in findings)])
    return _FoundSites(sites, {str(f.details.get("softmax", "")): f.reason for f in findings})
