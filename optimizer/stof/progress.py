# SPDX-License-Identifier: Apache-2.0
"""How far a command is, on standard error: one line that is written over on a terminal, lines of a log elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stof.errors import shown
from stof.terminal import make_encodable

_EVERY = 0.2  # seconds between changes of a line on a terminal
_LOG_EVERY = 15.0  # seconds between lines of a log; a shorter run writes none
_TERMINAL_EVERY = 1.0  # seconds between changes of a step's line on a terminal

_log: StepLog | None = None  # of the command that runs
_is_quiet = False


class Progress:
    """What a long step is at: writes over its own line on a terminal; elsewhere the lines of a log name it."""

    def __init__(self) -> None:
        self.shown = False
        self.last = 0.0

    def show(self, text: str) -> None:
        """The line from now on; asked too often, not all of them."""
        if _log is not None:
            _log.detail = text
        now = time.monotonic()
        if is_terminal() and not _is_quiet and now - self.last >= _EVERY:
            # A longer line would wrap, and only its last part could be taken away.
            _put(f"{_clear_line()}{shown(text, _width())}")
            self.last, self.shown = now, True

    def close(self) -> None:
        """Takes the line away."""
        if _log is not None:
            _log.detail = ""
        if self.shown:
            _put(_clear_line())
            self.shown = False


class StepLog:
    """Tells which step a run is in: a line when a step ends, and one every 15 s within it.

    A run that is shorter prints nothing; a longer one then begins with the steps that it has passed. On a terminal a single
    line is written over instead, once a second.

    Args:
        program: the name in front of each line.
        is_terminal: whether lines can be written over.
        clock: gives seconds.
    """

    def __init__(self, program: str, is_terminal: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.detail = ""  # what the current step is at
        self._program = program
        self._is_terminal = is_terminal
        self._clock = clock
        self._lock = threading.Lock()
        self._steps: list[tuple[str, float]] = []  # those that have begun, the innermost last, with their start
        self._held: (
            list[str] | None
        ) = []  # lines held back until the command has run for long; None: they are printed at once
        self._is_shown = False

    def begin(self, step: str) -> None:
        """A step begins, perhaps within another one."""
        with self._lock:
            self._steps.append((step, self._clock()))

    def end(self) -> None:
        """The innermost step has ended."""
        with self._lock:
            step, start = self._steps.pop()
            line = f"{self._program}: {step} {self._clock() - start:.1f} s\n"
            if self._held is not None:
                self._held.append(line)
            elif not self._is_terminal:
                _put(line)

    def tick(self) -> None:
        """The interval has passed."""
        with self._lock:
            if not self._steps:
                return
            step, start = self._steps[-1]
            seconds = self._clock() - start
            if self._is_terminal:
                if not self.detail:
                    _put(f"{_clear_line()}{shown(f'{step} {seconds:.0f} s', _width())}")
                    self._is_shown = True
                return
            detail = f": {shown(self.detail)}" if self.detail else ""
            _put(f"{''.join(self._held or ())}{self._program}: {step}, {seconds:.0f} s so far{detail}\n")
            self._held = None

    def close(self) -> None:
        """Takes the line of a terminal away."""
        with self._lock:
            if self._is_shown:
                _put(_clear_line())
                self._is_shown = False


@contextmanager
def step_log(program: str, *, quiet: bool) -> Iterator[None]:
    """Within it, steps are told on standard error, by a thread: native code may keep the main one for long.

    Args:
        program: the name in front of each line.
        quiet: nothing is told, not even on a terminal.
    """
    global _log, _is_quiet
    before = _log, _is_quiet
    if quiet or sys.stderr is None:
        _log, _is_quiet = None, quiet
        try:
            yield
        finally:
            _log, _is_quiet = before
        return
    log = StepLog(program, is_terminal())
    interval = _TERMINAL_EVERY if is_terminal() else _LOG_EVERY
    over = threading.Event()

    def run() -> None:
        while not over.wait(interval):
            log.tick()

    thread = threading.Thread(target=run, daemon=True, name="stof-progress")
    _log, _is_quiet = log, False
    thread.start()
    try:
        yield
    finally:
        _log, _is_quiet = before
        over.set()
        thread.join()
        log.close()


@contextmanager
def step(name: str) -> Iterator[None]:
    """A step of an optimization, for the log of a command. Without such a log it does nothing."""
    log = _log
    if log is None:
        yield
        return
    log.begin(name)
    try:
        yield
    finally:
        log.end()


def is_terminal() -> bool:
    """Whether standard error is one."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


def _width() -> int:
    """Characters of a line that does not wrap."""
    try:
        return max(20, os.get_terminal_size(sys.stderr.fileno()).columns - 1)
    except (OSError, ValueError):
        return 79


def _clear_line() -> str:
    """What takes away the line of a terminal. Not every console of Windows knows the sequence for that."""
    return f"\r{' ' * _width()}\r" if sys.platform == "win32" else "\r\033[K"


def _put(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that is gone, or a closed stream, shows no progress
        sys.stderr.write(make_encodable(text, sys.stderr))
        sys.stderr.flush()
