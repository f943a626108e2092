# SPDX-License-Identifier: Apache-2.0
"""Parts that some ops have beside the protocol of ``stof.op_rewrite``: mixins, each with what one step of the pipeline asks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic

import onnx

from stof.execution.upcast import TypedAttributes
from stof.op_rewrite import Decided, Decisions, Job, OpRewrite, OpSettings
from stof.options import Options
from stof.plan import Plan
from stof.report import Section

if TYPE_CHECKING:
    from stof.prompts.files import PromptSet
    from stof.verification.padding.padded_batch import PaddedBatch
    from stof.verification.result import Verification


class ReadsOptions(ABC):
    """An op with options of its own, which are read once and may name files."""

    @abstractmethod
    def read_options(self, job: Job) -> OpSettings | None:
        """Checks the options before anything takes long, and gives ``job.settings`` of the op; None: there are none.

        Raises:
            ArgumentError: for a wrong option, or a file that cannot be read.
        """


class Measures(ABC):
    """An op for which ``--tune`` may measure something although a plan is applied."""

    @abstractmethod
    def has_to_measure(self, options: Options, plan: Plan) -> bool:
        """Whether it has something to measure."""


class HasTypedAttributes:
    """An op with attributes that are texts with element types in them.

    Attributes:
        typed_attributes: by operator and attribute, what writes the text for wider types.
    """

    typed_attributes: TypedAttributes


class ChangesOutputs(ABC):
    """An op that may change outputs on purpose."""

    @abstractmethod
    def verifiable_form(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A model whose outputs are to equal the original's: the optimized one without what changes outputs on purpose."""


class StatesOutputs(ABC):
    """An op whose options may change outputs in a way that can be stated exactly."""

    @abstractmethod
    def stated_form(self, model: onnx.ModelProto, decided: Decisions) -> onnx.ModelProto:
        """The original with outputs as the options want them, made without the op; itself where they stay as they are."""


class LeavesPaddingOut(ABC):
    """An op that computes texts without the padding of their batch."""

    @abstractmethod
    def padded_batches(self, decided: Decisions) -> tuple[PaddedBatch, ...]:
        """The batches whose padding is left out."""


class HoldsPrompts(ABC):
    """Decisions that change outputs, with prompts by which the change can be measured."""

    @property
    @abstractmethod
    def held_out(self) -> PromptSet | None:
        """Prompts to measure with where --prompts names none; None: there are none."""


class ExplainsFailures(ABC, Generic[Decided]):
    """An op whose decisions cannot be undone, and whose sites a failed verification names."""

    @abstractmethod
    def explain_failure(self, decided: Decided, verification: Verification) -> str:
        """The message of a verification that failed by the fault of this op."""


class LeftOut(Decisions):
    """Decisions of an op that the options leave out: nothing decides about candidates, and a saved plan has no entries of it."""

    def __init__(self, op: OpRewrite[Any, Any, Any], reason: str) -> None:
        """``reason``: what leaves it out, for a message: "see --chains"."""
        self.reason = reason
        self._section = op.empty_section()

    @property
    def section(self) -> Section:
        return self._section

    @property
    def plan(self) -> tuple[()]:
        return ()

    @property
    def candidates(self) -> tuple[()]:
        return ()

    @property
    def has_replaced(self) -> bool:
        return False


def collect_typed_attributes(ops: Iterable[OpRewrite[Any, Any, Any]]) -> TypedAttributes:
    """The texts with element types in them of all ops."""
    return {k: widen for op in ops if isinstance(op, HasTypedAttributes) for k, widen in op.typed_attributes.items()}
