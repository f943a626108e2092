# SPDX-License-Identifier: Apache-2.0
"""The space of fusion schemes: the operators of a region in order, cut into segments.

The encoding is that of STOF (PPoPP '26, section 7): one bit for each operator; equal neighbors belong to one segment.
Complementing all bits gives the same scheme, so that the first bit is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

MOST_COMPUTE_BOUND = 2  # compute-bound operators of a segment

Segment = tuple[int, int]  # the first operator, and the one behind the last
FusionScheme = tuple[Segment, ...]
Setting = tuple[int, ...]  # one value for each parameter of a kernel


def encode(scheme: FusionScheme) -> int:
    """A scheme's bits, the lowest bit for the first operator."""
    bits = 0
    for number, (start, end) in enumerate(scheme):
        if number % 2:
            bits |= ((1 << (end - start)) - 1) << start
    return bits


def decode(bits: int, count: int) -> FusionScheme:
    """The scheme of ``count`` operators that has these bits.

    Raises:
        ValueError: for bits beyond the operators, or with the first one set.
    """
    if count < 1 or bits & 1 or bits >> count:
        raise ValueError(f"{bits:#x} encodes no scheme of {count} operators")
    values = [bits >> i & 1 for i in range(count)]
    cuts = [0, *(i for i in range(1, count) if values[i] != values[i - 1]), count]
    return tuple(itertools.pairwise(cuts))


def unfused_scheme(count: int) -> FusionScheme:
    """The scheme in which every operator is a segment, which is always valid."""
    return tuple((i, i + 1) for i in range(count))


def fused_segments(scheme: FusionScheme, fused_alone: Collection[Segment]) -> tuple[Segment, ...]:
    """The segments of a scheme that become one operator: those of several, and those of ``fused_alone``."""
    return tuple(s for s in scheme if s[1] - s[0] > 1 or s in fused_alone)


@dataclass(frozen=True)
class SchemeSpace:
    """The schemes of a region.

    Args:
        kinds: for each operator, "C" (compute-bound: MatMul, Gemm) or "M" (memory-bound).
        available: whether one kernel can compute a segment of two or more operators. Asked once for each segment.
        settings: the values of each parameter of a segment's kernel; a segment of one operator has none.
    """

    kinds: str
    available: Callable[[Segment], bool]
    settings: Callable[[Segment], tuple[tuple[int, ...], ...]] = lambda _: ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_valid", lru_cache(maxsize=None)(self._check_segment))

    def is_valid(self, segment: Segment) -> bool:
        """Whether a scheme may hold a segment."""
        return bool(self._valid(segment))  # type: ignore[attr-defined]

    def _check_segment(self, segment: Segment) -> bool:
        start, end = segment
        if end - start == 1:
            return True
        return self.compute_bound_count(segment) <= MOST_COMPUTE_BOUND and self.available(segment)

    def compute_bound_count(self, segment: Segment) -> int:
        """How many operators of a segment are compute-bound."""
        return self.kinds[segment[0] : segment[1]].count("C")

    def settings_of(self, segment: Segment) -> list[Setting]:
        """Every setting of a segment's kernel."""
        if segment[1] - segment[0] == 1:
            return [()]
        return list(itertools.product(*self.settings(segment)))

    def schemes(self) -> Iterator[FusionScheme]:
        """Every valid scheme; there may be very many."""

        def rest(start: int) -> Iterator[FusionScheme]:
            if start == len(self.kinds):
                yield ()
            for end in range(start + 1, len(self.kinds) + 1):
                if self.is_valid((start, end)):
                    for tail in rest(end):
                        yield ((start, end), *tail)

        return rest(0)

    def count(self, most: int = 1 << 62) -> int:
        """How many valid schemes there are; at most ``most``."""
        ways = [0] * len(self.kinds) + [1]
        for start in reversed(range(len(self.kinds))):
            ends = range(start + 1, len(self.kinds) + 1)
            ways[start] = sum(ways[end] for end in ends if self.is_valid((start, end)))
        return min(ways[0], most)


def longest_scheme(space: SchemeSpace) -> FusionScheme:
    """The scheme whose segments, from the first operator on, are as long as possible."""
    count, start = len(space.kinds), 0
    segments: list[Segment] = []
    while start < count:
        end = next(e for e in range(count, start, -1) if space.is_valid((start, e)))
        segments.append((start, end))
        start = end
    return tuple(segments)


def expand(space: SchemeSpace, scheme: FusionScheme) -> Iterator[FusionScheme]:
    """The *Expand* moves: adjacent segments become one; the others stay."""
    for first in range(len(scheme)):
        for last in range(first + 1, len(scheme)):
            merged = (scheme[first][0], scheme[last][1])
            if space.compute_bound_count(merged) > MOST_COMPUTE_BOUND:
                break
            if space.is_valid(merged):
                yield (*scheme[:first], merged, *scheme[last + 1 :])


def seize(space: SchemeSpace, scheme: FusionScheme) -> Iterator[FusionScheme]:
    """The *Seize* moves: a segment with a compute-bound operator takes the next operator of a neighbor without one."""
    for i, (one, other) in enumerate(itertools.pairwise(scheme)):
        has = space.compute_bound_count(one) > 0, space.compute_bound_count(other) > 0
        if has[0] == has[1]:
            continue
        cut = one[1] + 1 if has[0] else one[1] - 1
        parts = [s for s in ((one[0], cut), (cut, other[1])) if s[0] < s[1]]
        if all(space.is_valid(s) for s in parts):
            yield (*scheme[:i], *parts, *scheme[i + 2 :])


def compete(space: SchemeSpace, scheme: FusionScheme) -> Iterator[FusionScheme]:
    """The *Compete* moves: of the two segments around an operator, the one with a single compute-bound operator takes it."""
    for i in range(1, len(scheme) - 1):
        before, wanted, after = scheme[i - 1 : i + 2]
        if wanted[1] - wanted[0] != 1 or space.compute_bound_count(wanted):
            continue
        first, second = (before[0], wanted[1]), (wanted[0], after[1])
        counts = space.compute_bound_count(before), space.compute_bound_count(after)
        if not all(counts):
            continue
        if counts[0] == 1 and space.is_valid(first):
            yield (*scheme[: i - 1], first, after, *scheme[i + 2 :])
        if counts[1] == 1 and space.is_valid(second):
            yield (*scheme[: i - 1], before, second, *scheme[i + 2 :])


def neighbor_schemes(space: SchemeSpace, scheme: FusionScheme) -> Iterator[FusionScheme]:
    """Every scheme that one move leads to."""
    yield from expand(space, scheme)
    yield from seize(space, scheme)
    yield from compete(space, scheme)
