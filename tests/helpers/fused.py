# SPDX-License-Identifier: Apache-2.0
"""A model with its chains, in one call: what the rewrite of fusion does in four steps."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from stof.fusion.decide.decision import ChainDecider
from stof.fusion.decide.regions import DecidedChains, decide_chains
from stof.fusion.decide.selection import ChainSelection
from stof.fusion.describe.region_problems import DescribedModel
from stof.fusion.plan_entry import ChainPlan
from stof.fusion.policy import ChainPolicy
from stof.fusion.report import ChainReport
from stof.fusion.rewrite import emit_decided


@dataclass(frozen=True, eq=False)
class FusedModel:
    """A model with its chains, and the decisions behind it."""

    model: onnx.ModelProto
    decided: DecidedChains

    @property
    def reports(self) -> tuple[ChainReport, ...]:
        return self.decided.reports

    @property
    def plans(self) -> tuple[ChainPlan, ...]:
        return self.decided.plans

    @property
    def replaced(self) -> int:
        return self.decided.replaced


def fuse_chains(
    model: onnx.ModelProto,
    decider: ChainDecider,
    policy: ChainPolicy | None = None,
    selection: ChainSelection | None = None,
) -> FusedModel:
    """A copy of a model with the chains that a decider takes; :func:`decide_chains` has the arguments."""
    decided = decide_chains(DescribedModel(model, policy or ChainPolicy()), decider, selection)
    return FusedModel(emit_decided(decided), decided)
