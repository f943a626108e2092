# SPDX-License-Identifier: Apache-2.0
"""The arena from which a session of ONNX Runtime takes its tensors, and how much of it a run touches.

An allocation takes the smallest free chunk that holds it, of chunks of one size that at the lowest address; a chunk twice as
large is split. Chunks that are free and lie beside each other become one. Where none fits, the arena gets a region of the
next power of two. The system maps each region below the one before. A page counts from the first time that it is written
to: the arena gives nothing back during a run.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

_ALIGNMENT = 256
_FIRST_REGION = 1 << 20
_LARGEST_DOUBLED = 1 << 30  # regions double up to this size
_MOST_DEAD = 128 << 20  # bytes of a chunk that an allocation may leave unused


@dataclass(eq=False)
class ArenaChunk:
    """A part of a region.

    Attributes:
        region: its number, from 0 down: the order of addresses.
        start: where it begins in the region.
        size: in bytes.
        previous: the chunk before it in the region.
        following: the one behind it.
        is_free: whether nothing lies there.
    """

    region: int
    start: int
    size: int
    previous: ArenaChunk | None = None
    following: ArenaChunk | None = None
    is_free: bool = True


@dataclass
class Arena:
    """Places allocations of one run after another.

    Attributes:
        touched: bytes that were written to, in all regions.
    """

    touched: int = 0
    _ends: dict[int, int] = field(default_factory=dict)  # by region: the end of what was written to
    _free: list[tuple[int, ...]] = field(default_factory=list)  # sorted: size, region, start
    _chunks: dict[tuple[int, int], ArenaChunk] = field(default_factory=dict)  # free ones, by region and start
    _next_region: int = _FIRST_REGION

    def allocate(self, size: int) -> ArenaChunk | None:
        """Places an allocation, which is then written to; None where it has no bytes."""
        if size <= 0:
            return None
        rounded = -(-size // _ALIGNMENT) * _ALIGNMENT
        index = bisect.bisect_left(self._free, (rounded,))
        if index == len(self._free):
            self._extend(rounded)
            index = bisect.bisect_left(self._free, (rounded,))
        _, region, start = self._free[index]
        chunk = self._chunks[region, start]
        self._take(chunk)
        if chunk.size >= 2 * rounded or chunk.size - rounded >= _MOST_DEAD:
            self._split(chunk, rounded)
        self._touch(region, start + size)
        return chunk

    def free(self, chunk: ArenaChunk | None) -> None:
        """Gives an allocation back."""
        if chunk is None:
            return
        if (after := chunk.following) is not None and after.is_free:
            self._take(after)
            self._merge(chunk, after)
        if (before := chunk.previous) is not None and before.is_free:
            self._take(before)
            self._merge(before, chunk)
            chunk = before
        self._put(chunk)

    def _extend(self, rounded: int) -> None:
        is_larger = rounded > self._next_region
        while rounded > self._next_region:
            self._next_region *= 2
        region = -len(self._ends)
        self._ends[region] = 0
        self._put(ArenaChunk(region, 0, self._next_region))
        if not is_larger:
            self._next_region = max(self._next_region, min(2 * self._next_region, _LARGEST_DOUBLED))

    def _touch(self, region: int, end: int) -> None:
        """Counts an allocation's bytes. Within a region chunks are split from the front: what lies before was written to."""
        self.touched += max(0, end - self._ends[region])
        self._ends[region] = max(self._ends[region], end)

    def _put(self, chunk: ArenaChunk) -> None:
        chunk.is_free = True
        bisect.insort(self._free, (chunk.size, chunk.region, chunk.start))
        self._chunks[chunk.region, chunk.start] = chunk

    def _take(self, chunk: ArenaChunk) -> None:
        chunk.is_free = False
        del self._free[bisect.bisect_left(self._free, (chunk.size, chunk.region, chunk.start))]
        del self._chunks[chunk.region, chunk.start]

    def _split(self, chunk: ArenaChunk, size: int) -> None:
        rest = ArenaChunk(chunk.region, chunk.start + size, chunk.size - size, chunk, chunk.following)
        if chunk.following is not None:
            chunk.following.previous = rest
        chunk.following, chunk.size = rest, size
        self._put(rest)

    @staticmethod
    def _merge(first: ArenaChunk, second: ArenaChunk) -> None:
        first.size += second.size
        first.following = second.following
        if second.following is not None:
            second.following.previous = first
