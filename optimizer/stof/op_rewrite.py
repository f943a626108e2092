# SPDX-License-Identifier: Apache-2.0
"""The protocol of an op: how a model is rewritten to use it. ``stof.ops`` lists the ops; the pipeline loops over the list.

``prepare`` gives the model that all ops rewrite, and that outputs are compared with. An op's rewrite then takes it through
these steps, each of which takes a value and gives a value:

``find``      candidates in the model, with the reason for each refusal
``describe``  the problem of each candidate: what it asks of kernels, as a frozen value that caches and cost models have as key
``decide``    what becomes of each candidate: a row of the report and an entry of the plan
``emit``      a model in which the decided candidates are nodes of the op

``emit`` is the only step that changes a graph: what the three before it edit are copies of their own. With the environment
variable ``STOF_CHECK_STEPS``, ``stof.stages`` holds them to it.

``stof.verification`` then compares the whole model with the original. An op may have site checks, too, which compare each
of its nodes with what it replaces. ``stof.op_parts`` has what some ops need besides.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import onnx

from stof.errors import ArgumentError
from stof.options import Options
from stof.plan import EntryFormat, Plan, PlanEntry
from stof.report import Section
from stof.result_shapes import ResultRules
from stof.selection import CandidateNames, NamedCandidate, Selection, UserChoice, list_candidates
from stof.sparsify.sparsity import Sparsity
from stof.sparsify.spec import SparsitySpec
from stof.symbolic import Symbolic
from stof.targets import Target

if TYPE_CHECKING:
    from stof.prompts.files import PromptSet
    from stof.verification.float_distance import DequantizedAttention
    from stof.verification.model_inputs import ModelInputs
    from stof.verification.site_checks import SiteChecks


@dataclass
class Tuning:
    """How much of the time of ``--tune`` is used up, by the ops together, and what is an earlier measurement.

    Attributes:
        spent: seconds.
        started: when the run began, in seconds since 1970.
    """

    spent: float = 0.0
    started: float = field(default_factory=time.time)


class Interpretation:
    """The facts of the model that was interpreted last: where an op changes nothing, those after it get them as they are."""

    def __init__(self) -> None:
        self._last: tuple[onnx.ModelProto, Symbolic] | None = None

    def of(self, model: onnx.ModelProto) -> Symbolic:
        """The facts of a model, which nobody changes from here on."""
        if self._last is None or self._last[0] is not model:
            self._last = model, Symbolic(model)
        return self._last[1]


class OpSettings(Protocol):
    """What the options of one op say, read once."""

    @property
    def files(self) -> Mapping[str, Path]:
        """The files that they name, by what they are."""


Measure = Callable[[str], AbstractContextManager[None]]  # times a step for the report


@dataclass(frozen=True)
class Job:
    """One optimization, as the steps of every op see it.

    Attributes:
        options: the user's settings.
        source: the file that the model was read from; its external data lies beside it.
        model: the model as it was read.
        library: ``build_info()`` of the plugin library.
        plan: the plan to apply; None where there is none.
        selections: the candidates that options name, by the key of their op.
        step: times a step for the report, and turns what a damaged graph makes fail into a ``ModelError``.
        tuning: the time that measurements took so far.
        sparsity: what --sparsify puts on attentions; ``model`` has it then. None: nothing.
        run_time_masks: what --sparsify says of skip by score, choose blocks and choose pages; None: nothing.
        dequantized: attention that --dequantize-attention makes float; ``model`` has it then. None: nothing.
        prompts: the file of --prompts; None: there is none.
        inputs: draws inputs of ``model``, by the first op so far that knows what they mean.
        settings: what the options of its own say to an op, by its key.
        facts: of the model that was interpreted last.
        earlier: what the ops before this one have decided.
    """

    options: Options
    source: Path
    model: onnx.ModelProto
    library: Mapping[str, Any]
    plan: Plan | None
    step: Measure
    selections: Mapping[str, Selection] = field(default_factory=dict)
    tuning: Tuning = field(default_factory=Tuning)
    sparsity: Sparsity | None = None
    run_time_masks: SparsitySpec | None = None
    dequantized: DequantizedAttention | None = None
    prompts: PromptSet | None = None
    inputs: Callable[[], ModelInputs] | None = None
    settings: Mapping[str, OpSettings] = field(default_factory=dict)
    facts: Interpretation = field(default_factory=Interpretation)
    earlier: tuple[Decisions, ...] = ()

    @property
    def target(self) -> Target:
        """What runs the optimized model."""
        return self.options.tuned_for


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
    def candidates(self) -> tuple[NamedCandidate, ...]:
        """What options may name, whether it is replaced or not."""

    @property
    @abstractmethod
    def has_replaced(self) -> bool:
        """Whether a candidate is replaced."""

    @property
    def changes_model(self) -> bool:
        """Whether there is something to emit. Without it, the op leaves the model as it is."""
        return self.has_replaced

    def undo(self, reason: str) -> Decisions | None:
        """The same with no candidate replaced and the reason in each row, where the rest of the model can do without them.

        They no longer change the model. None: these decisions cannot be undone, and a failure is an error of the whole
        optimization.
        """
        return None


Candidates = TypeVar("Candidates")
Described = TypeVar("Described")
Decided = TypeVar("Decided", bound=Decisions)


class OpRewrite(ABC, Generic[Candidates, Described, Decided]):
    """The rewrite of one op, or of a family of ops among which one search chooses.

    Attributes:
        key: names the op's entries in plans and its rows in reports, ``sites`` for instance.
        op_types: the operators of domain ``stof`` that it writes.
        result_rules: what the contracts of its operators say of results: shapes, inputs that are not read, results in place.
        names: how options and messages name its candidates.
        plan_format: of its entries in a plan file.
    """

    key: str
    op_types: frozenset[str]
    result_rules: ResultRules = ResultRules()
    names: CandidateNames
    plan_format: EntryFormat

    def prepare(self, job: Job) -> Job:
        """The job with a model that means what the user declared: attentions have the patterns of ``job.sparsity``.

        The model is a copy where it differs. This happens once, before any op finds anything.

        Raises:
            ArgumentError: when a pattern does not fit the model.
        """
        return job

    @abstractmethod
    def find(self, job: Job, model: Callable[[], onnx.ModelProto]) -> Candidates:
        """The candidates, of which there may be none.

        Args:
            job: the optimization.
            model: makes the model that the ops before this one have written. That takes time: call it only where there is
                something to look for. It is not to be changed; edit a copy to search in.

        Raises:
            ArgumentError: when options or the plan name what the model does not have.
        """

    @abstractmethod
    def describe(self, job: Job, candidates: Candidates) -> Described:
        """The candidates with their problems: what each asks of kernels, as frozen and hashable values.

        Raises:
            ArgumentError: when the user states of a candidate what cannot be read.
            VerifyError: when that is not so in the graph.
        """

    @abstractmethod
    def decide(self, job: Job, described: Described) -> Decisions:
        """What becomes of each candidate; ``LeftOut`` where options leave the op out.

        The pipeline checks afterwards that options name only what the decisions have as candidates. An op that takes long
        to decide checks its ``job.selections`` before.

        Raises:
            ArgumentError: when options ask for what cannot be.
            ModelError: when the plan replaces what cannot be replaced.
        """

    @abstractmethod
    def emit(self, job: Job, decided: Decided) -> onnx.ModelProto:
        """A copy of the model that the decisions are about, in which the decided candidates are nodes of the op.

        Args:
            job: the optimization.
            decided: decisions that change the model.
        """

    @abstractmethod
    def empty_section(self) -> Section:
        """The op's part of the report where it was left out."""

    def find_earlier_result(self, job: Job) -> Decided | None:
        """What the report and the plan say where the model holds the op already, so that nothing is done; else None."""
        return None

    def check_plan(self, job: Job, candidates: Sequence[NamedCandidate]) -> None:
        """Refuses a plan of another model, which has entries for candidates that this one does not have.

        Raises:
            ArgumentError: naming the entry and the candidates that there are.
        """
        names = {c.name for c in candidates}
        for entry in job.plan.entries.get(self.key, ()) if job.plan is not None else ():
            if entry.name not in names:
                raise ArgumentError(
                    f"the plan has {self.names.kind} {entry.name!r}, which the model does not have: it is of another model "
                    f"or export; {list_candidates(self.names, candidates)}"
                )

    def choice(self, job: Job) -> UserChoice:
        """What the user decides about the op's candidates, which goes before what the op finds out."""
        return UserChoice.of(job.selections[self.key], job.plan, self.key)

    def is_replaced_by_plan(self, job: Job, name: str) -> bool:
        """Whether the plan replaces a candidate. Such a word takes the place of estimates of speed."""
        entry = self.choice(job).entry_of(name)
        return entry is not None and entry.replace

    def site_checks(self, job: Job, decided: Decided) -> SiteChecks | None:
        """Compares the op's nodes with what they replace; None where the comparison of whole models is enough."""
        return None
