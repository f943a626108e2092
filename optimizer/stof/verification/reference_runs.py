# SPDX-License-Identifier: Apache-2.0
"""Runs of the original without graph optimizations: its outputs in each case, and the tensors at every site.

How many cases run is decided by what the first run takes: a case is begun where its three runs fit into what is left, and
those that ran keep the time that they need. Where a run is ended whose time depends on the numbers of inputs, smaller ones
are drawn (execution/reduce_inputs.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from stof.errors import ArgumentError
from stof.execution.case import Case, Counts, Padding
from stof.execution.ort_sessions import VerifiedSession
from stof.execution.run_failure import parse_failure
from stof.execution.run_limits import RUNS, LimitReached, TimeLimit
from stof.execution.session_process import RuntimeFailure
from stof.verification.model_inputs import BATCH_WITH_ALL_PADDING
from stof.verification.result import SkippedCase, Verification
from stof.verification.verified_models import VerifiedModels

if TYPE_CHECKING:
    from stof.verification.verifier import Verifier

_USUAL = 0.15  # of all time, that the first run may take where smaller numbers make it shorter
_QUICK = 0.02  # of all time: after a run that takes no longer, larger numbers are tried
_ALIKE = 0.5  # a case that is expected to take this share of one that was ended is not begun
_AT_LEAST = 0.25  # of the time that a case is expected to take, which has to be left for it
_LAST_SECONDS = 0.25  # that the last case may take in any case


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
        seconds: that each of them took.
        load_seconds: that it took to load the model.
    """

    ran: list[int]
    feeds: list[dict[str, np.ndarray]]
    plain: list[list[np.ndarray]]
    captured: Mapping[str, np.ndarray]
    seconds: list[float]
    load_seconds: float


def run_reference(verifier: Verifier, models: VerifiedModels, result: Verification) -> ReferenceRuns:
    """Runs the cases for which there is time, the first one always.

    Raises:
        RuntimeFailure: when the original cannot be loaded.
        InputsRefusedError: when no case runs.
        ArgumentError: when inputs that the user gives do not run.
        LimitReached: when none runs in time, or in the memory that there is.
    """
    return _Reference(verifier, models, result).run()


# Runs a case, whose number is given, until a moment, and gives its outputs.
_RunCase = Callable[[int, float], list[np.ndarray]]


