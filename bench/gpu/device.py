# SPDX-License-Identifier: Apache-2.0
"""A GPU as a device of points: captured graphs of launches on one stream, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.core.candidate import Candidate
from bench.core.point import PointDevice, TimedTurns, describe_failure
from bench.gpu.device_runner import DeviceRunner
from bench.gpu.problem import GpuProblem
from bench.gpu.timing import CapturedLaunches, interleave_launches
from stof.bench.measure import Timing


class GpuDevice(PointDevice[GpuProblem, DeviceRunner]):
    """Runs candidates on a torch stream. The median time counts: the clock moves both ways.

    Args:
        stream: the torch stream.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def build(self, candidate: Candidate[Any, Any, DeviceRunner], problem: GpuProblem) -> DeviceRunner:
        """Makes a candidate ready on the stream."""
        with problem.torch.cuda.stream(self.stream):
            return candidate.build(problem, self.stream)

    def error(self, built: DeviceRunner, problem: GpuProblem) -> float:
        """Runs once on the first set; the difference from what the candidate computes."""
        with problem.torch.cuda.stream(self.stream):
            built.bind()
            built.call(0)
            self.stream.synchronize()
            return (built.error or problem.error)(built.output())

    def capture(self, built: DeviceRunner, problem: GpuProblem) -> CapturedLaunches:
        """A captured graph of launches over the problem's sets of inputs."""
        built.bind()
        launches = CapturedLaunches(built.call, problem.count, self.stream)
        launches.capture()
        return launches

    def time(self, problem: GpuProblem, built: Sequence[DeviceRunner], rounds: int) -> TimedTurns:
        """Times captured graphs in turns, on inputs that rotate through more than the L2 cache."""
        problem.rotate()
        timings: list[Timing | str] = []
        launches: dict[int, CapturedLaunches] = {}
        with problem.torch.cuda.stream(self.stream):
            for number, runner in enumerate(built):
                try:
                    launches[number] = self.capture(runner, problem)
                    timings.append("")
                except Exception as failure:  # a baseline may allocate or synchronize, each with an error of its own
                    timings.append(f"not captured: {describe_failure(failure)}")
            found = interleave_launches(list(launches.values()), rounds)
        for number, timing in zip(launches, found, strict=True):
            timings[number] = timing
        return TimedTurns(timings, launches=launches)

    def seconds(self, timing: Timing) -> float:
        """The median of the rounds."""
        return timing.median

    def figures(self, timing: Timing) -> dict[str, float]:
        """Times of a launch: of replays, and outside of a graph."""
        return {
            "us": round(timing.median * 1e6, 3),
            "best_us": round(timing.best * 1e6, 3),
            "worst_us": round(timing.worst * 1e6, 3),
            "plain_us": round(timing.plain * 1e6, 2),
            "launches": timing.launches,
        }
