# SPDX-License-Identifier: Apache-2.0
"""Fuses the chains of a model: finds them, checks them, decides about them, emits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx

from stof.errors import StofError, UnsupportedError
from stof.fusion.check import check_chain
from stof.fusion.decide.decision import ChainDecider, ChainDecision
from stof.fusion.decide.selection import ChainSelection
from stof.fusion.emit import ChainSignature, chain_signature, emit_chains, group_by_op, select_common_types
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.merge_matmuls import MergeScope, merge_matmuls
from stof.fusion.packed_qkv import read_packed_heads
from stof.fusion.plan_entry import ChainPlan
from stof.fusion.policy import ChainPolicy, ShapeReads
from stof.fusion.regions import build_chain, find_chains, retranslate_chains
from stof.fusion.split_gemm_bias import rejoin_gemm_bias, split_gemm_bias
from stof.fusion.translate import FusedChain, RefusedRegion
from stof.graph.index import all_nodes, opset_of
from stof.graph.names import FreshNames
from stof.symbolic import Symbolic

_OTHER_TYPES = "its outputs are of other types than those of most chains; all calls of one function share them"


@dataclass(frozen=True)
class ChainReport:
    """One chain, or operators that cannot become one.

    Attributes:
        chain: its name.
        operators: the operators, separated by spaces.
        replaced: whether they are replaced.
        reason: why they are not.
        description: what the chain computes.
        gain: time of the replaced operators over the chain's, where it is known.
        measured: whether the gain was measured rather than estimated.
    """

    chain: str
    operators: str
    replaced: bool
    reason: str
    description: str = ""
    gain: float | None = None
    measured: bool = False


@dataclass(frozen=True)
class FusionResult:
    """A model with its chains replaced, and what became of each chain."""

    model: onnx.ModelProto
    reports: tuple[ChainReport, ...]
    plans: tuple[ChainPlan, ...] = ()

    @property
    def replaced(self) -> int:
        """How many chains were replaced."""
        return sum(r.replaced for r in self.reports)

    def without(self, model: onnx.ModelProto, reason: str) -> FusionResult:
        """The same with no chain replaced: ``model`` is the model before, ``reason`` goes into the reports."""
        kept = (replace(r, replaced=False, reason=reason) if r.replaced else r for r in self.reports)
        plans = (ChainPlan(p.chain, p.operators, (), "outputs differed") if p.replace else p for p in self.plans)
        return FusionResult(model, tuple(kept), tuple(plans))


def fuse_chains(
    model: onnx.ModelProto,
    decider: ChainDecider,
    policy: ChainPolicy | None = None,
    selection: ChainSelection | None = None,
) -> FusionResult:
    """A copy of a model in which StofChain and StofGemm nodes replace the chains that a decider takes.

    Args:
        model: a model with attention replaced already.
        decider: decides about each different region.
        policy: what the target allows.
        selection: the user's decisions, which go first.

    Raises:
        ArgumentError: when the selection names chains that the model does not have.
    """
    fusion = _Fusion(decider, policy or ChainPolicy(), selection or ChainSelection())
    try:
        symbolic = Symbolic(model)
    except StofError:
        raise
    except Exception as error:  # without chains the model is slower; attention stays replaced
        return _nothing_found(model, _failure_text(error))
    return fusion.with_merged_matmuls(model, symbolic) or fusion.without_merging(model, symbolic)


def _failure_text(error: Exception) -> str:
    return f"chains cannot be looked for ({type(error).__name__}: {error}); please report this model"


def _nothing_found(model: onnx.ModelProto, reason: str) -> FusionResult:
    return FusionResult(model, (ChainReport("-", "all operators", False, reason),))


@dataclass(frozen=True)
class _Fusion:
    """One run on one model: who decides, and what the target allows."""

    decider: ChainDecider
    policy: ChainPolicy
    selection: ChainSelection

    def with_merged_matmuls(self, model: onnx.ModelProto, symbolic: Symbolic) -> FusionResult | None:
        """The result after merging matmuls of one tensor; None where merging is not possible, or no chain needs it."""
        decider = self.policy.merge_decider
        if decider is None:
            return None
        for scope in MergeScope:  # where no chain splits query, key and value again, attention alone may still gain
            merged = merge_matmuls(model, symbolic, decider, scope, self.policy.reads_packed_heads)
            if merged.model is model:
                return None
            try:
                merged_symbolic = Symbolic(merged.model)
            except StofError:
                raise
            except Exception as error:  # as in fuse_chains
                found = _nothing_found(merged.model, _failure_text(error))
            else:
                found = self.without_merging(merged.model, merged_symbolic)
            # Attention reads the wide output without Split. Other readers need a chain that fuses it.
            if (found.replaced or not merged.splits) and not merged.splits & {n.name for n in found.model.graph.node}:
                return found
            if not merged.splits:
                return None
        return None

    def without_merging(self, model: onnx.ModelProto, symbolic: Symbolic) -> FusionResult:
        """The result with matmuls as they are."""
        if self.policy.reads_packed_heads:
            model, symbolic = _read_packed_heads(model, symbolic)
        whole, gemms = split_gemm_bias(model, symbolic) if self.policy.splits_gemm_bias else (model, {})
        symbolic = symbolic if whole is model else Symbolic(whole)
        reason = ""
        for shape_reads in ShapeReads:
            try:
                found = self._replace_chains(FusionGraph(whole, symbolic, self.policy, shape_reads))
                return replace(found, model=rejoin_gemm_bias(found.model, gemms))
            except UnsupportedError as error:
                reason = str(error)
            except StofError:
                raise
            except Exception as error:  # without chains the model is slower; attention stays replaced
                reason = _failure_text(error)
                break
        return _nothing_found(model, reason)

    def _replace_chains(self, graph: FusionGraph) -> FusionResult:
        model = graph.model
        names = _ChainNames()
        if any(n.op_type == "StofChain" for n in all_nodes(model.graph.node)):
            return FusionResult(model, (ChainReport("-", "", False, "the model holds StofChain already"),))
        assumes_fused = graph.shape_reads is ShapeReads.ASSUME_FUSED
        chains, refused = find_chains(graph)
        if assumes_fused:
            chains = retranslate_chains(graph, chains)
        labels = [names.name(graph, c.region.node_indices) for c in chains]
        regions = [graph.with_leading_matmuls(c.region.node_indices) for c in chains]
        operators = [graph.operator_names(r) for r in regions]
        self.selection.check(labels, operators)
        reports = [_report_refused(graph, x, names) for x in refused]
        decisions = self._decide_all(graph, chains, labels, operators)
        wanted: list[tuple[FusedChain, int, tuple[int, int]]] = []  # with the number of its region and its segment
        for i, (chain, decision) in enumerate(zip(chains, decisions, strict=True)):
            built = [(build_chain(graph, regions[i][start:end]), (start, end)) for start, end in decision.segments]
            parts = [(part, i, segment) for part, segment in built if isinstance(part, FusedChain)]
            wanted += parts
            if not parts:
                text, gain, measured = chain.description.text, decision.gain, decision.measured
                reports.append(ChainReport(labels[i], operators[i], False, decision.reason, text, gain, measured))
        fitting = [
            c for group in group_by_op([c for c, _, _ in wanted]).values() for c in select_common_types(group)[0]
        ]
        if len(fitting) < len(chains) and assumes_fused:
            fitting = retranslate_chains(graph, fitting)
        emitted = {c.region.node_indices: c for c in fitting}
        segments: dict[int, list[tuple[int, int]]] = {}
        for chain, i, segment in wanted:
            indices = chain.region.node_indices
            is_emitted = indices in emitted
            if is_emitted:
                segments.setdefault(i, []).append(segment)
            name = labels[i] if indices == chains[i].region.node_indices else names.name(graph, indices)
            text = emitted.get(indices, chain).description.text
            reason = "replaced" if is_emitted else _OTHER_TYPES
            gain, measured = decisions[i].gain, decisions[i].measured
            reports.append(ChainReport(name, graph.operator_names(indices), is_emitted, reason, text, gain, measured))
        substitutes = {t: other for c in fitting for t, other in graph.shape_substitutes(c.region.node_indices).items()}
        plans = [
            ChainPlan(label, text, tuple(segments.get(i, ())))
            for i, (label, text) in enumerate(zip(labels, operators, strict=True))
        ]
        result = emit_chains(model, graph.symbolic, fitting, substitutes, self.policy.uses_tensorrt_plugins)
        return FusionResult(result, tuple(reports), tuple(plans))

    def _decide_all(
        self, graph: FusionGraph, chains: Sequence[FusedChain], labels: Sequence[str], operators: Sequence[str]
    ) -> list[ChainDecision]:
        """A decision about each region: the user's where there is one, else one for all equal regions."""
        by_user = [self.selection.of_chain(i, name) for i, name in enumerate(labels)]
        keys = [
            (
                chain_signature(c, graph.symbolic),
                (text, *graph.weight_shapes(graph.with_leading_matmuls(c.region.node_indices))),
            )
            for c, text in zip(chains, operators, strict=True)
        ]
        undecided = {k for k, decision in zip(keys, by_user, strict=True) if decision is None}
        known: dict[tuple[object, ChainDecision | None], ChainDecision] = {}
        found = []
        for chain, key, given in zip(chains, keys, by_user, strict=True):
            case = (key, given)
            if case not in known:
                if given is None:
                    left = len(undecided) - sum(user is None for _, user in known)
                    known[case] = self._decide(graph, chain, key[0], left)
                else:
                    known[case] = _check_segments(graph, chain, given)
            found.append(known[case])
        return found

    def _decide(self, graph: FusionGraph, chain: FusedChain, signature: ChainSignature, left: int) -> ChainDecision:
        try:
            check_chain(chain, graph.nodes, graph.symbolic, opset_of(graph.model))
        except UnsupportedError as error:
            return ChainDecision((), str(error))
        decision = self.decider(graph, chain, signature, left)
        region = graph.with_leading_matmuls(chain.region.node_indices)
        is_checked = decision.segments == ((len(region) - len(chain.region.node_indices), len(region)),)
        return decision if is_checked else _check_segments(graph, chain, decision)


