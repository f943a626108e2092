# SPDX-License-Identifier: Apache-2.0
"""Python objects between two processes: arrays travel in shared memory without a name, which goes with its last user."""

from __future__ import annotations

import array
import mmap
import os
import pickle
import select
import socket
import tempfile
import time
from collections.abc import Callable

_ALIGNMENT = 64  # of arrays, as kernels like them
_COUNT = array.array("Q").itemsize
_LOOK = 0.05  # seconds between looks at what the other process does


class Channel:
    """One end of a pair of connected sockets. Only processes of one program use it: what arrives is unpickled."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @staticmethod
    def pair() -> tuple[socket.socket, socket.socket]:
        """The two ends' sockets."""
        return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def close(self) -> None:
        """The other end reads the end of the stream from now on."""
        self._socket.close()

    def send(self, message: object) -> None:
        """Sends an object; its arrays are copied once.

        Raises:
            OSError: when the other end is closed, or no memory is left.
        """
        outside: list[pickle.PickleBuffer] = []
        head = pickle.dumps(message, protocol=5, buffer_callback=outside.append)
        blocks = [memoryview(head), *(b.raw() for b in outside)]
        sizes = array.array("Q", [len(blocks), *(b.nbytes for b in blocks)])
        descriptor = _anonymous_file()
        try:
            with open(descriptor, "wb", closefd=False) as file:
                for block in (memoryview(sizes).cast("B"), *blocks):
                    file.write(block)
                    file.write(bytes(-file.tell() % _ALIGNMENT))
            socket.send_fds(self._socket, [b"m"], [descriptor], socket.MSG_NOSIGNAL)
        finally:
            os.close(descriptor)

    def receive(self, seconds: float | None = None, watch: Callable[[], None] | None = None) -> object:
        """The next object; its arrays lie in the memory that the sender wrote them to.

        Args:
            seconds: to wait; None is no limit.
            watch: called every 50 ms meanwhile, and once when the object is there; what it raises ends the waiting.

        Raises:
            EOFError: when the other end is closed.
            TimeoutError: when nothing has come in this time.
        """
        self._wait(seconds, watch)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except ConnectionError:
            descriptors = []
        if not descriptors:
            raise EOFError("the other process has ended")
        try:
            shared = memoryview(mmap.mmap(descriptors[0], 0))
        finally:
            os.close(descriptors[0])
        (count,) = shared[:_COUNT].cast("Q")
        sizes = shared[_COUNT : _COUNT * (1 + count)].cast("Q").tolist()
        blocks, offset = [], _align(_COUNT * (1 + count))
        for size in sizes:
            blocks.append(shared[offset : offset + size])
            offset = _align(offset + size)
        return pickle.loads(blocks[0], buffers=blocks[1:])

    def _wait(self, seconds: float | None, watch: Callable[[], None] | None) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            # A time in milliseconds has 31 bits.
            seconds_left = None if end is None else min(max(0.0, end - time.monotonic()), 1e6)
            step = seconds_left if watch is None else _LOOK if seconds_left is None else min(seconds_left, _LOOK)
            has_come = bool(poll.poll(None if step is None else 1000 * step))
            if watch is not None:
                watch()
            if has_come:
                return
            if end is not None and time.monotonic() >= end:
                raise TimeoutError(f"it takes longer than {seconds:g} s")


def _align(offset: int) -> int:
    return offset + -offset % _ALIGNMENT


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("stof", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:  # Pythons that were built for old C libraries; the file has no name
        return os.dup(file.fileno())
