# SPDX-License-Identifier: Apache-2.0
"""Points in worker processes: all are built and checked at once, on every CPU core; then they are timed one by one.

Compiling FlexAttention takes seconds a point, and only CPU time. A worker keeps what it has built; while a point is timed, all
other workers wait. A worker that dies or hangs takes its own points along and no others.
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

from stof.bench.core.results import Record
from stof.bench.core.runner import Unavailable, require
from stof.bench.gpu.cases import Case, anchor
from stof.terminal import complain

_BUILD_LIMIT = 90.0  # seconds for one point, most of it compiling
_TIME_LIMIT = 40.0
_START_LIMIT = 90.0
_START, _RATES, _ANCHOR = -1, -2, -3  # in the place of a point's number


def _words(failure: BaseException) -> str:
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


@dataclass(frozen=True)
class Plan:
    """What is measured of every point: ``peers`` by name (None: all), rounds, whether every kernel is timed, too."""

    peers: Sequence[str] | None
    rounds: int
    kernels: bool = False


def _worker(channel: Connection, plan: Plan) -> None:
    """Answers (verb, number, case) with (number, answer) until the channel closes."""
    from stof.bench.gpu.candidates import ANCHORS, find
    from stof.bench.gpu.point import Point
    from stof.bench.gpu.timing import copy_rate, empty_launch

    try:
        torch: Any = require("torch")
        torch.set_grad_enabled(False)
        torch.set_num_threads(1)
        stream = torch.cuda.Stream()
    except Exception as failure:
        channel.send((_START, _words(failure)))
        return
    points: dict[int, Point] = {}
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
                    chosen = find(list(plan.peers) if plan.peers else None, case.grid)
                    points[number] = Point(case, chosen, stream, plan.kernels)
                    channel.send((number, time.monotonic() - start))
                case "time":
                    channel.send((number, points[number].measure(plan.rounds)))
                case "anchor":
                    record = Point(case, find(list(ANCHORS), None), stream).measure(plan.rounds)
                    channel.send((number, record))
                case _:
                    facts = {"device": torch.cuda.get_device_name(), "versions": versions()}
                    channel.send((number, {**facts, "launch": empty_launch(stream), "copy": copy_rate(stream)}))
        except Exception as failure:
            channel.send((number, _words(failure)))


def versions() -> dict[str, str]:
    """Of what was really loaded: a package may be there twice."""
    found = {}
    for name in ("torch", "triton", "onnxruntime", "numpy", "onnx"):
        try:
            found[name] = str(require(name).__version__)
        except Exception:
            found[name] = "missing"
    for name in ("flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    torch = require("torch")
    return {**found, "cuda": str(torch.version.cuda), "cudnn": str(torch.backends.cudnn.version())}


Worker = Callable[[Connection, Plan], None]


class _Hand:
    """A worker process and the channel to it."""

    def __init__(self, worker: Worker, plan: Plan, clock: Callable[[], float]) -> None:
        self.channel, other = mp.Pipe()
        self.process = mp.get_context("fork").Process(target=worker, args=(other, plan), daemon=True)
        self.process.start()
        other.close()
        self.busy: int | None = _START
        self.clock = clock
        self.until = clock() + _START_LIMIT

    def ask(self, verb: str, number: int, case: Case | None, limit: float) -> None:
        self.busy = number
        self.until = self.clock() + limit
        try:
            self.channel.send((verb, number, case))
        except OSError:
            self.until = 0.0  # it is gone, which the next look at its channel finds

    def kill(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.channel.close()


class Pool:
    """Workers that build points at once and time them in turns."""

    def __init__(
        self, workers: int, plan: Plan, worker: Worker = _worker, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` gives the seconds after which a worker that does not answer is given up."""
        # Inductor would start compiling processes of its own in every worker.
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        # Imported once, before the workers part; nothing may touch the device before that.
        for package in ("torch", "torch.nn.attention.flex_attention", "onnx", "onnxruntime"):
            try:
                require(package)
            except Exception as reason:
                complain(f"note: {reason}")
        self._clock = clock
        self._hands = [_Hand(worker, plan, clock) for _ in range(workers)]
        self._place: dict[int, _Hand] = {}

    def build(self, cases: Sequence[Case], said: Callable[[str], None]) -> dict[int, str]:
        """Builds and checks all points; gives the reasons of those that failed, by number.

        Raises:
            Unavailable: when no process is left, as on a machine without a GPU.
        """
        # The longest first, so that no process is left with one of them when all others are done.
        waiting = sorted(enumerate(cases), key=lambda item: item[1].S * item[1].T)
        failed: dict[int, str] = {}
        took: dict[int, float] = {}
        failed_start = "none of them answered"
        while waiting or any(h.busy is not None for h in self._hands):
            for hand in self._hands:
                if hand.busy is None and waiting:
                    number, case = waiting.pop()
                    self._place[number] = hand
                    hand.ask("build", number, case, _BUILD_LIMIT)
            for number, answer in self._answers(1.0):
                if number < 0:
                    failed_start = answer or failed_start
                    continue
                if isinstance(answer, str):
                    failed[number] = answer
                else:
                    took[number] = answer
            if not self._hands:
                reasons = list(dict.fromkeys([*failed.values(), failed_start]))
                raise Unavailable(f"no process is left that could measure: {'; '.join(reasons[-3:])}")
        if took:
            longest = max(took, key=lambda n: took[n])
            mean = sum(took.values()) / len(took)
            said(f"building took {mean:.1f} s a point, at most {took[longest]:.1f} s ({cases[longest]})")
        for number in failed:
            said(f"not built: {cases[number]}: {failed[number]}")
        return failed

    def _answers(self, seconds: float) -> list[tuple[int, Any]]:
        """What workers have answered; one that is gone or late is removed and answers with that."""
        found: list[tuple[int, Any]] = []
        ready = wait([h.channel for h in self._hands], seconds)
        for hand in list(self._hands):
            if hand.channel in ready:
                try:
                    number, answer = hand.channel.recv()
                    hand.busy = None
                    found.append((number, answer))
                except (EOFError, OSError):
                    found += self._gone(hand, "the process that ran it ended")
            elif hand.busy is not None and self._clock() > hand.until:
                found += self._gone(hand, "it took too long")
        return found

    def _gone(self, hand: _Hand, reason: str) -> list[tuple[int, Any]]:
        hand.kill()
        self._hands.remove(hand)
        lost = [n for n, h in self._place.items() if h is hand]
        for number in lost:
            del self._place[number]
        if hand.busy is not None and hand.busy not in lost:
            lost.append(hand.busy)
        return [(number, reason) for number in lost]

    def time(self, number: int) -> Record | str:
        """Times a point that was built, as often as it is asked; the reason where that did not work."""
        hand = self._place.get(number)
        if hand is None:
            return "the process that built it is gone"
        found: Record | str = self._one(hand, "time", number, None)
        return found

    def anchors(self, shapes: Sequence[tuple[int, str]]) -> dict[str, Any]:
        """Launch time, copy rate, and the dense problem of each (D, dtype): the ceilings of this machine, now."""
        found: dict[str, Any] = {"rates": self._anyone("rates", _RATES, None), "tiles": {}}
        for D, dtype in shapes:
            found["tiles"][f"D{D} {dtype}"] = self._anyone("anchor", _ANCHOR, anchor(D, dtype))
        return found

    def _anyone(self, verb: str, number: int, case: Case | None) -> Any:
        return self._one(self._hands[0], verb, number, case) if self._hands else "no process is left"

    def _one(self, hand: _Hand, verb: str, number: int, case: Case | None) -> Any:
        hand.ask(verb, number, case, _TIME_LIMIT)
        while hand in self._hands:
            for answered, answer in self._answers(1.0):
                if answered == number:
                    return answer
        return "the process is gone"

    def close(self) -> None:
        """Ends the workers."""
        for hand in self._hands:
            hand.kill()
        self._hands.clear()


def now() -> str:
    """The date of a record."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
