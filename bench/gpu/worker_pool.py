# SPDX-License-Identifier: Apache-2.0
"""Worker processes that build and check points in parallel, and time them one by one.

Compiling FlexAttention takes seconds of CPU time a point. A worker keeps the points that it has built; while one is timed,
all other workers wait. A worker that dies or hangs loses its own points and no others.
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import importlib.metadata
import multiprocessing as mp
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from bench.core.candidate import Unavailable, require
from bench.core.case import AttentionCase
from bench.gpu.cases import anchor
from stof.bench.results import Record
from stof.terminal import complain

_BUILD_LIMIT = 90.0  # seconds for one point, most of it compiling
_TIME_LIMIT = 40.0
_START_LIMIT = 90.0
_START, _RATES, _ANCHOR = -1, -2, -3  # messages that are about no point


def _words(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


@dataclass(frozen=True)
class PointPlan:
    """What is measured of every point.

    Attributes:
        candidates: by name; None is all.
        rounds: of graph replays.
        kernels: whether every kernel is timed, too.
    """

    candidates: Sequence[str] | None
    rounds: int
    kernels: bool = False


def _worker(channel: Connection, plan: PointPlan) -> None:
    """Answers (verb, number, case) with (number, answer) until the channel closes."""
    from bench.gpu.candidates import ANCHORS, find
    from bench.gpu.point import GpuPoint
    from bench.gpu.timing import copy_rate, empty_launch, read_rate

    try:
        torch: Any = require("torch")
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        stream = torch.cuda.Stream()
    except Exception as failure:  # the process that waits for this one must hear of any failure
        channel.send((_START, _words(failure)))
        return
    points: dict[int, GpuPoint] = {}
    gc.freeze()
    channel.send((_START, None))
    while True:
        try:
            verb, number, case = channel.recv()
        except (EOFError, OSError):
            return
        try:
            match verb:
                case "build":
                    start = time.monotonic()
                    chosen = find(list(plan.candidates) if plan.candidates else None, case.grid)
                    points[number] = GpuPoint(case, chosen, stream, plan.kernels)
                    channel.send((number, time.monotonic() - start))
                case "time":
                    channel.send((number, points[number].measure(plan.rounds)))
                case "anchor":
                    record = GpuPoint(case, find(list(ANCHORS), None), stream).measure(plan.rounds)
                    channel.send((number, record))
                case _:
                    facts = {"device": torch.cuda.get_device_name(), "versions": versions()}
                    rates = {"launch": empty_launch(stream), "copy": copy_rate(stream), "read": read_rate(stream)}
                    channel.send((number, facts | rates))
        except Exception as failure:  # one point's failure is its answer; the process works on
            channel.send((number, _words(failure)))


def versions() -> dict[str, str]:
    """The versions of the packages that are loaded; another version may be installed beside one."""
    found = {}
    for name in ("torch", "triton", "onnxruntime", "numpy", "onnx"):
        try:
            found[name] = str(require(name).__version__)
        except (Unavailable, AttributeError, OSError):  # absent, a folder of that name, or a library that does not load
            found[name] = "missing"
    for name in ("flash-attn-4", "flashinfer-python", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    torch = require("torch")
    return {**found, "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}


Worker = Callable[[Connection, PointPlan], None]


class _WorkerProcess:
    """A worker process and the channel to it."""

    def __init__(self, worker: Worker, plan: PointPlan, clock: Callable[[], float]) -> None:
        self.channel, other = mp.Pipe()
        self.process = mp.get_context("fork").Process(target=worker, args=(other, plan), daemon=True)
        self.process.start()
        other.close()
        self.busy: int | None = _START
        self.clock = clock
        self.until = clock() + _START_LIMIT

    def ask(self, verb: str, number: int, case: AttentionCase | None, limit: float) -> None:
        self.busy = number
        self.until = self.clock() + limit
        try:
            self.channel.send((verb, number, case))
        except OSError:
            self.until = 0.0  # the worker is gone; the next read of its channel reports it

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.channel.close()


class WorkerPool:
    """Workers that build points in parallel and time them one by one."""

    def __init__(
        self, workers: int, plan: PointPlan, worker: Worker = _worker, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` gives seconds, by which a worker that does not answer is given up."""
        # Otherwise Inductor starts compile processes of its own in every worker.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Imported once, before the fork; nothing may touch the device before it.
        for package in ("torch", "torch.nn.attention.flex_attention", "onnx", "onnxruntime"):
            try:
                require(package)
            except (Unavailable, OSError) as reason:  # absent, or a library that does not load
                complain(f"note: {reason}")
        self._clock = clock
        self._processes = [_WorkerProcess(worker, plan, clock) for _ in range(workers)]
        self._owners: dict[int, _WorkerProcess] = {}

    def build(self, cases: Sequence[AttentionCase], report: Callable[[str], None]) -> dict[int, str]:
        """Builds and checks all points; returns the reasons of those that failed, by number.

        Raises:
            Unavailable: when no process is left, as on a machine without a GPU.
        """
        # The longest first, so that none of them is built alone at the end.
        waiting = sorted(enumerate(cases), key=lambda item: item[1].S * item[1].T)
        failed: dict[int, str] = {}
        took: dict[int, float] = {}
        failed_start = "none of them answered"
        while waiting or any(h.busy is not None for h in self._processes):
            for process in self._processes:
                if process.busy is None and waiting:
                    number, case = waiting.pop()
                    self._owners[number] = process
                    process.ask("build", number, case, _BUILD_LIMIT)
            for number, answer in self._answers(1.0):
                if number < 0:
                    failed_start = answer or failed_start
                    continue
                if isinstance(answer, str):
                    failed[number] = answer
                else:
                    took[number] = answer
            if not self._processes:
                reasons = list(dict.fromkeys([*failed.values(), failed_start]))
                raise Unavailable(f"no process is left that could measure: {'; '.join(reasons[-3:])}")
        if took:
            longest = max(took, key=lambda n: took[n])
            mean = sum(took.values()) / len(took)
            report(f"building took {mean:.1f} s a point, at most {took[longest]:.1f} s ({cases[longest]})")
        for number in failed:
            report(f"not built: {cases[number]}: {failed[number]}")
        return failed

    def _answers(self, seconds: float) -> list[tuple[int, Any]]:
        """The answers of workers; a worker that is gone or late is removed, and that is its answer."""
        found: list[tuple[int, Any]] = []
        ready = wait([h.channel for h in self._processes], seconds)
        for process in list(self._processes):
            if process.channel in ready:
                try:
                    number, answer = process.channel.recv()
                    process.busy = None
                    found.append((number, answer))
                except (EOFError, OSError):
                    found += self._gone(process, "the process that ran it ended")
            elif process.busy is not None and self._clock() > process.until:
                found += self._gone(process, "it took too long")
        return found

    def _gone(self, process: _WorkerProcess, reason: str) -> list[tuple[int, Any]]:
        process.kill()
        self._processes.remove(process)
        lost = [n for n, h in self._owners.items() if h is process]
        for number in lost:
            del self._owners[number]
        if process.busy is not None and process.busy not in lost:
            lost.append(process.busy)
        return [(number, reason) for number in lost]

    def time(self, number: int) -> Record | str:
        """Times a point that was built; may be called again. Returns the reason where that failed."""
        process = self._owners.get(number)
        if process is None:
            return "the process that built it is gone"
        found: Record | str = self._one(process, "time", number, None)
        return found

    def anchors(self, shapes: Sequence[tuple[int, str]]) -> dict[str, Any]:
        """Launch time, copy and read rates, and the dense problem of each (D, dtype): the current ceilings of the machine."""
        found: dict[str, Any] = {"rates": self._anyone("rates", _RATES, None), "tiles": {}}
        for D, dtype in shapes:
            found["tiles"][f"D{D} {dtype}"] = self._anyone("anchor", _ANCHOR, anchor(D, dtype))
        return found

    def _anyone(self, verb: str, number: int, case: AttentionCase | None) -> Any:
        return self._one(self._processes[0], verb, number, case) if self._processes else "no process is left"

    def _one(self, process: _WorkerProcess, verb: str, number: int, case: AttentionCase | None) -> Any:
        process.ask(verb, number, case, _TIME_LIMIT)
        while process in self._processes:
            for answered, answer in self._answers(1.0):
                if answered == number:
                    return answer
        return "the process is gone"

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.kill()
        self._processes.clear()


def now() -> str:
    """The date of a record."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
