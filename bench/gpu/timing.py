# SPDX-License-Identifier: Apache-2.0
"""Times launches on the device, in captured graphs of many launches and outside of graphs, in turns."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from bench.core.candidate import require
from stof.bench.measure import Timing, take_turns

ROUNDS = 7
_PLAIN_ROUNDS = 3
_LAUNCHES = 100  # of a kernel below _SHORT in a graph
_SHORT = 50e-6  # seconds
_SLICE = 2e-3  # seconds of work in the graph of a longer kernel
_SLOW = 4e-3  # seconds of a launch from which on a candidate is timed in fewer rounds
_SLOW_ROUNDS = 3
_COVER = 200_000  # cycles that a first kernel spins while the host queues the timed ones


class CapturedLaunches:
    """A candidate's launches as a captured graph on one stream.

    Args:
        call: queues one launch on the i-th set of inputs.
        sets: how many sets of inputs there are.
        stream: the torch stream.
    """

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
        """Warms up and captures a graph; where launches turn out to be short, again with more of them."""
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

    def use_own_graph(self) -> None:
        """Captures nothing, for a call that replays a graph of its own: a replay is one call."""
        for _ in range(3):
            self._estimate = self._plain(1)
        self.launches = 1

    @property
    def slow(self) -> bool:
        """Whether a launch takes so long that it is timed in few rounds."""
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
        return self._elapsed(run) / self.launches

    def _plain(self, launches: int) -> float:
        def run() -> None:
            for _ in range(launches):
                self.call(self._next % self.sets)
                self._next += 1

        return self._elapsed(run, cover=False) / launches

    def plain(self) -> float:
        """Seconds a launch outside of a graph."""
        return self._plain(1 if self.slow else max(3, min(50, math.ceil(_SLICE / 2 / self._estimate))))

    def _elapsed(self, run: Callable[[], object], cover: bool = True) -> float:
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


def interleave_launches(
    candidates: Sequence[CapturedLaunches],
    rounds: int = ROUNDS,
    plain_rounds: int = _PLAIN_ROUNDS,
    slow_rounds: int = _SLOW_ROUNDS,
) -> list[Timing]:
    """Times captured candidates in turns; samples are seconds a launch of a replay.

    Args:
        candidates: captured already.
        rounds: of graph replays.
        plain_rounds: in which launches outside of a graph are timed, too.
        slow_rounds: of candidates that are slow.
    """
    replays: list[list[float]] = [[] for _ in candidates]
    plain: list[list[float]] = [[] for _ in candidates]

    def visit(i: int, number: int) -> None:
        if candidates[i].slow and number >= slow_rounds:
            return
        replays[i].append(candidates[i].replay())
        if number < plain_rounds:
            plain[i].append(candidates[i].plain())

    take_turns(len(candidates), rounds, visit)
    return [Timing.of(r, min(p, default=0.0), c.launches) for r, p, c in zip(replays, plain, candidates, strict=True)]


def empty_launch(stream: Any) -> float:
    """Seconds of an empty kernel in a captured graph of many."""
    torch: Any = require("torch")
    timed = CapturedLaunches(lambda _: torch.cuda._sleep(0), 1, stream)
    timed.capture()
    return interleave_launches([timed])[0].median


def read_rate(stream: Any, size: int = 2 << 30) -> float:
    """Bytes a second of the fastest of three reductions of a large tensor: what a kernel that only reads may reach."""
    torch: Any = require("torch")
    source = torch.empty(size // 4, dtype=torch.float32, device="cuda").normal_()
    rows = source.reshape(-1, 1 << 14)
    candidates = [
        CapturedLaunches(lambda _: torch.sum(source), 1, stream),
        CapturedLaunches(lambda _: torch.amax(rows, 1), 1, stream),
        CapturedLaunches(lambda _: torch.sum(rows, 1), 1, stream),
    ]
    for candidate in candidates:
        candidate.capture()
    return size / min(t.median for t in interleave_launches(candidates))


def copy_rate(stream: Any, size: int = 1 << 30) -> float:
    """Bytes a second, read and written, of the faster of the driver's copy and an element-wise kernel."""
    torch: Any = require("torch")
    source = torch.empty(size // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    candidates = [
        CapturedLaunches(lambda _: target.copy_(source), 1, stream),
        CapturedLaunches(lambda _: torch.bitwise_not(source, out=target), 1, stream),
    ]
    for candidate in candidates:
        candidate.capture()
    return 2 * size / min(t.median for t in interleave_launches(candidates))
