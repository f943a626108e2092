# SPDX-License-Identifier: Apache-2.0
"""The ops of one optimization, each with its decisions about the model that the ops before it have written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import onnx

from stof.op_rewrite import Decisions, Job, LeftOut, OpRewrite
from stof.result_shapes import ResultRules, declare_results

if TYPE_CHECKING:
    from stof.verification.model_inputs import ModelInputs


@dataclass(frozen=True, eq=False)
class Stage:
    """One op, and its decisions about the model of the stage before.

    A stage has no model but the one that follows from the stage before and its own decisions: a rewrite that was dropped
    there cannot live on here.
    """

    job: Job
    op: OpRewrite[Any, Any]
    decided: Decisions
    previous: Stage | None

    @property
    def before(self) -> onnx.ModelProto:
        """The model that the decisions are about."""
        return _model_after(self.job, self.previous)

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The model as this op writes it; the one before where it changes nothing."""
        return self.op.emit(self.job, self.before, self.decided) if self.decided.changes_model else self.before

    @cached_property
    def written(self) -> onnx.ModelProto:
        """The model as it is written after this op: the results of stof's operators have types and shapes."""
        model = self.model
        if model is not self.job.model:
            with self.job.step("shapes"):
                # TensorRT's parser infers shapes by the plugins.
                in_functions = not self.job.target.keeps_plugins
                declare_results(model, self._result_rules, in_functions=in_functions)
        return model

    @property
    def _result_rules(self) -> ResultRules:
        return self.op.result_rules if self.previous is None else self.previous._result_rules | self.op.result_rules


def rewrite(job: Job, ops: Iterable[OpRewrite[Any, Any]]) -> list[Stage]:
    """The stages of all ops that options do not leave out.

    Raises:
        ArgumentError: when options name candidates that the model does not have.
    """
    stages: list[Stage] = []
    for op in ops:
        previous = stages[-1] if stages else None
        stage = _decide(replace(job, inputs=partial(known_inputs, job, tuple(stages))), op, previous)
        if isinstance(stage, LeftOut):
            job.selections[op.key].refuse_all(stage.reason)
        else:
            job.selections[op.key].check(stage.decided.candidates)
            stages.append(stage)
    return stages


def known_inputs(job: Job, stages: Sequence[Stage]) -> ModelInputs:
    """Draws inputs of the model, by the first op that knows what they mean."""
    # A tenth of all imports, which few runs need here.
    from stof.verification.model_inputs import default_inputs

    checks = filter(None, (s.op.site_checks(job, s.decided) for s in stages))
    known = next((i for c in checks if (i := c.model_inputs()) is not None), None)
    return known or default_inputs(job.model)


def _decide(job: Job, op: OpRewrite[Any, Any], previous: Stage | None) -> Stage | LeftOut:
    model: Callable[[], onnx.ModelProto] = lambda: _model_after(job, previous)  # noqa: E731
    found = op.find(job, model)
    decided = found if isinstance(found, LeftOut) else op.decide(job, found)
    return decided if isinstance(decided, LeftOut) else Stage(job, op, decided, previous)


def _model_after(job: Job, stage: Stage | None) -> onnx.ModelProto:
    return job.model if stage is None else stage.model


def can_drop(stage: Stage) -> bool:
    """Whether a stage changes the model, and its rewrites can be dropped."""
    return stage.decided.changes_model and stage.decided.undo("") is not None


def drop(stages: Sequence[Stage], index: int, reason: str) -> list[Stage]:
    """The stages without the rewrites of one of them, which can be dropped.

    Later ops that change the model find and decide again, in the model that is left.

    Args:
        stages: all stages.
        index: of the one at fault.
        reason: for the report.
    """
    undone = stages[index].decided.undo(reason)
    if undone is None:
        raise ValueError(f"{stages[index].op.key} cannot be undone")
    found = list(stages[:index])
    for stage, decided in [(stages[index], undone), *((s, s.decided) for s in stages[index + 1 :])]:
        previous = found[-1] if found else None
        kept: Stage | LeftOut = Stage(stage.job, stage.op, decided, previous)
        if decided.changes_model:
            kept = _decide(stage.job, stage.op, previous)
        if isinstance(kept, Stage):
            found.append(kept)
    return found
