# SPDX-License-Identifier: Apache-2.0
"""Runs of the original without graph optimizations: its outputs in each case, and the tensors at every site."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stof.errors import ArgumentError
from stof.execution.case import Case, Counts, Padding
from stof.execution.ort_sessions import VerifiedSession
from stof.execution.run_failure import parse_failure
from stof.execution.run_limits import LimitReached
from stof.execution.session_process import RuntimeFailure
from stof.verification.model_inputs import BATCH_WITH_ALL_PADDING
from stof.verification.result import SkippedCase, Verification
from stof.verification.verified_models import VerifiedModels

if TYPE_CHECKING:
    from stof.verification.verifier import Verifier

_RUNS = 3  # of each case: here, with graph optimizations, and optimized
_SHARE = 0.5  # of all time, after which the runs of the original are over


class CaseSession:
    """A session that is made when it is needed, and again after a limit has ended the process that held it."""

    def __init__(self, make: Callable[[], VerifiedSession]) -> None:
        self._make = make
        self._session: VerifiedSession | None = None

    def get(self) -> VerifiedSession:
        """The session.

        Raises:
            RuntimeFailure: what ONNX Runtime raises.
            LimitReached: when that takes too long, or too much memory.
        """
        if self._session is None or not self._session.is_alive:
            self._session = None
            self._session = self._make()
        return self._session

    def run(
        self, outputs: Sequence[str] | None, feeds: Mapping[str, np.ndarray], until: float | None = None
    ) -> list[np.ndarray]:
        """As a session runs."""
        return self.get().run(outputs, feeds, until)


@dataclass(frozen=True)
class ReferenceRuns:
    """What the original computes.

    Attributes:
        ran: the cases that ran, by number.
        feeds: the inputs of each of them.
        plain: the outputs of each of them.
        captured: inputs and tensors at the sites of the first one; empty where none of the tensors could be had.
    """

    ran: list[int]
    feeds: list[dict[str, np.ndarray]]
    plain: list[list[np.ndarray]]
    captured: Mapping[str, np.ndarray]


def run_reference(verifier: Verifier, models: VerifiedModels, result: Verification) -> ReferenceRuns:
    """Runs the cases for which there is time, the first and the last one always.

    Raises:
        RuntimeFailure: when the original cannot be loaded.
        InputsRefusedError: when no case runs.
        ArgumentError: when inputs that the user gives do not run.
        LimitReached: when none runs in time, or in the memory that there is.
    """
    return _Reference(verifier, models, result).run()


class _Reference:
    def __init__(self, verifier: Verifier, models: VerifiedModels, result: Verification) -> None:
        self.verifier = verifier
        self.limits = verifier.limits
        self.models = models
        self.result = result
        self.feeds = models.feeds
        own = [s.checks for s in verifier.sites if s.checks.working is verifier.inputs.working]
        self.wanted = list(dict.fromkeys(t for checks in own for t in checks.tensors()))
        self.outputs = [o.name for o in verifier.original.graph.output]
        self.captured: dict[str, np.ndarray] = {}
        self.seconds_per_byte = 0.0
        self.has_loaded = False

    def run(self) -> ReferenceRuns:
        is_probed = self.models.probed is self.models.reference
        session = CaseSession(self._make_probe)
        limit: LimitReached | None = None
        if not is_probed:  # sites inside fused nodes are seen in the working copy alone
            try:
                self._capture(session, 0, self.limits.first_end)
            except LimitReached as error:
                limit = error
            session = CaseSession(self._make_reference)
        ran: list[int] = []
        plain: list[list[np.ndarray]] = []
        failure: RuntimeFailure | None = None
        refused = 0
        for i in range(len(self.verifier.cases)):
            if (self.limits.is_over() and limit is not None) or not self._is_affordable(i):
                self._skip(i, "time")
                continue
            try:
                has_drawn = any(not self.verifier.cases[r].given for r in ran)
                plain.append(self._run_redrawn(session, i, may_redraw=not has_drawn))
            except RuntimeFailure as error:  # stored masks limit the length from above, computed ones from below
                if failure is None:
                    failure, refused = error, i
                continue
            except LimitReached as error:
                limit = limit or error
                self._skip(i, error.kind)
                continue
            ran.append(i)
        if not ran and (failure or limit) is not None:
            raise limit or self._explain(refused, failure)
        return ReferenceRuns(ran, [self.feeds[i] for i in ran], plain, self.captured)

    def _make_probe(self) -> VerifiedSession:
        model = self.models.with_outputs(self.models.probed, self.wanted)
        return self.models.sessions.make(model, optimized=False, library=False)

    def _make_reference(self) -> VerifiedSession:
        return self.models.sessions.make(self.models.reference, optimized=False, library=False)

    def _skip(self, i: int, reason: str) -> None:
        self.result.complete = False
        self.result.skipped.append(SkippedCase(str(self.verifier.inputs.name_sizes(self.verifier.cases[i])), reason))

    def _is_affordable(self, i: int) -> bool:
        case = self.verifier.cases[i]
        seconds = self._seconds(case)
        if i in (0, len(self.feeds) - 1) or case.padding is Padding.LEAST:
            # It runs anyway, but with a row alone where all of them would not end in time.
            if case.batch > 1 and time.monotonic() + seconds > self.limits.end:
                self._draw(i, replace(case, batch=1))
            return True
        return time.monotonic() + seconds <= self.limits.deadline

    def _seconds(self, case: Case) -> float:
        """What all runs of a case take, going by the first one."""
        return _RUNS * self.seconds_per_byte * self.verifier.plan.estimate(case).total

    def _draw(self, i: int, case: Case) -> None:
        """Puts another case in the place of one."""
        self.verifier.cases[i] = case
        drawn = self.verifier.inputs.draw([case])[0]
        self.feeds[i] = {n: x.astype(self.feeds[i][n].dtype) for n, x in drawn.items()}

    def _run_redrawn(self, session: CaseSession, i: int, may_redraw: bool) -> list[np.ndarray]:
        """The outputs of a case, which is drawn otherwise as long as the original refuses its inputs."""
        session.get()
        self.has_loaded = True
        while True:
            try:
                return self._run_case(session, i)
            except RuntimeFailure as error:
                case = self.verifier.cases[i]
                if case.given:
                    raise ArgumentError(f"inputs {case.given}: the model does not run on them: {error}") from error
                inputs, model = self.verifier.inputs, self.models.reference
                may_redraw = may_redraw and not self.limits.is_over()
                if not may_redraw or not inputs.narrow(model, str(error), case, self.feeds[i]):
                    raise
                for later in range(i, len(self.feeds)):
                    self._draw(later, inputs.restate(self.verifier.cases[later]))

    def _explain(self, i: int, failure: RuntimeFailure | None) -> Exception:
        """The error for a case that does not run."""
        assert failure is not None
        if not self.has_loaded or not parse_failure(str(failure)).is_of_inputs:
            return failure
        return self.verifier.inputs.explain_refusal(self.verifier.cases[i], self.feeds[i], str(failure))

    def _run_case(self, session: CaseSession, i: int) -> list[np.ndarray]:
        until = self.limits.moment(_SHARE) if self.seconds_per_byte else self.limits.first_end
        # The last and shortest case may still run where the first one took too long.
        until = max(until, time.monotonic() + 0.1 * self.limits.total)
        session.get()  # what that takes is no time of the case
        start = time.monotonic()
        is_first = not self.captured and self.models.probed is self.models.reference
        if is_first:
            everything = self._capture(session, i, until)
            found = [everything[n] for n in self.outputs]
        else:
            found = self._run_with_keys(session, i, until)
        seconds = time.monotonic() - start
        if is_first or not self.seconds_per_byte:
            self.seconds_per_byte = seconds / max(1, self.verifier.plan.estimate(self.verifier.cases[i]).total)
        # What is left of the budget also pays for the two other runs of what ran already.
        self.limits.deadline -= (_RUNS - 1) * seconds
        return found

    def _capture(self, session: CaseSession, i: int, until: float) -> dict[str, np.ndarray]:
        """All outputs of a case, with the tensors at sites among them, which are kept."""
        names = list(session.get().outputs)
        everything = dict(zip(names, session.run(names, self.feeds[i], until), strict=True))
        self.captured = {**self.feeds[i], **{n: everything[n] for n in self.wanted if n in everything}}
        return everything

    def _run_with_keys(self, session: CaseSession, i: int, until: float) -> list[np.ndarray]:
        """The outputs of a case; where the original does not run without any key, of one with keys in its place."""
        try:
            return session.run(self.outputs, self.feeds[i], until)
        except RuntimeFailure:
            case = self.verifier.cases[i]
            if case.batch != BATCH_WITH_ALL_PADDING:
                raise
            self._draw(i, replace(case, batch=2, counts=Counts.USUAL))
            return session.run(self.outputs, self.feeds[i], until)
