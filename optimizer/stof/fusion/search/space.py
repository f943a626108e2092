# SPDX-License-Identifier: Apache-2.0
"""Fusion schemes of a site: its operators in order, cut into segments.

The encoding is that of STOF (PPoPP '26, section 7 of its description): one bit for each operator, equal neighbours belong to
one segment. Complementing all bits gives the same scheme, so the first bit is 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache

MOST_COMPUTE_BOUND = 2  # operators of a segment

Segment = tuple[int, int]  # the first operator, and the one after the last
Scheme = tuple[Segment, ...]
Setting = tuple[int, ...]  # one value for each parameter of a template


def encode(scheme: Scheme) -> int:
    """A scheme's bits; the first operator's is the lowest one."""
    bits = 0
    for number, (start, end) in enumerate(scheme):
        if number % 2:
            bits |= ((1 << (end - start)) - 1) << start
    return bits


def decode(bits: int, count: int) -> Scheme:
    """The scheme of ``count`` operators that has these bits.

    Raises:
        ValueError: for bits beyond the operators, or with the first one set.
    """
    if count < 1 or bits & 1 or bits >> count:
        raise ValueError(f"{bits:#x} encodes no scheme of {count} operators")
    values = [bits >> i & 1 for i in range(count)]
    cuts = [0, *(i for i in range(1, count) if values[i] != values[i - 1]), count]
    return tuple(itertools.pairwise(cuts))


def unfused(count: int) -> Scheme:
    """Every operator by itself: always a candidate."""
    return tuple((i, i + 1) for i in range(count))


def replaced(scheme: Scheme, alone: Collection[Segment]) -> tuple[Segment, ...]:
    """The segments of a scheme that become operators: those of several, and some by themselves."""
    return tuple(s for s in scheme if s[1] - s[0] > 1 or s in alone)


@dataclass(frozen=True)
class Space:
    """The schemes of a site.

    Args:
        kinds: for each operator, "C" (compute-bound: MatMul, Gemm) or "M" (memory-bound).
        available: whether a template computes a segment of two operators or more. Asked once for each.
        settings: the values of each parameter of the template that computes a segment; a segment of one has none.
    """

    kinds: str
    available: Callable[[Segment], bool]
    settings: Callable[[Segment], tuple[tuple[int, ...], ...]] = lambda _: ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "_valid", lru_cache(maxsize=None)(self._is_valid))

    def valid(self, segment: Segment) -> bool:
        """Whether a scheme may hold a segment."""
        return bool(self._valid(segment))  # type: ignore[attr-defined]

    def _is_valid(self, segment: Segment) -> bool:
        start, end = segment
        if end - start == 1:
            return True
        return self.compute_bound(segment) <= MOST_COMPUTE_BOUND and self.available(segment)

    def compute_bound(self, segment: Segment) -> int:
        """How many operators of a segment are compute-bound."""
        return self.kinds[segment[0] : segment[1]].count("C")

    def settings_of(self, segment: Segment) -> list[Setting]:
        """Every setting of a segment's template."""
        if segment[1] - segment[0] == 1:
            return [()]
        return list(itertools.product(*self.settings(segment)))

    def schemes(self) -> Iterator[Scheme]:
        """Every valid scheme; there may be very many."""

        def rest(start: int) -> Iterator[Scheme]:
            if start == len(self.kinds):
                yield ()
            for end in range(start + 1, len(self.kinds) + 1):
                if self.valid((start, end)):
                    for tail in rest(end):
                        yield ((start, end), *tail)

        return rest(0)

    def count(self, most: int = 1 << 62) -> int:
        """How many valid schemes there are."""
        ways = [0] * len(self.kinds) + [1]
        for start in reversed(range(len(self.kinds))):
            ends = range(start + 1, len(self.kinds) + 1)
            ways[start] = sum(ways[end] for end in ends if self.valid((start, end)))
        return min(ways[0], most)


def longest(space: Space) -> Scheme:
    """The scheme whose segments, from the first operator on, are each as long as a template computes."""
    count, start = len(space.kinds), 0
    found: list[Segment] = []
    while start < count:
        end = next(e for e in range(count, start, -1) if space.valid((start, e)))
        found.append((start, end))
        start = end
    return tuple(found)


def expanded(space: Space, scheme: Scheme) -> Iterator[Scheme]:
    """*Expand*: neighbours become one segment; others stay as they are."""
    for first in range(len(scheme)):
        for last in range(first + 1, len(scheme)):
            merged = (scheme[first][0], scheme[last][1])
            if space.compute_bound(merged) > MOST_COMPUTE_BOUND:
                break
            if space.valid(merged):
                yield (*scheme[:first], merged, *scheme[last + 1 :])


def seized(space: Space, scheme: Scheme) -> Iterator[Scheme]:
    """*Seize*: a segment with a compute-bound operator takes the next operator of one that has none."""
    for i, (one, other) in enumerate(itertools.pairwise(scheme)):
        has = space.compute_bound(one) > 0, space.compute_bound(other) > 0
        if has[0] == has[1]:
            continue
        cut = one[1] + 1 if has[0] else one[1] - 1
        parts = [s for s in ((one[0], cut), (cut, other[1])) if s[0] < s[1]]
        if all(space.valid(s) for s in parts):
            yield (*scheme[:i], *parts, *scheme[i + 2 :])


def competed(space: Space, scheme: Scheme) -> Iterator[Scheme]:
    """*Compete*: of two segments around an operator, the one with a single compute-bound operator gets it."""
    for i in range(1, len(scheme) - 1):
        before, wanted, after = scheme[i - 1 : i + 2]
        if wanted[1] - wanted[0] != 1 or space.compute_bound(wanted):
            continue
        left, right = (before[0], wanted[1]), (wanted[0], after[1])
        counts = space.compute_bound(before), space.compute_bound(after)
        if not all(counts):
            continue
        if counts[0] == 1 and space.valid(left):
            yield (*scheme[: i - 1], left, after, *scheme[i + 2 :])
        if counts[1] == 1 and space.valid(right):
            yield (*scheme[: i - 1], before, right, *scheme[i + 2 :])


def neighbours(space: Space, scheme: Scheme) -> Iterator[Scheme]:
    """Every scheme one move away."""
    yield from expanded(space, scheme)
    yield from seized(space, scheme)
    yield from competed(space, scheme)
