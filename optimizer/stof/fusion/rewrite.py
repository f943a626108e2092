# SPDX-License-Identifier: Apache-2.0
"""Fusion as an op of the pipeline: operators around attention become StofChain and StofGemm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType

import onnx

from stof.execution.upcast import TypedAttributes
from stof.fusion.apply import FusionResult, fuse_chains
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
from stof.fusion.decide.selection import NAMES, ChainSelection
from stof.fusion.description.rewriting import widen_description
from stof.fusion.emit import GEMM
from stof.fusion.function_body import OP as CHAIN
from stof.fusion.plan_entry import ChainPlan, read_chain_plan
from stof.fusion.policy import ChainPolicy
from stof.fusion.report import KEY, ChainSection
from stof.fusion.shape_rules import SHAPE_RULES
from stof.op_rewrite import Decisions, Job, LeftOut, OpRewrite
from stof.options import Options
from stof.plan import EntryFormat, Plan
from stof.result_shapes import ResultRules
from stof.runtime.library import has_packed
from stof.selection import NamedCandidate
from stof.tuning_cache import EarlierMeasurements

_LEFT_OUT = "see --chains"


@dataclass(frozen=True)
class FusionCandidates:
    """A model in which regions are looked for, what decides about them, and the user's selection."""

    model: onnx.ModelProto
    decider: ChainDecider
    selection: ChainSelection


@dataclass(frozen=True)
class FusionDecisions(Decisions):
    """A model before and after its regions became fused chains."""

    before: onnx.ModelProto
    result: FusionResult
    tuning: str = ""  # which regions --tune left out for want of time
    earlier: EarlierMeasurements | None = None  # those that decided

    @property
    def section(self) -> ChainSection:
        return ChainSection(list(self.result.reports), self.result.plans, self.tuning, self.earlier)

    @property
    def plan(self) -> tuple[ChainPlan, ...]:
        return self.result.plans

    @property
    def candidates(self) -> tuple[NamedCandidate, ...]:
        return tuple(NamedCandidate(p.chain, i) for i, p in enumerate(self.result.plans))

    @property
    def has_replaced(self) -> bool:
        return self.result.replaced > 0

    @property
    def changes_model(self) -> bool:
        return self.result.model is not self.before

    def undo(self, reason: str) -> FusionDecisions:
        return replace(self, result=self.result.without(self.before, f"with chains, {reason}"))


class FusionRewrite(OpRewrite[FusionCandidates, FusionDecisions]):
    """Finds regions of memory-bound operators, and decides by measurements or estimates which parts become chains."""

    key = KEY
    op_types = frozenset({CHAIN, GEMM})
    result_rules = ResultRules(SHAPE_RULES, with_spare_inputs=op_types)
    typed_attributes: TypedAttributes = MappingProxyType(
        {(CHAIN, "chain"): widen_description, (GEMM, "epilogue"): widen_description}
    )
    names = NAMES
    plan_format = EntryFormat("chain", read_chain_plan)

    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> FusionCandidates | LeftOut:
        decider = make_chain_decider(job.options, job.library, spent=job.tuning.spent, started=job.tuning.started)
        selection = ChainSelection(job.selections[KEY], _plan_entries(job))
        if decider is None and selection.planned and job.options.chains != "off":
            decider = refuse_all
        if decider is None:
            return LeftOut(_LEFT_OUT)
        return FusionCandidates(model(), decider, selection)

    def decide(self, job: Job, found: FusionCandidates) -> FusionDecisions | LeftOut:
        target = job.target
        policy = ChainPolicy(
            epilogue_forms=find_epilogue_forms(job.options, found.selection.planned),
            merge_decider=find_merge_decider(found.decider) if target.has_cuda_gemm and job.plan is None else None,
            splits_gemm_bias=target.has_cuda_gemm,
            reads_packed_heads=target.reads_packed_heads and has_packed(),
            has_cpu_gemm=target.has_cpu_gemm,
            uses_tensorrt_plugins=target.keeps_plugins,
        )
        with job.step("chains"):
            result = fuse_chains(found.model, found.decider, policy, found.selection)
        if has_decided_nothing(found.decider) and found.selection.planned is None:
            return LeftOut(_LEFT_OUT)
        earlier = find_earlier_measurements(found.decider)
        return FusionDecisions(found.model, result, describe_left_out(found.decider), earlier)

    def emit(self, job: Job, model: onnx.ModelProto, decided: FusionDecisions) -> onnx.ModelProto:
        if model is not decided.before:
            raise ValueError("chains are decided for one model, and were to be written into another")
        return decided.result.model

    def empty_section(self) -> ChainSection:
        return ChainSection()

    def has_to_measure(self, options: Options, plan: Plan) -> bool:
        return options.chains != "off" and KEY not in plan.entries


def _plan_entries(job: Job) -> tuple[ChainPlan, ...] | None:
    if job.plan is None or KEY not in job.plan.entries:
        return None
    return tuple(entry for entry in job.plan.entries[KEY] if isinstance(entry, ChainPlan))


FUSION = FusionRewrite()
