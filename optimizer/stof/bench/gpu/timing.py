# SPDX-License-Identifier: Apache-2.0
"""Times on the device: captured graphs of many launches and plain launches, in turns."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from stof.bench.core.runner import require

ROUNDS = 7
_PLAIN_ROUNDS = 3
_LAUNCHES = 100  # in a graph of kernels below _SHORT
_SHORT = 50e-6
_SLICE = 2e-3  # seconds of work in the graph of a longer kernel
_SLOW = 4e-3  # seconds; such a candidate is timed in fewer rounds
_SLOW_ROUNDS = 3
_COVER = 200_000  # cycles that a first kernel spins while the host queues what is timed


@dataclass(frozen=True)
class Timing:
    """Seconds a launch: median, least and greatest of the rounds of graph replays, and the least of plain launches."""

    median: float
    best: float
    worst: float
    plain: float
    launches: int


class Timed:
    """A candidate that queues its work on one stream; ``call(i)`` takes the i-th set of inputs."""

    def __init__(self, call: Callable[[int], Any], sets: int, stream: Any) -> None:
        self._torch: Any = require("torch")
        self.call = call
        self.sets = sets
        self.stream = stream
        self.graph: Any = None
        self.launches = 0
        self._estimate = 0.0
        self._next = 0

    def capture(self) -> None:
        """Warms up and captures; a graph whose launches turn out to be short is captured again with more of them."""
        self._plain(1)
        self._estimate = self._plain(1)
        if not self.slow:
            self._plain(2)
            self._estimate = self._plain(4)
        self._capture(max(min(self.sets, 8), math.ceil(_SLICE / self._estimate)))
        found = self.replay()
        if found < _SHORT and self.launches < _LAUNCHES:
            self._capture(_LAUNCHES)
            self.replay()

    def launch_by_itself(self) -> None:
        """For a call that launches a graph of its own: a replay is one call."""
        for _ in range(3):
            self._estimate = self._plain(1)
        self.launches = 1

    @property
    def slow(self) -> bool:
        """Whether one launch takes so long that few have to do."""
        return self._estimate > _SLOW

    def _capture(self, launches: int) -> None:
        torch = self._torch
        self.launches = min(_LAUNCHES, launches)
        self.graph = None
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(), which collects garbage and empties caches each time.
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for i in range(self.launches):
                    self.call(i % self.sets)
            finally:
                graph.capture_end()
        self.graph = graph

    def replay(self) -> float:
        """Seconds a launch of one replay."""
        run = (lambda: self.call(0)) if self.graph is None else self.graph.replay
        return self._between(run) / self.launches

    def _plain(self, launches: int) -> float:
        def run() -> None:
            for _ in range(launches):
                self.call(self._next % self.sets)
                self._next += 1

        return self._between(run, cover=False) / launches

    def plain(self) -> float:
        """Seconds a launch when the host queues each of them."""
        return self._plain(1 if self.slow else max(3, min(50, math.ceil(_SLICE / 2 / self._estimate))))

    def _between(self, run: Callable[[], object], cover: bool = True) -> float:
        torch = self._torch
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self.stream):
            if cover:
                torch.cuda._sleep(_COVER)
            begin.record(self.stream)
            run()
            end.record(self.stream)
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def interleave(
    candidates: Sequence[Timed],
    rounds: int = ROUNDS,
    plain_rounds: int = _PLAIN_ROUNDS,
    slow_rounds: int = _SLOW_ROUNDS,
) -> list[Timing]:
    """Times captured candidates in turns, in an order that rotates with every round.

    Without rounds of plain launches, those take no time.
    """
    replays: list[list[float]] = [[] for _ in candidates]
    plain: list[list[float]] = [[] for _ in candidates]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for i in range(len(candidates)):
                j = (i + number) % len(candidates)
                if candidates[j].slow and number >= slow_rounds:
                    continue
                replays[j].append(candidates[j].replay())
                if number < plain_rounds:
                    plain[j].append(candidates[j].plain())
    finally:
        gc.enable()
    return [
        Timing(median(r), min(r), max(r), min(p, default=0.0), c.launches)
        for r, p, c in zip(replays, plain, candidates, strict=True)
    ]


def empty_launch(stream: Any) -> float:
    """Seconds that a kernel without work takes in a graph of many."""
    torch: Any = require("torch")
    timed = Timed(lambda _: torch.cuda._sleep(0), 1, stream)
    timed.capture()
    return interleave([timed])[0].median


def copy_rate(stream: Any, size: int = 1 << 30) -> float:
    """Bytes a second, read and written, within device memory: the better of the driver's copy and an element-wise kernel."""
    torch: Any = require("torch")
    source = torch.empty(size // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    candidates = [
        Timed(lambda _: target.copy_(source), 1, stream),
        Timed(lambda _: torch.bitwise_not(source, out=target), 1, stream),
    ]
    for candidate in candidates:
        candidate.capture()
    return 2 * size / min(t.median for t in interleave(candidates))
