# SPDX-License-Identifier: Apache-2.0
"""Points of texts on a GPU: candidates that take turns, and the time of kernels over that of calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from bench.core.candidate import Candidate, Runner
from bench.core.point import Point, PointDevice, TimedTurns, describe_failure
from bench.core.problem import PointProblem
from bench.gpu.worker_pool import now, versions
from bench.texts.candidates import TextRunner
from bench.texts.cuda_models import choose_capacity
from bench.texts.kernel_time import measure_kernel_time
from bench.texts.lengths import TextWindow
from bench.texts.problem import TextProblem
from bench.texts.runtimes import CudaRuntime
from bench.texts.text_models import TextFiles, TextModel
from stof.bench.measure import Timing, take_turns, time_slice
from stof.bench.results import Record
from stof.runtime.library import build_info

_WARM = 2  # runs before the first that is timed


class CudaTextProblem(TextProblem):
    """Batches of texts on a GPU, where the median time counts, and what a captured graph holds.

    Args:
        model: what is run.
        precision: of it.
        files: of the model.
        window: the texts.
        rows: texts of a batch.
        count: batches that are run, in each order.
        runtime: the GPU.
    """

    def __init__(
        self, model: TextModel, precision: str, files: TextFiles, window: TextWindow, rows: int, count: int,
        runtime: CudaRuntime,
    ) -> None:  # fmt: skip
        super().__init__(model, precision, files, window, rows, count, runtime)
        arrival = self.batches(False)
        self._capacity = choose_capacity(arrival.feeds)
        self._padded_over_capacity = arrival.padded / (self._capacity * count)

    def describe(self, threads: int) -> Record:
        capacity = {"tokens": self._capacity, "padded_over_capacity": round(self._padded_over_capacity, 3)}
        return {**super().describe(threads), "capacity": capacity}

    def seconds(self, timing: Timing) -> float:
        """The median of the rounds: the clock moves both ways."""
        return timing.median

    def compare(self, timings: Mapping[str, Timing]) -> Record:
        """As on a CPU; of captured graphs, the share of padded/capacity, too."""
        found = super().compare(timings)
        own, padded = (timings.get(name) for name in ("stof-captured", "stof-padded-captured"))
        if own is not None and padded is not None:
            share = padded.median / own.median / self._padded_over_capacity
            found["share_of_padded_over_capacity"] = round(share, 3)
        return found


class CudaTextDevice(PointDevice[Any, Runner]):
    """A GPU, on which a run queues its batches and waits for the last one.

    Args:
        runtime: the GPU.
    """

    def __init__(self, runtime: CudaRuntime) -> None:
        self.runtime = runtime

    def build(self, candidate: Candidate[Any, Any, Runner], problem: PointProblem) -> Runner:
        """Loads the candidate's session and captures its graphs."""
        return candidate.build(problem, self.runtime)

    def error(self, built: Runner, problem: PointProblem) -> float:
        """Runs all batches once; the difference from the exported model's outputs."""
        assert isinstance(built, TextRunner)
        return problem.error((built.output(), built.is_sorted))

    def time(self, problem: PointProblem, built: Sequence[Runner], rounds: int) -> TimedTurns:
        """Times runs in turns by the host's clock. The record has the device and the versions."""
        del problem
        samples: list[list[float]] = [[] for _ in built]
        for runner in built:
            for _ in range(_WARM):
                runner.run()
        take_turns(len(built), rounds, lambda i, _: samples[i].append(median(time_slice(built[i].run))))
        return TimedTurns([Timing.of(s) for s in samples], facts={"machine": self._machine()})

    def _machine(self) -> Record:
        info = build_info()
        return {
            "device": self.runtime.torch.cuda.get_device_name(), "versions": {**versions(), "stof": info["version"]},
            "library": info["build_id"], "compiler": info["compiler"], "date": now(),
        }  # fmt: skip

    def seconds(self, timing: Timing) -> float:
        """The median of the rounds."""
        return timing.median

    def figures(self, timing: Timing) -> dict[str, float]:
        """Median, least and greatest time of the rounds."""
        return {
            "us": round(timing.median * 1e6, 1),
            "best_us": round(timing.best * 1e6, 1),
            "worst_us": round(timing.worst * 1e6, 1),
        }


class CudaTextPoint(Point[TextProblem, Runner]):
    """A point whose candidates are profiled, once all of them are timed."""

    def _time_more(self, turns: TimedTurns) -> Record:
        for (candidate, built), timing in zip(self._ready, turns.timings, strict=True):
            if isinstance(timing, Timing):
                self.rows[candidate.name] |= _describe_kernels(built.run, timing.median)
        return {}


def _describe_kernels(run: Callable[[], object], seconds: float) -> Record:
    """What kernels of one call take, and that over the call's time without the profiler: above 1 where kernels overlap."""
    try:
        found = measure_kernel_time(run)
    except Exception as failure:  # a profile is an extra, and the profiler may fail in any way
        return {"kernels_missing": describe_failure(failure)}
    return {
        "kernel_us": round(found.kernel_seconds * 1e6, 1),
        "copy_us": round(found.copy_seconds * 1e6, 1),
        "kernels": found.kernels,
        "kernel_share": round(found.kernel_seconds / seconds, 4),
    }
