# SPDX-License-Identifier: Apache-2.0
"""What a decoder runs on: memory at fixed addresses, sessions, runs that are captured, and their times."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np

from bench.core.torch_buffers import TorchBuffers
from bench.cpu.profile import calls_of_runs
from stof.bench import measure, sessions
from stof.bench.measure import Timing

_XQA = "ORT_ENABLE_XQA"  # GroupQueryAttention's kernel for one query
_SLICE = 10e-3  # seconds of captured runs that are timed at once
_MOST_RUNS = 8


class DecoderDevice(Protocol):
    """A device; buffers are arrays of its own kind at addresses that do not change."""

    name: str  # as ONNX Runtime has it

    def normal(self, dims: Sequence[int], dtype: str, seed: int, scale: float = 1.0) -> Any:
        """A buffer of random values."""

    def place(self, array: np.ndarray) -> Any:
        """A buffer with these values."""

    def read(self, buffer: Any) -> np.ndarray:
        """A copy of the values of a buffer, once everything that is queued is done."""

    def address(self, buffer: Any) -> int:
        """Where the buffer lies."""

    def session(self, path: str, *, stof: bool, xqa: bool = True, captures: bool = False) -> Any:
        """A session of a model; ``captures``: its runs may be captured, which some models refuse."""

    def run(self, session: Any, binding: Any, graph: int = 0) -> None:
        """Queues a run; ``graph`` numbers a captured graph, 0: without one."""

    def release(self, session: Any, binding: Any) -> None:
        """Runs once more, and frees what the session holds between runs."""

    def time(self, calls: Sequence[Callable[[], None]], rounds: int) -> list[Timing]:
        """Times calls that queue one run, in turns."""

    def shares(self, path: str, *, stof: bool, bind: Callable[[Any], Any]) -> dict[str, float]:
        """Seconds of the nodes of a warm run, by operator; ``bind`` gives a binding of a session."""

    def read_rate(self) -> float:
        """Bytes a second that a kernel reads at most."""

    def machine(self) -> dict[str, Any]:
        """DecoderDevice, library and versions, for a record."""


class HostDevice:
    """The CPU; buffers are NumPy arrays, and nothing is captured."""

    name = "cpu"

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def normal(self, dims: Sequence[int], dtype: str, seed: int, scale: float = 1.0) -> np.ndarray:
        found = np.random.default_rng(seed).standard_normal(tuple(dims), np.float32) * np.float32(scale)
        return found.astype(dtype)

    def place(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array).copy()

    def read(self, buffer: np.ndarray) -> np.ndarray:
        return buffer.copy()

    def address(self, buffer: np.ndarray) -> int:
        return int(buffer.ctypes.data)

    def session(self, path: str, *, stof: bool, xqa: bool = True, captures: bool = False) -> Any:
        return sessions.session(path, self._threads, stof=stof)

    def run(self, session: Any, binding: Any, graph: int = 0) -> None:
        session.run_with_iobinding(binding)

    def release(self, session: Any, binding: Any) -> None:
        pass

    def time(self, calls: Sequence[Callable[[], None]], rounds: int) -> list[Timing]:
        return measure.interleave(calls, rounds)

    def shares(self, path: str, *, stof: bool, bind: Callable[[Any], Any]) -> dict[str, float]:
        def run(session: Any) -> None:
            session.run_with_iobinding(bind(session))

        runs = calls_of_runs(lambda prefix: sessions.session(path, self._threads, stof=stof, profile=prefix), run)
        return _by_op((call.op, call.seconds) for call in min(runs, key=lambda calls: sum(c.seconds for c in calls)))

    def read_rate(self) -> float:
        return measure.rates(self._threads)["read_gbps"] * 1e9

    def machine(self) -> dict[str, Any]:
        return measure.machine(self._threads)


class CudaDevice(TorchBuffers):
    """A GPU; buffers are torch tensors, work is queued on one stream, and runs of one token replay a captured graph.

    Raises:
        Unavailable: without torch, or without a GPU.
    """

    def __init__(self) -> None:
        from bench.gpu.baselines import onnx_runtime

        super().__init__()
        self._ort = onnx_runtime
        self._options: dict[int, Any] = {}

    def normal(self, dims: Sequence[int], dtype: str, seed: int, scale: float = 1.0) -> Any:
        random = self.torch.Generator(device="cuda").manual_seed(seed)
        kind = getattr(self.torch, dtype)
        found = self.torch.empty(tuple(dims), device="cuda", dtype=kind).normal_(0.0, scale, generator=random)
        self.torch.cuda.synchronize()
        return found

    def session(self, path: str, *, stof: bool, xqa: bool = True, captures: bool = False) -> Any:
        with _environment(_XQA, str(int(xqa))):
            return self._ort.session(path, self.stream, stof=stof, fallback=True, enable_cuda_graph=str(int(captures)))

    def run(self, session: Any, binding: Any, graph: int = 0) -> None:
        session.run_with_iobinding(binding, self._run_options(graph))

    def release(self, session: Any, binding: Any) -> None:
        options = self._new_options(0)
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "gpu:0")
        session.run_with_iobinding(binding, options)
        self.stream.synchronize()

    def time(self, calls: Sequence[Callable[[], None]], rounds: int) -> list[Timing]:
        from bench.gpu.timing import CapturedLaunches, interleave_launches

        def own_graph(run: Callable[[], None]) -> CapturedLaunches:
            found = CapturedLaunches(lambda _: run(), 1, self.stream)
            found.use_own_graph()
            return found

        counts = [max(1, min(_MOST_RUNS, round(_SLICE / own_graph(call).replay()))) for call in calls]
        # Several runs in a row: the host's part of one is hidden behind the one before.
        timed = [own_graph(partial(_repeat, call, count)) for call, count in zip(calls, counts, strict=True)]
        found = interleave_launches(timed, rounds, plain_rounds=0, slow_rounds=rounds)
        return [
            Timing(t.best / n, t.median / n, t.worst / n, t.rounds, 0.0, n) for t, n in zip(found, counts, strict=True)
        ]

    def shares(self, path: str, *, stof: bool, bind: Callable[[Any], Any]) -> dict[str, float]:
        from bench.gpu.trace import trace

        bindings: dict[int, Any] = {}

        def run(session: Any) -> None:
            if id(session) not in bindings:
                bindings[id(session)] = bind(session)
            session.run_with_iobinding(bindings[id(session)], self._run_options(0))
            self.stream.synchronize()

        def made(prefix: str) -> Any:
            return self._ort.session(path, self.stream, stof=stof, fallback=True, profile=prefix)

        return _by_op((node.call.op, node.device_seconds) for node in trace(made, run))

    def read_rate(self) -> float:
        from bench.gpu.timing import read_rate

        found = read_rate(self.stream)
        self.torch.cuda.empty_cache()
        return found

    def machine(self) -> dict[str, Any]:
        from bench.gpu.worker_pool import now, versions
        from stof.runtime.library import build_info

        info = build_info()
        return {
            "device": self.torch.cuda.get_device_name(), "versions": versions(), "library": info["build_id"],
            "compiler": info["compiler"], "date": now(),
        }  # fmt: skip

    def _run_options(self, graph: int) -> Any:
        if graph not in self._options:
            self._options[graph] = self._new_options(graph)
        return self._options[graph]

    def _new_options(self, graph: int) -> Any:
        options = self._ort.unsynchronized_run_options()
        options.add_run_config_entry("gpu_graph_id", str(graph or -1))  # -1: this run captures and replays nothing
        return options


def _repeat(call: Callable[[], None], count: int) -> None:
    for _ in range(count):
        call()


def _by_op(nodes: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for op, seconds in nodes:
        found[op] = found.get(op, 0.0) + seconds
    return found


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
