# SPDX-License-Identifier: Apache-2.0
"""Python objects between two processes of one program, with their arrays. What arrives is unpickled.

A message in memory: the number of its blocks and their sizes, as 64-bit integers, then the blocks, each aligned.
"""

from __future__ import annotations

import array
import mmap
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Protocol

_ALIGNMENT = 64  # of arrays, as kernels like them
_COUNT = array.array("Q").itemsize
POLL_SECONDS = 0.05  # between two samples of what the other process does
_LONGEST_WAIT = 1e6  # seconds: a time in milliseconds has 31 bits


class Channel(Protocol):
    """One end of a connection."""

    def send(self, message: object) -> None:
        """Sends an object; its arrays are copied once.

        Raises:
            OSError: when the other end is closed, or no memory is left.
        """

    def receive(self, seconds: float | None = None, watch: Callable[[], None] | None = None) -> object:
        """The next object, with arrays that it alone has.

        Args:
            seconds: to wait; None is no limit.
            watch: called every 50 ms meanwhile, and once when the object is there; what it raises ends the waiting.

        Raises:
            EOFError: when the other end is closed.
            TimeoutError: when nothing has come in this time.
        """

    def close(self) -> None:
        """The other end reads the end of the stream from now on."""


def pack(message: object) -> tuple[int, Iterator[memoryview | bytes]]:
    """The size of a message in memory, and the pieces that make it, arrays where they lie."""
    outside: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=outside.append)
    blocks = [memoryview(head), *(b.raw() for b in outside)]
    sizes = array.array("Q", [len(blocks), *(b.nbytes for b in blocks)])
    parts = [memoryview(sizes).cast("B"), *blocks]

    def pieces() -> Iterator[memoryview | bytes]:
        for part in parts:
            yield part
            yield bytes(-part.nbytes % _ALIGNMENT)

    return sum(_align(part.nbytes) for part in parts), pieces()


def unpack(shared: memoryview) -> object:
    """The object of a message, whose arrays lie in this memory."""
    (count,) = shared[:_COUNT].cast("Q")
    sizes = shared[_COUNT : _COUNT * (1 + count)].cast("Q").tolist()
    blocks, offset = [], _align(_COUNT * (1 + count))
    for size in sizes:
        blocks.append(shared[offset : offset + size])
        offset = _align(offset + size)
    return pickle.loads(blocks[0], buffers=blocks[1:])


def new_memory(size: int) -> memoryview:
    """Aligned memory for a message."""
    return memoryview(mmap.mmap(-1, size))


def wait_until(
    has_come: Callable[[float | None], bool], seconds: float | None, watch: Callable[[], None] | None
) -> None:
    """Waits for a message as :meth:`Channel.receive` says.

    Args:
        has_come: waits for at most so many seconds, or for a shorter step, and says whether it is there.
        seconds: to wait.
        watch: called meanwhile.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        seconds_left = None if end is None else min(max(0.0, end - time.monotonic()), _LONGEST_WAIT)
        step = (
            seconds_left if watch is None else POLL_SECONDS if seconds_left is None else min(seconds_left, POLL_SECONDS)
        )
        is_there = has_come(step)
        if watch is not None:
            watch()
        if is_there:
            return
        if end is not None and time.monotonic() >= end:
            raise TimeoutError(f"it takes longer than {seconds:g} s")


def _align(offset: int) -> int:
    return offset + -offset % _ALIGNMENT