class _Reference:
    def __init__(self, verifier: Verifier, models: VerifiedModels, result: Verification) -> None:
        self.verifier = verifier
        self.limits = verifier.limits
        self.models = models
        self.result = result
        self.feeds = models.feeds
        checks_of_model = [s.checks for s in verifier.sites if s.checks.working is verifier.inputs.working]
        self.wanted = list(dict.fromkeys(t for checks in checks_of_model for t in checks.tensors()))
        self.outputs = verifier.output_names
        self.captured: dict[str, np.ndarray] = {}
        self.captured_case: int | None = None
        self.seconds: dict[int, float] = {}  # of the cases that ran
        self.ended: list[int] = []  # those that were ended for their time
        self.load_seconds = 0.0
        self.has_loaded = False

    def run(self) -> ReferenceRuns:
        is_probed = self.models.probed is self.models.reference
        limit: LimitReached | None = None
        if not is_probed:  # sites inside fused nodes are seen in the working copy alone
            try:
                self._search(0, partial(self._capture, CaseSession(self._make_probe)))
            except LimitReached as error:
                limit = error
        session = CaseSession(self._make_probe if is_probed else self._make_reference)
        run = partial(self._run_case, session)
        plain: dict[int, list[np.ndarray]] = {}
        failure: RuntimeFailure | None = None
        refused = 0
        for i in range(len(self.verifier.cases)):
            if (self.limits.is_over() and limit is not None) or not self._is_affordable(i):
                self._skip(i, "time")
                continue
            try:
                self._load(session)
                has_drawn = any(not self.verifier.cases[r].source for r in plain)
                plain[i] = self._run_redrawn(i, run, may_redraw=not has_drawn)
                self._refuse_empty(self.verifier.cases[i], plain[i])
            except RuntimeFailure as error:  # stored masks limit the length from above, computed ones from below
                if failure is None:
                    failure, refused = error, i
                continue
            except LimitReached as error:
                limit = error if limit is None or error.seconds > limit.seconds else limit
                self.ended += [i] if isinstance(error, TimeLimit) else []
                self._skip(i, error.kind)
                continue
        if not plain and (failure or limit) is not None:
            raise limit or self._explain(refused, failure)
        self.result.reduced_inputs = dict(self.verifier.inputs.maker.magnitudes)
        ran = sorted(plain)
        return ReferenceRuns(
            ran,
            [self.feeds[i] for i in ran],
            [plain[i] for i in ran],
            self.captured,
            [self.seconds[i] for i in ran],
            self.load_seconds,
        )

    def _refuse_empty(self, case: Case, outputs: Sequence[np.ndarray]) -> None:
        """Refuses given inputs on which no output has an element, as in a batch of 0: any two models would agree on them."""
        if case.source and outputs and not any(array.size for array in outputs):
            name, array = self.outputs[0], outputs[0]
            raise ArgumentError(
                f"inputs {case.source}: every output is empty (output {name!r} has the shape {list(array.shape)}): there is "
                "nothing to compare; give inputs with a batch and lengths of at least 1"
            )

    def _make_probe(self) -> VerifiedSession:
        model = self.models.with_outputs(self.models.probed, self.wanted)
        return self.models.sessions.make(model, optimized=False, library=False)

    def _make_reference(self) -> VerifiedSession:
        return self.models.sessions.make(self.models.reference, optimized=False, library=False)

    def _load(self, session: CaseSession) -> None:
        """Loads the model where that is to be done: what it takes is no time of a case."""
        start = time.monotonic()
        session.get()
        self.load_seconds = max(self.load_seconds, time.monotonic() - start)
        self.has_loaded = True

    def _skip(self, i: int, reason: str) -> None:
        self.result.complete = False
        self.result.skipped.append(SkippedCase(str(self.verifier.inputs.name_sizes(self.verifier.cases[i])), reason))

    def _sum_reserved_seconds(self, without: int | None = None) -> float:
        """Seconds that are left for two more runs of the cases that ran, but for one, and for loading the models."""
        run_seconds = sum(seconds for i, seconds in self.seconds.items() if i != without)
        return (RUNS - 1) * (run_seconds + self.load_seconds)

    def _noise_seconds(self) -> float:
        """Seconds for a run of the first case with noise, which tells rounding from faults; 0 where these are not left."""
        first = next(iter(self.seconds.values()), 0.0)
        return first if time.monotonic() + self._sum_reserved_seconds() + first <= self.limits.end else 0.0

    def _is_affordable(self, i: int) -> bool:
        case = self.verifier.cases[i]
        seconds = self._expected_seconds(case)
        if i in (0, len(self.feeds) - 1) or case.padding is Padding.LEAST:
            # It runs where there is some time, with a row alone where all of them would not end in it.
            if case.batch > 1 and time.monotonic() + RUNS * seconds > self.limits.end:
                self._draw(i, replace(case, batch=1))
                seconds = self._expected_seconds(self.verifier.cases[i])
            seconds_left = self._end_of_case() - time.monotonic()
            return not self.seconds or seconds_left >= max(min(_LAST_SECONDS, seconds), _AT_LEAST * seconds)
        size = self.verifier.plan.estimate(case).total
        if any(size >= _ALIKE * self.verifier.plan.estimate(self.verifier.cases[n]).total for n in self.ended):
            return False
        return time.monotonic() + RUNS * seconds + (RUNS - 1) * sum(self.seconds.values()) <= self.limits.deadline

    def _expected_seconds(self, case: Case) -> float:
        """What a run of a case takes, going by the first one; 0 where none ran."""
        for i, seconds in self.seconds.items():
            whole = self.verifier.plan.estimate(self.verifier.cases[i]).total
            return seconds * self.verifier.plan.estimate(case).total / max(1, whole)
        return 0.0

    def _end_of_case(self) -> float:
        """The moment at which a run has to be over that begins now."""
        if not self.seconds:
            return self.limits.first_end
        return self.limits.end_of_case(self._sum_reserved_seconds() + self._noise_seconds())

    def _draw(self, i: int, case: Case) -> None:
        """Puts another case in the place of one."""
        self.verifier.cases[i] = case
        drawn = self.verifier.inputs.draw([case])[0]
        self.feeds[i] = {n: x.astype(self.feeds[i][n].dtype) for n, x in drawn.items()}

    def _draw_from(self, i: int) -> None:
        """Draws a case and those after it anew, as inputs are drawn by now."""
        for later in range(i, len(self.feeds)):
            self._draw(later, self.verifier.inputs.restate(self.verifier.cases[later]))

    def _run_redrawn(self, i: int, run: _RunCase, may_redraw: bool) -> list[np.ndarray]:
        """The outputs of a case, which is drawn otherwise as long as the original refuses its inputs."""
        while True:
            try:
                return self._search(i, run) if may_redraw else run(i, self._end_of_case())
            except RuntimeFailure as error:
                case = self.verifier.cases[i]
                if case.source:
                    empty = [f"{n!r} has the shape {list(x.shape)}" for n, x in self.feeds[i].items() if not x.size]
                    why = f" (without elements: {', '.join(empty)})" if empty else ""
                    raise ArgumentError(
                        f"inputs {case.source}: the model does not run on them{why}: {error}"
                    ) from error
                inputs, model = self.verifier.inputs, self.models.reference
                may_redraw = may_redraw and not self.limits.is_over()
                is_narrowed = may_redraw and inputs.narrow(model, str(error), case, self.feeds[i])
                if is_narrowed or inputs.shorten(case):
                    self._draw_from(i)
                elif may_redraw and inputs.reducer.can_reduce:  # a length that is no number, say
                    return self._run_smaller(i, run, error)
                else:
                    raise

    def _search(self, i: int, run: _RunCase) -> list[np.ndarray]:
        """The outputs of a case, with smaller numbers where those decide how long it takes, and it takes too long."""
        reducer = self.verifier.inputs.reducer
        if self.verifier.cases[i].source or not reducer.can_reduce:
            return run(i, self._end_of_case())
        try:
            return run(i, min(self._end_of_case(), self._end_of_trial()))
        except LimitReached as error:
            return self._run_smaller(i, run, error)
        except RuntimeFailure as error:
            if not parse_failure(str(error)).is_of_memory:
                raise
            return self._run_smaller(i, run, error)

    def _run_smaller(self, i: int, run: _RunCase, ended: LimitReached | RuntimeFailure) -> list[np.ndarray]:
        """The outputs of a case on the largest numbers that are found to run in time, where larger ones do not."""
        reducer = self.verifier.inputs.reducer
        self.limits.extend(self.limits.last_end - time.monotonic())
        for trials in reducer.search(self.feeds[i]):
            best: tuple[Mapping[str, float], list[np.ndarray]] | None = None
            for factors in trials:
                self._reduce(i, factors)
                until = self.limits.end_of_case(self._sum_reserved_seconds(without=i))
                start = time.monotonic()
                try:
                    best = factors, run(i, until if best is None else min(until, self._end_of_trial()))
                except RuntimeFailure:  # a length of 0, say
                    continue
                except LimitReached as error:
                    ended = error if isinstance(ended, LimitReached) and error.seconds > ended.seconds else ended
                    break
                if time.monotonic() - start > _QUICK * self.limits.total:
                    break
            if best is not None:
                self._reduce(i, best[0])
                return best[1]
        self._reduce(i, {})
        raise reducer.explain(ended) if isinstance(ended, LimitReached) else ended

    def _end_of_trial(self) -> float:
        """The moment at which a run has to be over where smaller numbers make it shorter."""
        return time.monotonic() + max(_USUAL * self.limits.total, _LAST_SECONDS)

    def _reduce(self, i: int, factors: Mapping[str, float]) -> None:
        """Draws a case and those after it with numbers that are smaller by some factors."""
        self.verifier.inputs.reducer.apply(factors)
        self._draw_from(i)

    def _explain(self, i: int, failure: RuntimeFailure | None) -> Exception:
        """The error for a case that does not run."""
        assert failure is not None
        if not self.has_loaded or not parse_failure(str(failure)).is_of_inputs:
            return failure
        return self.verifier.inputs.explain_refusal(self.verifier.cases[i], self.feeds[i], str(failure))

    def _run_case(self, session: CaseSession, i: int, until: float) -> list[np.ndarray]:
        session.get()  # again, where a limit has ended it
        start = time.monotonic()
        if self.captured_case in (None, i) and self.models.probed is self.models.reference:
            arrays = self._capture(session, i, until)
        else:
            arrays = self._run_with_keys(session, i, until)
        self.seconds[i] = time.monotonic() - start
        if len(self.seconds) == 1:
            self.limits.extend(self._sum_reserved_seconds() + self.seconds[i])
        return arrays

    def _capture(self, session: CaseSession, i: int, until: float) -> list[np.ndarray]:
        """The outputs of a case; the tensors at sites are kept."""
        names = list(session.get().outputs)
        everything = dict(zip(names, session.run(names, self.feeds[i], until), strict=True))
        self.captured_case = i
        self.captured = {**self.feeds[i], **{n: everything[n] for n in self.wanted if n in everything}}
        return [everything[n] for n in self.outputs]

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
