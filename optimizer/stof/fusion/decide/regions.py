# SPDX-License-Identifier: Apache-2.0
"""What becomes of each region of a model: the user's choice, the decider's, the check of each chain, and whether it fits in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import onnx

from stof.errors import StofError, UnsupportedError
from stof.fusion.check import check_chain
from stof.fusion.decide.decision import ChainDecider, ChainDecision
from stof.fusion.decide.selection import ChainSelection
from stof.fusion.describe.region_problems import ChainProblem, DescribedGraph, DescribedModel, DescribedRegion
from stof.fusion.describe.working_copies import FusionCopy, explain_fault
from stof.fusion.emit import ChainEdit, group_by_op, make_edit, select_common_types
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.plan_entry import ChainPlan
from stof.fusion.policy import ShapeReads
from stof.fusion.regions import build_chain, retranslate_chains
from stof.fusion.report import ChainReport
from stof.fusion.split_gemm_bias import SplitGemms
from stof.fusion.translate import FusedChain
from stof.graph.index import all_nodes, opset_of

_OTHER_TYPES = "its outputs are of other types than those of most chains; all calls of one function share them"


@dataclass(frozen=True, eq=False)
class DecidedChains:
    """What becomes of each region of a model, and the edit that emits it.

    Attributes:
        model: that the edit is for: a copy, or the model itself.
        reports: of regions, and of what cannot become one.
        plans: of regions that can become chains, in the order by which options number them.
        edit: None: the model stays as it is.
        gemms: what stands for a Gemm in the model, and is joined again where no chain took it.
    """

    model: onnx.ModelProto
    reports: tuple[ChainReport, ...]
    plans: tuple[ChainPlan, ...] = ()
    edit: ChainEdit | None = None
    gemms: SplitGemms = field(default_factory=dict)

    @property
    def replaced(self) -> int:
        """How many chains are replaced."""
        return sum(r.replaced for r in self.reports)

    @property
    def live_nodes(self) -> frozenset[str]:
        """Names of the nodes that stay."""
        return frozenset(n.name for n in self.model.graph.node) if self.edit is None else self.edit.live

    def without(self, model: onnx.ModelProto, reason: str) -> DecidedChains:
        """The same with no chain replaced: ``model`` is the model before, ``reason`` goes into the reports."""
        kept = (replace(r, replaced=False, reason=reason) if r.replaced else r for r in self.reports)
        plans = (ChainPlan(p.chain, p.operators, (), "outputs differed") if p.replace else p for p in self.plans)
        return DecidedChains(model, tuple(kept), tuple(plans))


def decide_chains(
    described: DescribedModel, decider: ChainDecider, selection: ChainSelection | None = None
) -> DecidedChains:
    """What becomes of each region, in the first copy of the model whose chains gain.

    Args:
        described: a model with attention replaced already.
        decider: decides about each different region.
        selection: the user's decisions, which go first.

    Raises:
        ArgumentError: when the selection names chains that the model does not have.
    """
    selection = selection or ChainSelection()
    for copy in described.copies():
        decided = _decide_copy(described, copy, decider, selection)
        # Attention reads the wide output without Split. Other readers need a chain that fuses it.
        if (decided.replaced or not copy.splits) and not copy.splits & decided.live_nodes:
            break
    return decided


def _decide_copy(
    described: DescribedModel, copy: FusionCopy, decider: ChainDecider, selection: ChainSelection
) -> DecidedChains:
    reason = copy.failure
    for shape_reads in () if reason else ShapeReads:
        try:
            if any(n.op_type == "StofChain" for n in all_nodes(copy.model.graph.node)):
                report = ChainReport("-", "", False, "the model holds StofChain already")
                return DecidedChains(copy.model, (report,), gemms=copy.gemms)
            return _decide_graph(described.graph_of(copy, shape_reads), decider, selection, copy.gemms)
        except UnsupportedError as error:
            reason = str(error)
        except StofError:
            raise
        except Exception as error:  # without chains the model is slower; attention stays replaced
            reason = explain_fault(error)
            break
    return DecidedChains(copy.whole, (ChainReport("-", "all operators", False, reason),))


def _decide_graph(
    described: DescribedGraph, decider: ChainDecider, selection: ChainSelection, gemms: SplitGemms
) -> DecidedChains:
    graph, regions, names = described.graph, described.regions, described.names
    assumes_fused = graph.shape_reads is ShapeReads.ASSUME_FUSED
    selection.check([r.name for r in regions], [r.problem.operators for r in regions])
    reports = [
        ChainReport(names.name(graph, x.node_indices), graph.operator_names(x.node_indices), False, x.reason)
        for x in described.refused
    ]
    decisions = _decide_all(graph, regions, decider, selection)
    wanted: list[tuple[FusedChain, int, tuple[int, int]]] = []  # with the number of its region and its segment
    for i, (region, decision) in enumerate(zip(regions, decisions, strict=True)):
        built = [(build_chain(graph, region.nodes[start:end]), (start, end)) for start, end in decision.segments]
        parts = [(part, i, segment) for part, segment in built if isinstance(part, FusedChain)]
        wanted += parts
        if not parts:
            text, gain, measured = region.problem.description.text, decision.gain, decision.measured
            reports.append(
                ChainReport(region.name, region.problem.operators, False, decision.reason, text, gain, measured)
            )
    fitting = [c for group in group_by_op([c for c, _, _ in wanted]).values() for c in select_common_types(group)[0]]
    if len(fitting) < len(regions) and assumes_fused:
        fitting = retranslate_chains(graph, fitting)
    emitted = {c.region.node_indices: c for c in fitting}
    segments: dict[int, list[tuple[int, int]]] = {}
    for chain, i, segment in wanted:
        indices = chain.region.node_indices
        is_emitted = indices in emitted
        if is_emitted:
            segments.setdefault(i, []).append(segment)
        name = regions[i].name if indices == regions[i].chain.region.node_indices else names.name(graph, indices)
        text = emitted.get(indices, chain).description.text
        reason = "replaced" if is_emitted else _OTHER_TYPES
        gain, measured = decisions[i].gain, decisions[i].measured
        reports.append(ChainReport(name, graph.operator_names(indices), is_emitted, reason, text, gain, measured))
    substitutes = {t: other for c in fitting for t, other in graph.shape_substitutes(c.region.node_indices).items()}
    plans = [ChainPlan(r.name, r.problem.operators, tuple(segments.get(i, ()))) for i, r in enumerate(regions)]
    edit = make_edit(graph.model, graph.symbolic, fitting, substitutes, graph.policy.uses_tensorrt_plugins)
    return DecidedChains(graph.model, tuple(reports), tuple(plans), edit, gemms)


def _decide_all(
    graph: FusionGraph, regions: Sequence[DescribedRegion], decider: ChainDecider, selection: ChainSelection
) -> list[ChainDecision]:
    """A decision about each region: the user's where there is one, else one for all equal problems."""
    by_user = [selection.of_chain(i, r.name) for i, r in enumerate(regions)]
    undecided = {r.problem for r, decision in zip(regions, by_user, strict=True) if decision is None}
    decision_of: dict[tuple[ChainProblem, ChainDecision | None], ChainDecision] = {}
    decisions = []
    for region, planned in zip(regions, by_user, strict=True):
        case = (region.problem, planned)
        if case not in decision_of:
            if planned is None:
                remaining = len(undecided) - sum(user is None for _, user in decision_of)
                decision_of[case] = _decide(graph, region, decider, remaining)
            else:
                decision_of[case] = _check_segments(graph, region, planned)
        decisions.append(decision_of[case])
    return decisions


def _decide(graph: FusionGraph, region: DescribedRegion, decider: ChainDecider, remaining: int) -> ChainDecision:
    chain = region.chain
    try:
        check_chain(chain, graph.nodes, graph.symbolic, opset_of(graph.model))
    except UnsupportedError as error:
        return ChainDecision((), str(error))
    decision = decider(graph, chain, region.problem.signature, remaining)
    is_checked = decision.segments == ((len(region.nodes) - len(chain.region.node_indices), len(region.nodes)),)
    return decision if is_checked else _check_segments(graph, region, decision)


def _check_segments(graph: FusionGraph, region: DescribedRegion, decision: ChainDecision) -> ChainDecision:
    """The decision; without segments where one of them does not compute what it replaces."""
    try:
        for start, end in decision.segments:
            part = build_chain(graph, region.nodes[start:end])
            if isinstance(part, FusedChain):
                check_chain(part, graph.nodes, graph.symbolic, opset_of(graph.model))
    except UnsupportedError as error:
        return ChainDecision((), str(error))
    return decision
