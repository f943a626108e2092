# SPDX-License-Identifier: Apache-2.0
"""A channel of Linux and macOS: arrays travel in shared memory without a name, which goes with its last user."""

from __future__ import annotations

import sys

if sys.platform != "win32":
    import mmap
    import os
    import select
    import socket
    import tempfile
    from collections.abc import Callable

    from stof.execution.worker.channel import pack, unpack, wait_until

    # Python ignores the signal of a closed socket; programs that embed it may not, and macOS has no such flag.
    _NO_SIGNAL: int = getattr(socket, "MSG_NOSIGNAL", 0)

    class SocketChannel:
        """One end of a pair of connected sockets; the interface is :class:`stof.execution.worker.channel.Channel`."""

        def __init__(self, connection: socket.socket) -> None:
            self._socket = connection

        @staticmethod
        def pair() -> tuple[socket.socket, socket.socket]:
            """The two ends' sockets. A message is one byte with a descriptor: a stream keeps them apart, too."""
            return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)

        def close(self) -> None:
            """The other end reads the end of the stream from now on."""
            self._socket.close()

        def send(self, message: object) -> None:
            """Sends an object; its arrays are copied once.

            Raises:
                OSError: when the other end is closed, or no memory is left.
            """
            _, pieces = pack(message)
            descriptor = _anonymous_file()
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    file.writelines(pieces)
                socket.send_fds(self._socket, [b"m"], [descriptor], _NO_SIGNAL)
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
            wait_until(self._has_come, seconds, watch)
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
            return unpack(shared)

        def _has_come(self, seconds: float | None) -> bool:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(None if seconds is None else 1000 * seconds))

    def _anonymous_file() -> int:
        if sys.platform == "linux" and hasattr(os, "memfd_create"):
            return os.memfd_create("stof", os.MFD_CLOEXEC)
        # macOS, and Pythons that were built for old C libraries; the file has no name.
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())
