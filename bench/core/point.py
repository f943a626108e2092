# SPDX-License-Identifier: Apache-2.0
"""A point of a grid on any device: every candidate is built and checked on the same inputs, then all are timed in turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bench.core.candidate import Candidate, Unavailable
from bench.core.problem import PointProblem
from stof.bench.measure import Timing
from stof.bench.results import Record

_TEXT = 200
AnyProblem = TypeVar("AnyProblem", bound=PointProblem)
Built = TypeVar("Built")


def describe_failure(failure: BaseException) -> str:
    """A failure in one line."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:_TEXT]


@dataclass(frozen=True)
class TimedTurns:
    """The times of a point's candidates.

    Attributes:
        timings: of each; a text is why there is none.
        rates: of the machine, by name, where they were measured beside.
        facts: fields of the record that the device knows.
        launches: what was timed of each candidate that has a time, for more turns; a GPU alone has it.
    """

    timings: list[Timing | str]
    rates: dict[str, float] = field(default_factory=dict)
    facts: Record = field(default_factory=dict)
    launches: dict[int, Any] = field(default_factory=dict)


class PointDevice(ABC, Generic[AnyProblem, Built]):
    """Where candidates run, and how they are timed there.

    Attributes:
        threads: of a candidate on a CPU; 0 on a GPU.
    """

    threads = 0

    @abstractmethod
    def build(self, candidate: Candidate[Any, Any, Built], problem: AnyProblem) -> Built:
        """Makes a candidate ready to run.

        Raises:
            Unavailable: when it cannot run.
        """

    @abstractmethod
    def error(self, built: Built, problem: AnyProblem) -> float:
        """Runs a candidate once; the difference of its output from what it is to compute."""

    @abstractmethod
    def time(self, problem: AnyProblem, built: Sequence[Built], rounds: int) -> TimedTurns:
        """Times candidates in turns."""

    @abstractmethod
    def seconds(self, timing: Timing) -> float:
        """The time that counts."""

    @abstractmethod
    def figures(self, timing: Timing) -> dict[str, float]:
        """The times of a candidate as the record has them, in microseconds."""


class Point(Generic[AnyProblem, Built]):
    """A problem with its candidates, built and checked. Those that cannot run, or are wrong, are listed with the reason.

    Args:
        problem: what is asked.
        candidates: what is timed.
        device: where.

    Attributes:
        rows: a row of the record for each candidate, by name.
    """

    def __init__(
        self,
        problem: AnyProblem,
        candidates: Sequence[Candidate[Any, Any, Built]],
        device: PointDevice[AnyProblem, Built],
    ) -> None:
        self.problem = problem
        self.device = device
        self.rows: dict[str, dict[str, Any]] = {}
        self._ready: list[tuple[Candidate[Any, Any, Built], Built]] = []
        for candidate in candidates:
            row: dict[str, Any] = {"label": candidate.label}
            self.rows[candidate.name] = row
            try:
                built = device.build(candidate, problem)
                error = self._check(built, problem, candidate.name)
            except Unavailable as reason:
                row["missing"] = str(reason)
            except Exception as failure:  # baselines raise types of their own; that one refuses is a result, too
                row["missing"] = describe_failure(failure)
            else:
                row |= {} if error is None else {"error": error}
                self._ready.append((candidate, built))

    def _check(self, built: Built, problem: AnyProblem, candidate: str) -> float | None:
        """Runs a candidate once and compares; its error, None where it computes something else.

        Raises:
            Unavailable: when the result is wrong.
        """
        error = self.device.error(built, problem)
        if not problem.is_checked(candidate):
            return None
        if not error <= problem.tolerance_of(candidate):
            raise Unavailable(f"wrong result: differs from {problem.reference} by {error:.1e} of {problem.relative_to}")
        return float(f"{error:.1e}")

    def measure(self, rounds: int) -> Record:
        """Times the candidates. May be called again."""
        turns = self.device.time(self.problem, [built for _, built in self._ready], rounds)
        more = self._time_more(turns)
        timings: dict[str, Timing] = {}
        for (candidate, _), timing in zip(self._ready, turns.timings, strict=True):
            row = self.rows[candidate.name]
            if isinstance(timing, str):
                row["missing"] = timing
                continue
            timings[candidate.name] = timing
            row |= self.device.figures(timing)
            row |= self.problem.figures(candidate.name, self.device.seconds(timing), turns.rates)
        return {
            **self.problem.describe(self.device.threads),
            "rounds": rounds,
            "peers": self.rows,
            **self.problem.compare(timings),
            **turns.facts,
            **more,
        }

    def _time_more(self, turns: TimedTurns) -> Record:
        """Further turns with what was timed; fields of the record."""
        del turns
        return {}


def measure_point(
    problem: AnyProblem,
    candidates: Sequence[Candidate[Any, Any, Built]],
    device: PointDevice[AnyProblem, Built],
    rounds: int,
) -> Record:
    """Checks the candidates of a point on a device and times them in turns; the record of it."""
    return Point(problem, candidates, device).measure(rounds)
