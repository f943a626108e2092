# SPDX-License-Identifier: Apache-2.0
"""The ops of one optimization, each with its decisions about the model that the ops before it have written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import onnx

from stof.arguments.environment import CHECK_STEPS
from stof.op_parts import LeftOut, collect_typed_attributes
from stof.op_rewrite import Decisions, Job, OpRewrite
from stof.result_shapes import ResultRules, declare_results

if TYPE_CHECKING:
    from stof.execution.upcast import TypedAttributes
    from stof.symbolic import Symbolic
    from stof.verification.model_inputs import ModelInputs


class StepChangedModelError(AssertionError):
    """A step changed a model that it only reads: a defect of the op."""


class ModelWatch:
    """Holds the steps of an op to what they promise: none changes the model that it is given, by digests before and after.

    It is for tests and for whoever writes an op: to take digests of models with large weights takes time.

    Args:
        op: names the op in the error.
        models: those that the steps can see from the start.
    """

    def __init__(self, op: str, *models: onnx.ModelProto) -> None:
        self._op = op
        self._is_on = CHECK_STEPS.flag()
        self._seen: dict[int, tuple[onnx.ModelProto, str]] = {}
        for model in models:
            self.see(model)

    def see(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """The model, which is held to be as it is from here on."""
        if self._is_on and id(model) not in self._seen:
            self._seen[id(model)] = model, _digest(model)
        return model

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """One step.

        Raises:
            StepChangedModelError: naming the op and the step.
        """
        yield
        for model, digest in self._seen.values():
            if _digest(model) != digest:
                raise StepChangedModelError(f"{self._op}: {name} changed a model that it only reads; edit a copy")


def _digest(model: onnx.ModelProto) -> str:
    digest = hashlib.blake2b()
    for part in _serialize(model):
        digest.update(part)
    return digest.hexdigest()


def _serialize(message: Any) -> Iterator[bytes]:
    """The bytes of a model or graph in parts: as a whole, protobuf writes none of 2 GiB and more."""
    for field, value in message.ListFields():
        yield field.name.encode()
        if isinstance(value, onnx.GraphProto):
            yield from _serialize(value)
        elif isinstance(value, str | bytes | int):
            yield repr(value).encode()
        else:
            for one in value:
                yield one.SerializeToString(deterministic=True)


@dataclass(frozen=True, eq=False)
class Stage:
    """One op, and its decisions about the model of the stage before.

    A stage has no model but the one that follows from the stage before and its own decisions: a rewrite that was dropped
    there cannot live on here.
    """

    job: Job
    op: OpRewrite[Any, Any, Any]
    decided: Decisions
    previous: Stage | None

    @property
    def before(self) -> onnx.ModelProto:
        """The model that the decisions are about."""
        return _model_after(self.job, self.previous)

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The model as this op writes it; the one before where it changes nothing."""
        if not self.decided.changes_model:
            return self.before
        watch = ModelWatch(self.op.key, self.job.model, self.before)
        with watch.step("emit"):
            return self.op.emit(self.job, self.decided)

    @property
    def written(self) -> onnx.ModelProto:
        """The model as it is written after this op: the results of stof's operators have types and shapes."""
        return self._declared[0]

    @cached_property
    def facts(self) -> Symbolic:
        """Facts of the model as it is written."""
        model, facts = self._declared
        return facts or self.job.facts.of(model)

    @cached_property
    def _declared(self) -> tuple[onnx.ModelProto, Symbolic | None]:
        """The model as it is written, and its facts, where they were needed for that."""
        model, facts = self.model, None
        if model is not self.job.model:
            with self.job.step("shapes"):
                # TensorRT's parser infers shapes by the plugins.
                in_functions = not self.job.target.keeps_plugins
                facts = declare_results(model, self._result_rules, in_functions=in_functions)
        return model, facts

    @property
    def _result_rules(self) -> ResultRules:
        return self.op.result_rules if self.previous is None else self.previous._result_rules | self.op.result_rules


def rewrite(job: Job, ops: Iterable[OpRewrite[Any, Any, Any]]) -> list[Stage]:
    """The stages of all ops that options do not leave out.

    Raises:
        ArgumentError: when options name candidates that the model does not have.
    """
    stages: list[Stage] = []
    for op in ops:
        previous = stages[-1] if stages else None
        stage = _decide(replace(job, inputs=partial(find_model_inputs, job, tuple(stages))), op, previous)
        if isinstance(stage.decided, LeftOut):
            job.selections[op.key].refuse_all(stage.decided.reason)
        else:
            job.selections[op.key].check(stage.decided.candidates)
            stages.append(stage)
    return stages


def find_model_inputs(job: Job, stages: Sequence[Stage]) -> ModelInputs:
    """Draws inputs of the model, by the first op that knows what they mean."""
    # A tenth of all imports, which few runs need here.
    from stof.verification.model_inputs import default_inputs

    checks = filter(None, (s.op.site_checks(job, s.decided) for s in stages))
    inputs = next((i for c in checks if (i := c.model_inputs()) is not None), None)
    return inputs or default_inputs(job.model)


def typed_attributes_to_widen(model: onnx.ModelProto, stages: Sequence[Stage]) -> TypedAttributes | None:
    """The attributes with which a half-precision model runs in fp32; None: it is in fp32 already."""
    from stof.execution.upcast import HALF, holds

    return collect_typed_attributes(stage.op for stage in stages) if holds(model, HALF) else None


def typed_attributes_of_bf16(model: onnx.ModelProto, stages: Sequence[Stage]) -> TypedAttributes | None:
    """As :func:`typed_attributes_to_widen`, but only for models with bf16 tensors; None for fp32 and fp16 models.

    ONNX Runtime's CPU provider lacks most operators in bf16.
    """
    from stof.execution.upcast import holds

    return typed_attributes_to_widen(model, stages) if holds(model, {onnx.TensorProto.BFLOAT16}) else None


def _decide(job: Job, op: OpRewrite[Any, Any, Any], previous: Stage | None) -> Stage:
    job = replace(job, earlier=tuple(s.decided for s in _stages_up_to(previous)))
    watch = ModelWatch(op.key, job.model)
    with watch.step("find"):
        candidates = op.find(job, lambda: watch.see(_model_after(job, previous)))
    with watch.step("describe"):
        described = op.describe(job, candidates)
    with watch.step("decide"):
        decided = op.decide(job, described)
    return Stage(job, op, decided, previous)


def _stages_up_to(stage: Stage | None) -> list[Stage]:
    return [] if stage is None else [*_stages_up_to(stage.previous), stage]


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
    kept_stages = list(stages[:index])
    for stage, decided in [(stages[index], undone), *((s, s.decided) for s in stages[index + 1 :])]:
        previous = kept_stages[-1] if kept_stages else None
        kept = Stage(stage.job, stage.op, decided, previous)
        if decided.changes_model:
            kept = _decide(stage.job, stage.op, previous)
        if not isinstance(kept.decided, LeftOut):
            kept_stages.append(kept)
    return kept_stages
