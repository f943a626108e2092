# SPDX-License-Identifier: Apache-2.0
"""How a command ends at SIGINT, SIGTERM and SIGHUP: within about a second, with nothing left behind.

Only commands use this. Within a program of somebody else's, stof installs no handlers: what the program raises from its own,
KeyboardInterrupt for instance, cleans up on its way out.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SECONDS = 1.0  # for the main thread to end by itself


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


class _State:
    """What the main thread and the watcher share."""

    def __init__(self, program: str, clean_up: Callable[[], None]) -> None:
        self.program = program
        self.clean_up = clean_up
        self.raises = True  # the next signal does; a further one must not cut the cleaning up short
        self.resumed = 0  # how often work went on after a signal
        self.patient = False  # a first SIGINT has time

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.raises:
            self.raises = False
            raise Interrupted(number)


_states: list[_State] = []


@contextmanager
def ended_by_signals(program: str, clean_up: Callable[[], None]) -> Iterator[None]:
    """Raises :class:`Interrupted` in the main thread at the first signal; a thread ends the process where that has no effect.

    The interpreter looks for signals between its own instructions: code in C that takes long hides them. The thread then
    cleans up in the main thread's place.

    Args:
        program: its name, for the message.
        clean_up: removes what the process has not finished; it is called from another thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    state = _State(program, clean_up)
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    stop_read, stop_write = os.pipe2(os.O_CLOEXEC)
    watcher = threading.Thread(target=_watch, args=(state, read, stop_read), daemon=True, name="stof-signals")
    hook = sys.unraisablehook
    # Signals that the process was started to ignore, by nohup for instance, stay ignored.
    handlers = {n: signal.getsignal(n) for n in _SIGNALS}
    handlers = {n: h for n, h in handlers.items() if h not in (signal.SIG_IGN, None)}
    watcher.start()
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    _states.append(state)
    sys.unraisablehook = _quiet(hook)
    try:
        for number in handlers:
            signal.signal(number, state.handle)
        yield
    finally:
        state.raises = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.close(stop_write)
        watcher.join()
        sys.unraisablehook = hook
        _states.remove(state)
        signal.set_wakeup_fd(before)
        for descriptor in (read, write, stop_read):
            os.close(descriptor)


def _quiet(hook: Callable[[sys.UnraisableHookArgs], object]) -> Callable[[sys.UnraisableHookArgs], object]:
    """Interrupts that come within destructors and callbacks cannot be raised; the watcher ends the process then."""
    return lambda found: None if isinstance(found.exc_value, Interrupted) else hook(found)


@contextmanager
def keeps_results() -> Iterator[None]:
    """Within it a first SIGINT is dealt with by the caller, however long that takes; see :func:`resume`."""
    state = _states[-1] if _states else None
    if state is None:
        yield
        return
    state.patient = True
    try:
        yield
    finally:
        state.patient = False


def resume(interrupt: KeyboardInterrupt) -> bool:
    """Whether the work may go on after an interrupt: only SIGINT asks to be dealt with, others to end.

    Later signals are handled as if there had been none.
    """
    if isinstance(interrupt, Interrupted):
        if interrupt.number != signal.SIGINT:
            return False
        for state in _states:
            state.resumed += 1
            state.raises = True
    return True


def _watch(state: _State, signals: int, stop: int) -> None:
    """Waits for signals; ends the process when the main thread does not deal with one in time."""
    first, resumed, deadline = 0, 0, float("inf")
    while True:
        ready, _, _ = select.select([signals, stop], [], [], _LOOK if first else None)
        if stop in ready:
            return
        if first and state.resumed != resumed:
            first = 0
        if signals in ready:
            numbers = [n for n in os.read(signals, 64) if n in _SIGNALS]
            if numbers:
                waits = state.patient and not first and numbers == [signal.SIGINT]
                first = first or numbers[0]
                resumed = state.resumed if not first else resumed
                deadline = float("inf") if waits else min(deadline, time.monotonic() + _SECONDS)
        if first and time.monotonic() >= deadline:
            _end(state, first)


def _end(state: _State, number: int) -> None:
    with contextlib.suppress(BaseException):
        state.clean_up()
    with contextlib.suppress(OSError):
        os.write(2, f"{state.program}: {Interrupted(number)}\n".encode())
    os._exit(Interrupted(number).status)
