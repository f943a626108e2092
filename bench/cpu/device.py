# SPDX-License-Identifier: Apache-2.0
"""The CPU as a device of points: calls in turns, with the machine's rates before and after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.core.candidate import Candidate, Runner, Unavailable
from bench.core.point import PointDevice, TimedTurns
from bench.core.problem import AttentionProblem, PointProblem
from stof.bench import measure
from stof.bench.measure import Timing

_RESERVE = 2 << 30  # bytes of memory that stay free


class CpuDevice(PointDevice[Any, Runner]):
    """Runs candidates with a number of threads. The least time counts.

    Args:
        threads: of each candidate.
        warm: runs before the first that is timed.
    """

    def __init__(self, threads: int, warm: int = 1) -> None:
        self.threads = threads
        self._warm = warm

    def build(self, candidate: Candidate[Any, Any, Runner], problem: PointProblem) -> Runner:
        """Makes a candidate ready, where memory suffices for its scores."""
        if candidate.score_tensors and isinstance(problem, AttentionProblem):
            need = candidate.score_bytes(problem.case) + _RESERVE
            if need > measure.available_bytes():
                raise Unavailable(f"needs {need >> 30} GiB of memory beside the others")
        return candidate.build(problem, self.threads)

    def error(self, built: Runner, problem: PointProblem) -> float:
        """Runs once; the difference from what the problem asks for."""
        return problem.error(built.output())

    def time(self, problem: PointProblem, built: Sequence[Runner], rounds: int) -> TimedTurns:
        """Times runs in turns."""
        del problem
        before = measure.rates(self.threads)
        timings: list[Timing | str] = [*measure.interleave([runner.run for runner in built], rounds, self._warm)]
        rates = measure.best_rates(before, measure.rates(self.threads))
        return TimedTurns(timings, rates, {"machine": {**measure.machine(self.threads), **rates}})

    def seconds(self, timing: Timing) -> float:
        """The least time of the rounds: other load only adds to it."""
        return timing.best

    def figures(self, timing: Timing) -> dict[str, float]:
        """Least, median and greatest time of the rounds."""
        return {
            "us": round(timing.best * 1e6, 1),
            "median_us": round(timing.median * 1e6, 1),
            "worst_us": round(timing.worst * 1e6, 1),
        }
