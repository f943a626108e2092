# SPDX-License-Identifier: Apache-2.0
"""How a command ends at SIGINT, SIGTERM and SIGHUP, on Windows Ctrl-Break: within about a second, with nothing left behind.

Only commands use this. Within somebody else's program stof installs no handlers: what the program's own ones raise,
KeyboardInterrupt for instance, cleans up on its way out.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from stof.terminal import complain

if sys.platform == "win32":  # where a closed console sends SIGBREAK, as Ctrl-Break does
    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGBREAK)
else:
    _SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS = 1.0  # for the main thread to end by itself
_POLL_SECONDS = 0.05  # between two readings of the clock while it has not
_NEVER = float("inf")


class Interrupted(KeyboardInterrupt):
    """One of the signals came."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status, as shells have it."""
        return 128 + self.number

    def __str__(self) -> str:
        return f"interrupted by {signal.Signals(self.number).name}"


def report_interrupt(program: str, interrupt: KeyboardInterrupt) -> int:
    """Writes a command's last line, and gives its exit status."""
    interrupted = interrupt if isinstance(interrupt, Interrupted) else Interrupted(signal.SIGINT)
    complain(f"{program}: {interrupted}")
    return interrupted.status


class _Watch:
    """Raises in the main thread at a signal; a thread ends the process where that has no effect in time."""

    def __init__(self, program: str, clean_up: Callable[[], None]) -> None:
        self.program = program
        self.clean_up = clean_up
        self.raises = True  # the next signal does; a further one must not cut the cleaning up short
        self.patient = False  # a first SIGINT has time
        self.pending = 0  # the signal that is not dealt with
        self.count = 0  # of signals since then
        self.since = _NEVER  # when it came, or was raised
        self.lock = threading.Lock()
        # Sockets, since Windows waits for no pipes.
        self.signals, self.wakeup = socket.socketpair()
        self.stop, self.stopping = socket.socketpair()
        for end in (self.signals, self.wakeup):
            end.setblocking(False)
        self.thread = threading.Thread(target=self._run, daemon=True, name="stof-signals")

    def close(self) -> None:
        self.stopping.close()
        self.thread.join()
        for end in (self.signals, self.wakeup, self.stop):
            end.close()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.raises:
            self.raises = False
            self.since = time.monotonic()  # what hid the signal before has ended: cleaning up has time of its own
            raise Interrupted(number)

    def resume(self) -> None:
        """What came is dealt with."""
        with self.lock:
            self._read_signals()
            self.pending, self.count, self.since = 0, 0, _NEVER
            self.raises = True

    def _read_signals(self) -> list[int]:
        with contextlib.suppress(BlockingIOError):
            return [n for n in self.signals.recv(64) if n in _SIGNALS]
        return []

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self.signals, self.stop], [], [], _POLL_SECONDS if self.pending else None)
            if self.stop in ready:
                return
            with self.lock:
                came = self._read_signals()
                if came and not self.pending:
                    self.pending = came[0]
                    self.since = min(self.since, time.monotonic())
                self.count += len(came)
                patient = self.patient and self.pending == signal.SIGINT and self.count == 1
                over = self.pending and not patient and time.monotonic() >= self.since + _SECONDS
                number = self.pending if over else 0
            if number:
                self._end(number)

    def _end(self, number: int) -> None:
        with contextlib.suppress(BaseException):
            self.clean_up()
        with contextlib.suppress(OSError):
            os.write(2, f"{self.program}: {Interrupted(number)}\n".encode())
        os._exit(Interrupted(number).status)


_watches: list[_Watch] = []


@contextmanager
def end_by_signals(program: str, clean_up: Callable[[], None], *, last: bool) -> Iterator[None]:
    """Raises :class:`Interrupted` in the main thread at the first signal; a thread ends the process where that has no effect.

    The interpreter looks for signals between its own instructions: code in C that takes long hides them. The thread then
    cleans up in the main thread's place.

    Args:
        program: its name, for the message.
        clean_up: removes what the process has not finished; it may be called from another thread.
        last: the process ends afterwards, and ignores signals from then on, of which it would say no more than a traceback.
    """
    if threading.current_thread() is not threading.main_thread():  # no other one may set handlers
        yield
        return
    watch = _Watch(program, clean_up)
    hook = sys.unraisablehook
    # Signals that the process was started to ignore, by nohup for instance, stay ignored.
    previous = {number: signal.getsignal(number) for number in _SIGNALS}
    handlers = {number: handler for number, handler in previous.items() if handler not in (signal.SIG_IGN, None)}
    watch.thread.start()
    before = signal.set_wakeup_fd(watch.wakeup.fileno(), warn_on_full_buffer=False)
    _watches.append(watch)
    sys.unraisablehook = _ignore_interrupts(hook)
    try:
        for number in handlers:
            signal.signal(number, watch.handle)
        yield
    except KeyboardInterrupt:
        watch.raises = False
        clean_up()
        raise
    finally:
        watch.raises = False
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_IGN if last else handler)
        signal.set_wakeup_fd(before)
        sys.unraisablehook = hook
        _watches.remove(watch)
        watch.close()


def _ignore_interrupts(hook: Callable[[sys.UnraisableHookArgs], object]) -> Callable[[sys.UnraisableHookArgs], object]:
    """Interrupts that come within destructors and callbacks cannot be raised; the watch ends the process then."""
    return lambda unraisable: None if isinstance(unraisable.exc_value, Interrupted) else hook(unraisable)


@contextmanager
def keeping_results() -> Iterator[None]:
    """Within it the caller deals with a first SIGINT by :func:`resume`, however long that takes."""
    for watch in _watches:
        watch.patient = True
    try:
        yield
    finally:
        for watch in _watches:
            with watch.lock:
                watch.patient = False
                watch.since = time.monotonic() if watch.pending else _NEVER


def resume(interrupt: KeyboardInterrupt) -> bool:
    """Whether work may go on after an interrupt: any signal but SIGINT asks the process to end.

    Later signals are handled as if there had been none.
    """
    if isinstance(interrupt, Interrupted):
        if interrupt.number != signal.SIGINT:
            return False
        for watch in _watches:
            watch.resume()
    return True
