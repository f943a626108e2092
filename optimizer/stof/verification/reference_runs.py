# SPDX-License-Identifier: Apache-2.0
"""Runs of the original without graph optimizations: its outputs in each case, and the tensors at every site."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from stof.execution.case import Counts, Padding
from stof.execution.ort_sessions import VerifiedSession
from stof.execution.session_process import RuntimeFailure
from stof.verification.model_inputs import BATCH_WITH_ALL_PADDING
from stof.verification.result import Verification
from stof.verification.verified_models import VerifiedModels

if TYPE_CHECKING:
    from stof.verification.verifier import Verifier

_RUNS = 3  # of each case: here, with graph optimizations, and optimized


@dataclass(frozen=True)
class ReferenceRuns:
    """What the original computes.

    Attributes:
        ran: the cases that ran, by number.
        feeds: the inputs of each of them.
        plain: the outputs of each of them.
        captured: inputs and tensors at the sites of the first one.
    """

    ran: list[int]
    feeds: list[dict[str, np.ndarray]]
    plain: list[list[np.ndarray]]
    captured: Mapping[str, np.ndarray]


def run_reference(verifier: Verifier, models: VerifiedModels, result: Verification) -> ReferenceRuns:
    """Runs the cases for which there is time, the first and the last one always.

    Raises:
        RuntimeFailure: when no case runs.
    """
    return _Reference(verifier, models, result).run()


class _Reference:
    def __init__(self, verifier: Verifier, models: VerifiedModels, result: Verification) -> None:
        self.verifier = verifier
        self.models = models
        self.result = result
        self.feeds = models.feeds
        own = [s.checks for s in verifier.sites if s.checks.working is verifier.inputs.working]
        self.wanted = list(dict.fromkeys(t for checks in own for t in checks.tensors()))
        self.outputs = [o.name for o in verifier.original.graph.output]
        self.captured: dict[str, np.ndarray] = {}
        self.seconds_per_token = 0.0

    def run(self) -> ReferenceRuns:
        model = self.models.with_outputs(self.models.probed, self.wanted)
        session = self.models.sessions.make(model, optimized=False, library=False)
        del model
        if (
            self.models.probed is not self.models.reference
        ):  # sites inside fused nodes are seen in the working copy alone
            self._capture(session, 0)
            session = self.models.sessions.make(self.models.reference, optimized=False, library=False)
        ran: list[int] = []
        plain: list[list[np.ndarray]] = []
        failure: RuntimeFailure | None = None
        for i in range(len(self.verifier.cases)):
            if not self._is_affordable(i):
                self.result.complete = False
                continue
            try:
                plain.append(self._run_case(session, i))
            except RuntimeFailure as error:  # stored masks limit the length from above, computed ones from below
                failure = failure or error
                continue
            ran.append(i)
        if failure is not None and not ran:
            raise failure
        return ReferenceRuns(ran, [self.feeds[i] for i in ran], plain, self.captured)

    def _is_affordable(self, i: int) -> bool:
        case = self.verifier.cases[i]
        if i in (0, len(self.feeds) - 1) or case.padding is Padding.LEAST:
            return True
        seconds = _RUNS * self.seconds_per_token * case.batch * case.length
        return time.monotonic() + seconds <= self.verifier.deadline

    def _run_case(self, session: VerifiedSession, i: int) -> list[np.ndarray]:
        case = self.verifier.cases[i]
        start = time.monotonic()
        is_first = not self.captured and self.models.probed is self.models.reference
        if is_first:
            everything = self._capture(session, i)
            found = [everything[n] for n in self.outputs]
        else:
            found = self._run_with_keys(session, i)
        seconds = time.monotonic() - start
        if is_first or not self.seconds_per_token:
            self.seconds_per_token = seconds / (case.batch * case.length)
        # What is left of the budget also pays for the two other runs of what ran already.
        self.verifier.deadline -= (_RUNS - 1) * seconds
        return found

    def _capture(self, session: VerifiedSession, i: int) -> dict[str, np.ndarray]:
        """All outputs of a case, with the tensors at sites among them, which are kept."""
        names = list(session.outputs)
        everything = dict(zip(names, session.run(names, self.feeds[i]), strict=True))
        self.captured = {**self.feeds[i], **{n: everything[n] for n in self.wanted if n in everything}}
        return everything

    def _run_with_keys(self, session: VerifiedSession, i: int) -> list[np.ndarray]:
        """The outputs of a case; where the original does not run without any key, of one with keys in its place."""
        found: list[np.ndarray]
        try:
            found = session.run(self.outputs, self.feeds[i])
        except RuntimeFailure:
            cases = self.verifier.cases
            if cases[i].batch != BATCH_WITH_ALL_PADDING:
                raise
            cases[i] = replace(cases[i], batch=2, counts=Counts.USUAL)
            drawn = self.verifier.inputs.draw([cases[i]])[0]
            self.feeds[i] = {n: x.astype(self.feeds[i][n].dtype) for n, x in drawn.items()}
            found = session.run(self.outputs, self.feeds[i])
        return found
