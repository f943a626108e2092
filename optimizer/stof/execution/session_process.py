# SPDX-License-Identifier: Apache-2.0
"""Sessions of ONNX Runtime in a child process, which is killed at a time limit or when the caller is interrupted.

ONNX Runtime cannot cancel a run, or the creation of a session, which computes constants: a model may hold an endless Loop.
Each thread that makes a session has a child process of its own. The process waits for requests, and ends with the thread or
with the whole parent, however that one ends.

What ONNX Runtime logs does not reach the terminal: an error that it raises says the same, and a run that succeeds has tried
inputs that the model refuses.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from stof.errors import ArgumentError
from stof.execution.captured_messages import CapturedMessages
from stof.execution.run_limits import MemoryLimit, show_bytes
from stof.execution.session_worker import (
    Body,
    Create,
    Created,
    Failure,
    Measure,
    Request,
    Run,
    SessionSpec,
    TakeSkipCounts,
    Version,
)
from stof.execution.worker.start import Worker, start_worker
from stof.runtime.skip_counts import SkipCounts
from stof.system.memory import PeakMemory, resident_bytes

# Of Windows, as statuses of processes.
_FIRST_EXCEPTION = 0xC0000000
_EXCEPTIONS = {
    0xC0000005: ", an access violation",
    0xC0000017: "; there is too little memory",
    0xC00000FD: ", a stack overflow",
    0xC0000135: ": a DLL is missing",
}


class RuntimeFailure(Exception):
    """ONNX Runtime refuses a model or its inputs, or its process ended: a fact about the model, not a fault of stof's."""


