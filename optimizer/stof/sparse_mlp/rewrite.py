# SPDX-License-Identifier: Apache-2.0
"""MLPs whose activation gives zeros as an op of the pipeline: they become StofSparseMLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import onnx

from stof.graph.index import DOMAIN, all_nodes
from stof.graph.names import FreshNames
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.plan import EntryFormat
from stof.runtime.library import op_limits
from stof.selection import NamedCandidate
from stof.sparse_mlp.density import measure_densities
from stof.sparse_mlp.emit import emit_mlps
from stof.sparse_mlp.find import MlpCandidate, find_mlps, has_cache
from stof.sparse_mlp.plan_entry import MlpPlan, read_mlp_plan
from stof.sparse_mlp.report import KEY, NAMES, MlpReport, MlpSection
from stof.sparse_mlp.site import OP, MlpSite
from stof.symbolic import Symbolic

if TYPE_CHECKING:
    from stof.sparse_mlp.checks.site_checks import MlpChecks

_LEAST_GAIN = 1.1  # below, a call costs as much as it saves
# Of a model whose neurons were not counted: half of the outputs of a random matmul are negative.
_UNKNOWN_DENSITY = 0.5


@dataclass(frozen=True, eq=False)
class MlpModel:
    """A model with its candidates.

    Attributes:
        model: the model.
        symbolic: its facts; None where there is no candidate.
        candidates: in the order of the graph.
        densities: the share of active neurons by the name of a site, where it was measured.
    """

    model: onnx.ModelProto
    symbolic: Symbolic | None = None
    candidates: tuple[MlpCandidate, ...] = ()
    densities: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class MlpDecisions(Decisions):
    """The decision for each candidate of a model."""

    found: MlpModel
    mlps: MlpSection
    sites: tuple[MlpSite, ...] = ()

    @property
    def section(self) -> MlpSection:
        return self.mlps

    @property
    def plan(self) -> tuple[MlpPlan, ...]:
        return tuple(MlpPlan(r.mlp, r.replaced, r.density, "" if r.replaced else r.reason) for r in self.mlps.rows)

    @property
    def candidates(self) -> tuple[NamedCandidate, ...]:
        return tuple(NamedCandidate(r.mlp, r.index) for r in self.mlps.rows)

    @property
    def has_replaced(self) -> bool:
        return bool(self.sites)

    def undo(self, reason: str) -> MlpDecisions:
        return replace(self, mlps=self.mlps.without(reason), sites=())


class SparseMlpRewrite(OpRewrite[MlpModel, MlpDecisions]):
    """Replaces MLPs with zeros in models that decode token by token. Runs with many active neurons stay as fast as before."""

    key = KEY
    op_types = frozenset({OP})
    names = NAMES
    plan_format = EntryFormat("mlp", read_mlp_plan)

    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> MlpModel:
        if not _may_have_zeros(job.model):
            return MlpModel(job.model)
        before = model()
        with job.step("mlps"):
            symbolic = Symbolic(before)
            candidates = tuple(find_mlps(before, symbolic))
        if not candidates:
            return MlpModel(before)
        sites = [c.site for c in candidates if c.site is not None]
        densities: Mapping[str, float] = {}
        if not _reason_impossible(job, before):
            with job.step("neurons"):
                densities = measure_densities(job, before, sites)
        return MlpModel(before, symbolic, candidates, densities)

    def decide(self, job: Job, found: MlpModel) -> MlpDecisions:
        rows: list[MlpReport] = []
        sites: list[MlpSite] = []
        self.check_plan(job, [NamedCandidate(c.name, i) for i, c in enumerate(found.candidates)])
        impossible = _reason_impossible(job, found.model) if found.candidates else ""
        for index, candidate in enumerate(found.candidates):
            site = candidate.site
            density = found.densities.get(candidate.name)
            row = MlpReport(candidate.name, index, False, "", density=density)
            gain = 1.0
            if site is not None:
                row = replace(row, activation=site.activation, sizes=site.sizes)
                gain = 1 / site.share_read(_UNKNOWN_DENSITY if density is None else density)
            reason = candidate.reason or impossible or _reason_slow(density, gain)
            reason = self.reason_kept(job, NamedCandidate(candidate.name, index), reason)
            if reason or site is None:
                rows.append(replace(row, reason=reason))
                continue
            rows.append(replace(row, replaced=True, reason="replaced", predicted_gain=round(gain, 3)))
            sites.append(site)
        return MlpDecisions(found, MlpSection(rows), tuple(sites))

    def emit(self, job: Job, model: onnx.ModelProto, decided: MlpDecisions) -> onnx.ModelProto:
        with job.step("emit"):
            return emit_mlps(decided.found.model, decided.sites, job.source.parent)

    def empty_section(self) -> MlpSection:
        return MlpSection()

    def find_earlier_result(self, job: Job) -> MlpDecisions | None:
        done = [n for n in all_nodes(job.model.graph.node) if n.domain == DOMAIN and n.op_type == OP]
        if not done:
            return None
        names = FreshNames()
        rows = [MlpReport(names.make(n.name or OP), i, False, f"is {OP} already") for i, n in enumerate(done)]
        return MlpDecisions(MlpModel(job.model), MlpSection(rows))

    def site_checks(self, job: Job, decided: MlpDecisions) -> MlpChecks | None:
        if not decided.sites:
            return None
        from stof.sparse_mlp.checks.site_checks import MlpChecks

        found = decided.found
        assert found.symbolic is not None
        return MlpChecks(found.model, found.symbolic, decided.sites, job.source.parent)


def _may_have_zeros(model: onnx.ModelProto) -> bool:
    return any(n.op_type == "Relu" for n in model.graph.node)


def _reason_impossible(job: Job, model: onnx.ModelProto) -> str:
    """Why no candidate can be replaced; empty where they can."""
    if job.options.target != "cpu":
        return f"{OP} has kernels for the CPU alone"
    if OP not in op_limits():
        return f"the plugin library has no {OP}; install one of this version"
    if not has_cache(model):
        return "the model has no KV cache: its runs have many tokens, which together need most neurons"
    return ""


def _reason_slow(density: float | None, gain: float) -> str:
    """Why a site that could be replaced is not; empty where it gains."""
    if gain >= _LEAST_GAIN:
        return ""
    active = "" if density is None else f"{100 * density:.0f} % of its neurons are active on the given inputs: "
    return f"{active}{gain:.2f}x is predicted for one token, less than {_LEAST_GAIN}x"


SPARSE_MLP = SparseMlpRewrite()
