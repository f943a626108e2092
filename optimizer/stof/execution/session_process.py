# SPDX-License-Identifier: Apache-2.0
"""Sessions of ONNX Runtime in a process of their own, which ends when a limit of time is reached or the caller is interrupted.

A run of ONNX Runtime and the creation of a session, which computes constants, cannot be ended from within: a model may hold
an endless Loop. The process is started when it is needed, one for each thread that asks, and waits for the next request
between. It ends with the thread or the whole process, however that one ends.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stof.errors import ArgumentError
from stof.execution.channel import Channel
from stof.execution.session_worker import Create, Created, Failure, Request, Run, SessionSpec, Version

# The first argument is no path: the folder that Python puts first with -c is not looked into before it is gone.
_START = (
    "import sys; connection, parent = map(int, sys.argv[1:3]); sys.path[:] = sys.argv[3:]; "
    "from stof.execution.session_worker import main; main(connection, parent)"
)


class RuntimeFailure(Exception):
    """ONNX Runtime refuses a model or its inputs, or its process ended: a fact about the model, not a fault of stof's."""


class _Process:
    """A process that holds sessions."""

    def __init__(self) -> None:
        if not sys.executable:
            raise ArgumentError("sys.executable is empty: no process for ONNX Runtime can be started from this Python")
        self.owner = os.getpid()
        self.released: deque[int] = deque()
        self.numbers = itertools.count()
        own, other = Channel.pair()
        read, write = os.pipe()
        try:
            command = [sys.executable, "-c", _START, str(other.fileno()), str(read), *map(str, sys.path)]
            # A session of the operating system's: what a terminal sends goes to the caller, who then ends this process.
            popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(other.fileno(), read),
                start_new_session=True,
            )
        except BaseException as error:
            own.close()
            os.close(write)
            if isinstance(error, OSError):
                raise ArgumentError(f"no process for ONNX Runtime can be started: {error.strerror}") from error
            raise
        finally:
            other.close()
            os.close(read)
        self.popen = popen
        self.channel = Channel(own)
        # At the end of the thread that it belongs to, or of the whole process.
        self._end = weakref.finalize(self, _end, self.owner, popen, own, write)

    @property
    def alive(self) -> bool:
        return self._end.alive and self.owner == os.getpid()

    def end(self) -> None:
        self._end()

    def ask(self, body: Create | Run | Version | None, seconds: float | None) -> Any:
        """The answer; whatever else comes, an interrupt for instance, leaves no process."""
        released = tuple(self.released.popleft() for _ in range(len(self.released)))
        try:
            self.channel.send(Request(released, body))
            answer = self.channel.receive(seconds)
        except (EOFError, ConnectionError):
            raise RuntimeFailure(f"the process that runs ONNX Runtime {self._ended()}") from None
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
            raise RuntimeFailure(answer.words)
        return answer

    def _ended(self) -> str:
        """How it ended, in words."""
        try:
            status = self.popen.wait(timeout=10.0)
        except subprocess.TimeoutExpired:  # it closed its end, and hangs
            status = 0
        finally:
            self.end()
        if status >= 0:
            return f"ended with status {status}"
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        return f"was ended by {name}" + ("; there may be too little memory" if name == "SIGKILL" else "")


def _end(owner: int, popen: subprocess.Popen[bytes], connection: Any, lifeline: int) -> None:
    if owner != os.getpid():  # a forked child, which has copies of the descriptors and did not start the process
        popen.returncode = 0
        return
    popen.kill()
    connection.close()
    os.close(lifeline)
    popen.wait()


class Session:
    """A session in the process of the calling thread.

    Attributes:
        inputs: names.
        outputs: names.
    """

    def __init__(self, process: _Process, spec: SessionSpec, seconds: float | None) -> None:
        self._process = process
        self._number = next(process.numbers)
        created = process.ask(Create(self._number, spec), seconds)
        assert isinstance(created, Created)
        self.inputs, self.outputs = created.inputs, created.outputs

    def run(self, outputs: Sequence[str] | None, feeds: Mapping[str, np.ndarray], seconds: float | None) -> list[Any]:
        """The outputs of these names, by default all.

        Raises:
            RuntimeFailure: what ONNX Runtime raises, or its process ended.
            TimeoutError: when it takes longer.
        """
        if not self._process.alive:
            raise RuntimeFailure("the process that runs ONNX Runtime has ended")
        found = self._process.ask(Run(self._number, None if outputs is None else tuple(outputs), dict(feeds)), seconds)
        assert isinstance(found, list)
        return found

    def __del__(self) -> None:
        # Told with the next request: this may be called at any moment.
        process = getattr(self, "_process", None)
        if process is not None:
            process.released.append(self._number)


class _Own(threading.local):
    process: _Process | None = None


_own = _Own()


def _process() -> _Process:
    if _own.process is None or not _own.process.alive:
        _own.process = _Process()
    return _own.process


def create_session(spec: SessionSpec, seconds: float | None) -> Session:
    """Makes a session.

    Raises:
        RuntimeFailure: what ONNX Runtime raises, or its process ended.
        TimeoutError: when it takes longer than so many seconds; None is no limit.
    """
    return Session(_process(), spec, seconds)


def runtime_version() -> tuple[int, int]:
    """ONNX Runtime's version, its first two numbers.

    Raises:
        RuntimeFailure: when it cannot be imported.
    """
    major, minor = _process().ask(Version(), _IMPORT_SECONDS).split(".")[:2]
    return int(major), int(minor)


_IMPORT_SECONDS = 600.0  # of a cold start from a slow disk


def has_onnxruntime() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


def release_sessions() -> None:
    """Frees what sessions that are gone have held, without waiting for the next one."""
    process = _own.process
    if process is not None and process.alive and process.released:
        with contextlib.suppress(RuntimeFailure, TimeoutError):
            process.ask(None, _IMPORT_SECONDS)


def end_process() -> None:
    """Ends the calling thread's process, if it has one."""
    if _own.process is not None:
        _own.process.end()
        _own.process = None