def _read_packed_heads(model: onnx.ModelProto, symbolic: Symbolic) -> tuple[onnx.ModelProto, Symbolic]:
    try:
        packed = read_packed_heads(model, symbolic)
        return (model, symbolic) if packed is model else (packed, Symbolic(packed))
    except StofError:
        raise
    except Exception:  # the copies of heads stay; attention stays replaced
        return model, symbolic


def _check_segments(graph: FusionGraph, chain: FusedChain, decision: ChainDecision) -> ChainDecision:
    """The decision; without segments where one of them does not compute what it replaces."""
    try:
        for start, end in decision.segments:
            part = build_chain(graph, graph.with_leading_matmuls(chain.region.node_indices)[start:end])
            if isinstance(part, FusedChain):
                check_chain(part, graph.nodes, graph.symbolic, opset_of(graph.model))
    except UnsupportedError as error:
        return ChainDecision((), str(error))
    return decision


def _report_refused(graph: FusionGraph, refused: RefusedRegion, names: _ChainNames) -> ChainReport:
    indices = refused.node_indices
    return ChainReport(names.name(graph, indices), graph.operator_names(indices), False, refused.reason)


class _ChainNames:
    """Unique names of regions for reports and plans: the last node's name, or the tensor that it writes."""

    def __init__(self) -> None:
        self._names = FreshNames(numbered=lambda name, number: f"{name} ({number})")

    def name(self, graph: FusionGraph, node_indices: Sequence[int]) -> str:
        node = graph.nodes[node_indices[-1]]
        return self._names.make(node.name or f"{node.op_type} of {node.output[0]}")
