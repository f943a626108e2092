# SPDX-License-Identifier: Apache-2.0
"""A channel of Windows, where sockets carry no files: messages and their arrays go through two pipes."""

from __future__ import annotations

import contextlib
import io
import queue
import threading
from collections.abc import Callable

from stof.execution.worker.channel import POLL_SECONDS, new_memory, pack, unpack, wait_until

_SIZE = 8  # bytes of the size before a message
_MOST = 1 << 26  # bytes of one write
_JOIN_SECONDS = 5.0  # for the reader to see the end of a process that was killed


class PipeChannel:
    """One end of two pipes; the interface is :class:`stof.execution.worker.channel.Channel`.

    A thread reads what arrives: a pipe of Windows cannot be waited for with a limit.

    Args:
        incoming: the pipe that is read.
        outgoing: the pipe that is written.
        when_closed: called by the thread when the other end is closed.
    """

    def __init__(
        self, incoming: io.FileIO, outgoing: io.FileIO, when_closed: Callable[[], None] = lambda: None
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._when_closed = when_closed
        self._messages: queue.SimpleQueue[memoryview | BaseException] = queue.SimpleQueue()
        self._next: memoryview | BaseException | None = None
        self._reader = threading.Thread(target=self._read, daemon=True, name="stof-messages")
        self._reader.start()

    def close(self) -> None:
        """The other end reads the end of the stream from now on. It should have ended: its end closes the pipe that is read."""
        with contextlib.suppress(OSError):
            self._outgoing.close()
        self._reader.join(_JOIN_SECONDS)
        if not self._reader.is_alive():  # to close what another thread reads would wait for it
            with contextlib.suppress(OSError):
                self._incoming.close()

    def send(self, message: object) -> None:
        """Sends an object; its arrays are copied once.

        Raises:
            BrokenPipeError: when the other end is closed.
        """
        size, pieces = pack(message)
        try:
            self._write(memoryview(size.to_bytes(_SIZE, "little")))
            for piece in pieces:
                self._write(memoryview(piece))
        except OSError as error:  # Windows has another number for it
            raise BrokenPipeError("the other process has ended") from error

    def _write(self, data: memoryview) -> None:
        data = data.cast("B") if data.nbytes else data
        while data.nbytes:
            data = data[self._outgoing.write(data[:_MOST]) :]

    def receive(self, seconds: float | None = None, watch: Callable[[], None] | None = None) -> object:
        """The next object, with arrays that it alone has.

        Args:
            seconds: to wait; None is no limit.
            watch: called every 50 ms meanwhile, and once when the object is there; what it raises ends the waiting.

        Raises:
            EOFError: when the other end is closed.
            TimeoutError: when nothing has come in this time.
            MemoryError: when there is none for the object.
        """
        wait_until(self._has_come, seconds, watch)
        arrived, self._next = self._next, None
        if not isinstance(arrived, memoryview):
            self._messages.put(EOFError("the other process has ended"))
            raise arrived or EOFError("the other process has ended")
        return unpack(arrived)

    def _has_come(self, seconds: float | None) -> bool:
        # Ctrl-C does not end a wait of Windows' locks: it is seen between two of them.
        seconds = POLL_SECONDS if seconds is None else min(seconds, POLL_SECONDS)
        if self._next is None:
            with contextlib.suppress(queue.Empty):
                self._next = self._messages.get(timeout=seconds)
        return self._next is not None

    def _read(self) -> None:
        try:
            while True:
                size = int.from_bytes(self._read_block(memoryview(bytearray(_SIZE))), "little")
                self._messages.put(self._read_block(new_memory(size)))
        except (OSError, ValueError, EOFError):  # ValueError: this end is closed
            self._messages.put(EOFError("the other process has ended"))
        except BaseException as error:  # no memory: the caller learns of it
            self._messages.put(error)
        self._when_closed()

    def _read_block(self, block: memoryview) -> memoryview:
        filled = 0
        while filled < block.nbytes:
            count = self._incoming.readinto(block[filled : filled + _MOST])
            if not count:
                raise EOFError("the other process has ended")
            filled += count
        return block