class _SessionProcess:
    """A process that holds sessions of ONNX Runtime.

    Args:
        environment: variables that it has besides those of this process.

    Attributes:
        released_sessions: those to free with the next request, by number.
    """

    def __init__(self, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        if not sys.executable:
            raise ArgumentError("sys.executable is empty: no process for ONNX Runtime can be started from this Python")
        self.owner = os.getpid()
        self.released_sessions: deque[int] = deque()
        self.session_numbers = itertools.count()
        self.messages = CapturedMessages()
        try:
            self.worker = start_worker(environment, self.messages.descriptor)
        except BaseException as error:
            self.messages.close()
            if isinstance(error, OSError):
                raise ArgumentError(f"no process for ONNX Runtime can be started: {error.strerror}") from error
            raise
        self._has_answered = False
        # Called at the end of the thread that it belongs to, or of the whole process.
        self._finalizer = weakref.finalize(self, _kill_process, self.owner, self.worker, self.messages)

    @property
    def is_alive(self) -> bool:
        return self._finalizer.alive and self.owner == os.getpid()

    def end(self) -> None:
        self._finalizer()

    def request(self, body: Body | None, seconds: float | None, memory: int = 0) -> Any:
        """The process's answer to a request. On any error but a refusal, an interrupt for instance, the process is ended.

        Args:
            body: the request.
            seconds: to wait for the answer.
            memory: bytes that both processes may hold meanwhile; 0 is no limit.
        """
        if memory and body is not None and self.released_sessions:
            self.request(None, seconds)  # the memory of earlier sessions is none of this request's
        released = tuple(self.released_sessions.popleft() for _ in range(len(self.released_sessions)))
        if self._has_answered:  # a process that dies at its start may have written its last words by now
            self.messages.clear()
        watch = partial(self._check_memory, PeakMemory(self.worker.popen.pid), memory) if memory else None
        try:
            self.worker.channel.send(Request(released, body))
            answer = self.worker.channel.receive(seconds, watch)
            self._has_answered = True
        except (EOFError, ConnectionError):
            raise RuntimeFailure(f"the process that runs ONNX Runtime {self._describe_end()}") from None
        except TimeoutError:
            self.end()
            raise
        except OSError as error:
            self.end()
            raise RuntimeFailure(
                f"arrays cannot be handed to the process that runs ONNX Runtime: {error.strerror}"
            ) from error
        except BaseException:
            self.end()
            raise
        if isinstance(answer, Failure):
            failure = RuntimeFailure(answer.words)
            if text := self.messages.text():
                failure.add_note(f"ONNX Runtime's messages:\n{text}")  # for STOF_TRACEBACK
            raise failure
        return answer

    def _check_memory(self, sessions: PeakMemory, most: int) -> None:
        """Raises where both processes need more than so many bytes: this one now, that of the sessions at its peak.

        A short run is over before anybody looks, but its peak stays. This process only waits meanwhile.

        Resident memory is what a machine runs out of. Limits of the kernel count address space (RLIMIT_AS, RLIMIT_DATA), of
        which allocators and threads reserve far more than they use.
        """
        if sessions.peak_bytes() + resident_bytes() > most:
            raise MemoryLimit(f"it needs more than {show_bytes(most)} of memory")

    def _describe_end(self) -> str:
        """How the process ended, for a message: its exit status or the signal."""
        try:
            status = self.worker.popen.wait(timeout=10.0)
        except subprocess.TimeoutExpired:  # it closed its end, and hangs
            status = 0
        finally:
            summary = self.messages.summary()
            self.end()
        last = f"; its last message: {summary}" if summary else ""
        return f"{_name_end(status)}{last}"


def _name_end(status: int) -> str:
    """What a status of ``Popen`` says of the end of a process."""
    if sys.platform == "win32" and status >= _FIRST_EXCEPTION:
        return f"ended with exception 0x{status:08X}" + _EXCEPTIONS.get(status, "")
    if status >= 0:
        return f"ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    return f"was ended by {name}" + ("; there may be too little memory" if name == "SIGKILL" else "")


def _kill_process(owner: int, worker: Worker, messages: CapturedMessages) -> None:
    if owner != os.getpid():  # a forked child, which has copies of the descriptors and did not start the process
        worker.disown()
        return
    worker.kill()
    messages.close()


@dataclass(frozen=True)
class TimingLimits:
    """How long models are timed.

    Attributes:
        seconds: after which no further round begins.
        end: seconds after which the process is ended.
        most_rounds: how many rounds there are at most.
        least_rounds: how many there are where the process is not ended before.
    """

    seconds: float
    end: float
    most_rounds: int
    least_rounds: int


class Session:
    """A session in the process of the calling thread.

    Attributes:
        inputs: names.
        outputs: names.
    """

    def __init__(self, process: _SessionProcess, spec: SessionSpec, seconds: float | None, memory: int = 0) -> None:
        self._process = process
        self._number = next(process.session_numbers)
        created = process.request(Create(self._number, spec), seconds, memory)
        assert isinstance(created, Created)
        self.inputs, self.outputs = created.inputs, created.outputs

    @property
    def is_alive(self) -> bool:
        """Whether its process still runs."""
        return self._process.is_alive

    def run(
        self,
        outputs: Sequence[str] | None,
        feeds: Mapping[str, np.ndarray],
        seconds: float | None,
        memory: int = 0,
    ) -> list[Any]:
        """The outputs of these names, by default all.

        Args:
            outputs: names.
            feeds: the inputs by name.
            seconds: that it may take.
            memory: bytes that both processes may hold meanwhile; 0 is no limit.

        Raises:
            RuntimeFailure: what ONNX Runtime raises, or its process ended.
            TimeoutError: when it takes longer.
            MemoryLimit: when it needs more memory.
        """
        if not self._process.is_alive:
            raise RuntimeFailure("the process that runs ONNX Runtime has ended")
        arrays = self._process.request(
            Run(self._number, None if outputs is None else tuple(outputs), dict(feeds)), seconds, memory
        )
        assert isinstance(arrays, list)
        return arrays

    def measure(
        self, others: Sequence[Session], feeds: Mapping[str, np.ndarray], limits: TimingLimits
    ) -> list[list[float]]:
        """Measures this session and others of its process, which run alternately after a warm-up, in seconds.

        Raises:
            RuntimeFailure: what ONNX Runtime raises, or its process ended.
            TimeoutError: when it takes longer than ``limits.end``.
        """
        if any(s._process is not self._process for s in others):
            raise ValueError("sessions of several processes")
        numbers = (self._number, *(s._number for s in others))
        body = Measure(numbers, dict(feeds), limits.seconds, limits.most_rounds, limits.least_rounds)
        times = self._process.request(body, limits.end)
        assert isinstance(times, list)
        return times

    def __del__(self) -> None:
        # The process learns of it with the next request: garbage collection may call this at any moment.
        process = getattr(self, "_process", None)
        if process is not None:
            process.released_sessions.append(self._number)


class _ThreadState(threading.local):
    process: _SessionProcess | None = None
    environment: Mapping[str, str] = MappingProxyType({})


_thread_state = _ThreadState()


def _thread_process() -> _SessionProcess:
    if _thread_state.process is None or not _thread_state.process.is_alive:
        _thread_state.process = _SessionProcess(_thread_state.environment)
    return _thread_state.process


def create_session(spec: SessionSpec, seconds: float | None, memory: int = 0) -> Session:
    """Makes a session.

    Raises:
        RuntimeFailure: what ONNX Runtime raises, or its process ended.
        TimeoutError: when it takes longer than so many seconds; None is no limit.
        MemoryLimit: when both processes hold more than so many bytes; 0 is no limit.
    """
    return Session(_thread_process(), spec, seconds, memory)


@functools.cache  # it is that of this installation
def runtime_version() -> tuple[int, int]:
    """ONNX Runtime's version, its first two numbers.

    Raises:
        RuntimeFailure: when it cannot be imported.
    """
    major, minor = _thread_process().request(Version(), _IMPORT_SECONDS).split(".")[:2]
    return int(major), int(minor)


_IMPORT_SECONDS = 600.0  # of a cold start from a slow disk


def has_onnxruntime() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def release_sessions() -> None:
    """Frees the memory of sessions that are gone at once, rather than with the next request."""
    process = _thread_state.process
    if process is not None and process.is_alive and process.released_sessions:
        with contextlib.suppress(RuntimeFailure, TimeoutError):
            process.request(None, _IMPORT_SECONDS)


def end_process() -> None:
    """Ends the calling thread's process, if it has one."""
    if _thread_state.process is not None:
        _thread_state.process.end()
        _thread_state.process = None


@contextlib.contextmanager
def session_environment(**variables: str) -> Iterator[None]:
    """Sessions that the calling thread makes meanwhile live in a process of their own with these environment variables.

    Libraries read some of them once a process. Sessions that were made before cannot run any more.
    """
    before = _thread_state.environment
    end_process()
    _thread_state.environment = MappingProxyType({**before, **variables})
    try:
        yield
    finally:
        end_process()
        _thread_state.environment = before


def take_skip_counts() -> SkipCounts | None:
    """What attention skipped by score in sessions of the calling thread since the last call; None: nothing counts it.

    Raises:
        RuntimeFailure: where the process ended.
    """
    counts = _thread_process().request(TakeSkipCounts(), _IMPORT_SECONDS)
    assert counts is None or isinstance(counts, SkipCounts)
    return counts
