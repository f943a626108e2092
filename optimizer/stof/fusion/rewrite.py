# SPDX-License-Identifier: Apache-2.0
"""Fusion as an op of the pipeline: operators around attention become StofChain and StofGemm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import onnx

from stof.execution.upcast import TypedAttributes
from stof.fusion.decide.decision import ChainDecider
from stof.fusion.decide.measured import (
    describe_left_out,
    find_earlier_measurements,
    find_epilogue_forms,
    find_merge_decider,
    has_decided_nothing,
    make_chain_decider,
    refuse_all,
)
from stof.fusion.decide.regions import DecidedChains, decide_chains
from stof.fusion.decide.selection import NAMES, ChainSelection
from stof.fusion.describe.region_problems import DescribedModel
from stof.fusion.description.chain_description import widen_attribute
from stof.fusion.emit import GEMM, apply_edit
from stof.fusion.function_body import OP as CHAIN
from stof.fusion.plan_entry import ChainPlan, read_chain_plan
from stof.fusion.policy import ChainPolicy
from stof.fusion.report import KEY, ChainSection
from stof.fusion.shape_rules import SHAPE_RULES
from stof.fusion.split_gemm_bias import rejoin_gemm_bias
from stof.op_parts import HasTypedAttributes, LeftOut, Measures
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.options import Options
from stof.plan import EntryFormat, Plan
from stof.result_shapes import ResultRules
from stof.runtime.library import has_packed
from stof.selection import NamedCandidate
from stof.tuning_cache import EarlierMeasurements

_LEFT_OUT = "see --chains"


@dataclass(frozen=True, eq=False)
class FusionCandidates:
    """A model in which regions are looked for, what decides about them, and the user's selection.

    Attributes:
        model: as the ops before have written it; None where nothing is looked for.
        decider: None: the options leave fusion out.
        policy: what the target allows.
        selection: the user's decisions.
    """

    model: onnx.ModelProto | None
    decider: ChainDecider | None
    policy: ChainPolicy
    selection: ChainSelection


@dataclass(frozen=True, eq=False)
class FusionProblems:
    """The candidates, with their regions as far as they are asked for."""

    candidates: FusionCandidates
    model: DescribedModel | None


@dataclass(frozen=True, eq=False)
class FusionDecisions(Decisions):
    """What becomes of the regions of a model.

    Attributes:
        before: the model.
        chains: the decisions, and the edit that emits them.
        tuning: which regions --tune left out for want of time.
        earlier: measurements of earlier runs that decided.
    """

    before: onnx.ModelProto
    chains: DecidedChains
    tuning: str = ""
    earlier: EarlierMeasurements | None = None

    @property
    def section(self) -> ChainSection:
        return ChainSection(list(self.chains.reports), self.chains.plans, self.tuning, self.earlier)

    @property
    def plan(self) -> tuple[ChainPlan, ...]:
        return self.chains.plans

    @property
    def candidates(self) -> tuple[NamedCandidate, ...]:
        return tuple(NamedCandidate(p.chain, i) for i, p in enumerate(self.chains.plans))

    @property
    def has_replaced(self) -> bool:
        return self.chains.replaced > 0

    @property
    def changes_model(self) -> bool:
        # Heads that are read packed and merged matmuls stay, whether a chain is emitted or not.
        return self.has_replaced or self.chains.model is not self.before

    def undo(self, reason: str) -> FusionDecisions:
        return replace(self, chains=self.chains.without(self.before, f"with chains, {reason}"))


class FusionRewrite(OpRewrite[FusionCandidates, FusionProblems, FusionDecisions], Measures, HasTypedAttributes):
    """Finds regions of memory-bound operators, and decides by measurements or estimates which parts become chains."""

    key = KEY
    op_types = frozenset({CHAIN, GEMM})
    result_rules = ResultRules(SHAPE_RULES, with_spare_inputs=op_types)
    typed_attributes: TypedAttributes = MappingProxyType(
        {(CHAIN, "chain"): widen_attribute, (GEMM, "epilogue"): widen_attribute}
    )
    names = NAMES
    plan_format = EntryFormat("chain", read_chain_plan)

    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> FusionCandidates:
        decider = make_chain_decider(job.options, job.library, spent=job.tuning.spent, started=job.tuning.started)
        selection = ChainSelection(job.selections[KEY], _plan_entries(job))
        if decider is None and selection.planned and job.options.chains != "off":
            decider = refuse_all
        if decider is None:
            return FusionCandidates(None, None, ChainPolicy(), selection)
        target = job.target
        policy = ChainPolicy(
            epilogue_forms=find_epilogue_forms(job.options, selection.planned),
            merge_decider=find_merge_decider(decider) if target.has_cuda_gemm and job.plan is None else None,
            splits_gemm_bias=target.has_cuda_gemm,
            reads_packed_heads=target.reads_packed_heads and has_packed(),
            has_cpu_gemm=target.has_cpu_gemm,
            uses_tensorrt_plugins=target.keeps_plugins,
        )
        return FusionCandidates(model(), decider, policy, selection)

    def describe(self, job: Job, candidates: FusionCandidates) -> FusionProblems:
        model = candidates.model
        if model is None:
            return FusionProblems(candidates, None)
        return FusionProblems(candidates, DescribedModel(model, candidates.policy, job.facts.of))

    def decide(self, job: Job, described: FusionProblems) -> FusionDecisions | LeftOut:
        decider, selection = described.candidates.decider, described.candidates.selection
        if decider is None or described.model is None:
            return LeftOut(self, _LEFT_OUT)
        with job.step("chains"):
            chains = decide_chains(described.model, decider, selection)
        if has_decided_nothing(decider) and selection.planned is None:
            return LeftOut(self, _LEFT_OUT)
        earlier = find_earlier_measurements(decider)
        return FusionDecisions(described.model.model, chains, describe_left_out(decider), earlier)

    def emit(self, job: Job, decided: FusionDecisions) -> onnx.ModelProto:
        with job.step("emit"):
            return emit_decided(decided.chains)

    def empty_section(self) -> ChainSection:
        return ChainSection()

    def has_to_measure(self, options: Options, plan: Plan) -> bool:
        return options.chains != "off" and KEY not in plan.entries


def emit_decided(chains: DecidedChains) -> onnx.ModelProto:
    """The model with the chains that are decided; a Gemm whose bias no chain took is one again."""
    model = chains.model if chains.edit is None else apply_edit(chains.model, chains.edit)
    return rejoin_gemm_bias(model, chains.gemms)


def _plan_entries(job: Job) -> tuple[ChainPlan, ...] | None:
    if job.plan is None or KEY not in job.plan.entries:
        return None
    return tuple(entry for entry in job.plan.entries[KEY] if isinstance(entry, ChainPlan))


FUSION = FusionRewrite()
