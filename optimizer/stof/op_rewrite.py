# SPDX-License-Identifier: Apache-2.0
"""The protocol of an op: how a model is rewritten to use it. ``stof.ops`` lists the ops; the pipeline loops over the list.

An op's rewrite takes a model through these steps, each of which takes a value and gives a value:

``find``    candidates in the model, with the reason for each refusal
``decide``  what becomes of each candidate: a row of the report and an entry of the plan
``emit``    a model in which the decided candidates are nodes of the op; the only step that changes a graph
``verify``  the emitted nodes, and the whole model, beside the original
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import onnx

from stof.options import Options
from stof.plan import EntryFormat, Plan, PlanEntry
from stof.report import Section

if TYPE_CHECKING:
    from stof.verification.result import Verification


@dataclass(frozen=True)
class Job:
    """One optimization, as the steps of every op see it.

    Attributes:
        options: the user's settings.
        source: the file that the model was read from; its external data lies beside it.
        model: the model as it was read.
        library: ``build_info()`` of the plugin library.
        plan: the plan to apply; None where there is none.
        step: times a step for the report, and turns what a damaged graph makes fail into a ``ModelError``.
    """

    options: Options
    source: Path
    model: onnx.ModelProto
    library: Mapping[str, Any]
    plan: Plan | None
    step: Callable[[str], AbstractContextManager[None]]


class Decisions(ABC):
    """What becomes of the candidates of one op in one model."""

    @property
    @abstractmethod
    def section(self) -> Section:
        """The op's part of the report."""

    @property
    @abstractmethod
    def plan(self) -> tuple[PlanEntry, ...]:
        """The entries that reproduce these decisions."""

    @property
    @abstractmethod
    def has_replaced(self) -> bool:
        """Whether a candidate is replaced."""

    @property
    def changes_model(self) -> bool:
        """Whether the emitted model is another than the one before."""
        return self.has_replaced

    def undo(self, reason: str) -> Decisions | None:
        """The same with no candidate replaced and the reason in each row, where the rest of the model can do without them.

        None: these decisions cannot be undone, and a failure is an error of the whole optimization.
        """
        return None


Found = TypeVar("Found")
Decided = TypeVar("Decided", bound=Decisions)


class OpRewrite(ABC, Generic[Found, Decided]):
    """The rewrite of one op, or of a family of ops among which one search chooses.

    Attributes:
        key: names the op's entries in plans and its rows in reports, ``sites`` for instance.
        op_types: the operators of domain ``stof`` that it writes.
        plan_format: of its entries in a plan file.
    """

    key: str
    op_types: frozenset[str]
    plan_format: EntryFormat

    @abstractmethod
    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> Found | None:
        """The candidates; None where the options leave the op out.

        Args:
            job: the optimization.
            model: makes the model that the ops before this one have written. That takes time: call it only where there is
                something to look for.

        Raises:
            ArgumentError: when options or the plan name what the model does not have.
        """

    @abstractmethod
    def decide(self, job: Job, found: Found) -> Decided:
        """What becomes of each candidate.

        Raises:
            ArgumentError: when options ask for what cannot be.
            ModelError: when the plan replaces what cannot be replaced.
        """

    @abstractmethod
    def emit(self, job: Job, model: onnx.ModelProto, decided: Decided) -> onnx.ModelProto:
        """A copy of the model in which the decided candidates are nodes of the op."""

    @abstractmethod
    def empty_section(self) -> Section:
        """The op's part of the report where it was left out."""

    def find_earlier_result(self, job: Job) -> Decided | None:
        """What the report and the plan say where the model holds the op already, so that nothing is done; else None."""
        return None

    def verify(
        self, job: Job, decided: Decided, emitted: onnx.ModelProto, final: onnx.ModelProto, scratch: Path
    ) -> Verification | None:
        """Compares the op's nodes with what they replace, and the final model with the original.

        The first op that can do it verifies the model for all; None where an op has no such comparison.

        Args:
            job: the optimization.
            decided: what was replaced.
            emitted: the model as this op wrote it, in which its nodes are looked at.
            final: the model as the last op wrote it.
            scratch: a folder to write into, on a disk with room for the model.

        Raises:
            RuntimeFailure: when ONNX Runtime cannot load or run one of the models.
        """
        return None

    def explain_failure(self, decided: Decided, verification: Verification) -> str:
        """The message of a verification that failed."""
        return f"verification failed: {verification.failures[0].message()}. Nothing was written"
