# SPDX-License-Identifier: Apache-2.0
"""The two-stage search for a fusion scheme, as in STOF (section 7).

Stage 1 walks schemes by moves; stage 2 samples the settings of the best scheme's segments. What STOF leaves open is decided
so: a scheme costs the sum of its segments, each of which is measured once. The walk expands the cheapest scheme first, and
so rolls back by itself. It ends when no scheme is left, which is after every valid scheme in a small space.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stof.fusion.search.space import (
    FusionScheme,
    SchemeSpace,
    Segment,
    Setting,
    encode,
    neighbor_schemes,
    unfused_scheme,
)

Cost = Callable[[Segment, Setting], float]  # seconds; inf where a setting does not run
Stop = Callable[[], bool]


@dataclass(frozen=True)
class SearchLimits:
    """How far a search goes.

    Attributes:
        schemes: the most schemes of stage 1.
        samples: settings of a segment that stage 1 tries.
        rounds: rounds of stage 2.
        budget: settings in each round of stage 2, over all segments.
        seed: of the order in which settings are tried.
    """

    schemes: int = 4096
    samples: int = 4
    rounds: int = 8
    budget: int = 16
    seed: int = 0


@dataclass(frozen=True)
class SearchResult:
    """The best scheme.

    Attributes:
        scheme: its segments.
        settings: the best setting of each segment.
        cost: of the scheme with these settings.
        schemes: how many schemes were compared.
        measured: how many pairs of segment and setting were measured.
        complete: whether the search ended by itself, without leaving out a scheme.
    """

    scheme: FusionScheme
    settings: tuple[Setting, ...]
    cost: float
    schemes: int
    measured: int
    complete: bool


def no_stop() -> bool:
    """Never stops a search."""
    return False


def search(
    space: SchemeSpace,
    cost: Cost,
    starts: Iterable[FusionScheme] = (),
    limits: SearchLimits | None = None,
    stop: Stop = no_stop,
) -> SearchResult:
    """Searches for the cheapest scheme; the unfused scheme is always among those compared.

    Args:
        space: the schemes.
        cost: the cost of a segment with a setting.
        starts: schemes to start from beside the unfused one; invalid ones are left out.
        limits: how far to go.
        stop: asked between measurements; True ends the search with the best scheme so far.
    """
    engine = _Engine(space, cost, limits or SearchLimits(), stop)
    engine.walk(starts)
    engine.tune()
    scheme = engine.best
    settings = tuple(engine.best_of(s)[0] for s in scheme)
    return SearchResult(scheme, settings, engine.total(scheme), engine.compared, len(engine.measured), engine.complete)


@dataclass
class _Engine:
    space: SchemeSpace
    cost: Cost
    limits: SearchLimits
    stop: Stop
    measured: dict[tuple[Segment, Setting], float] = field(default_factory=dict)
    compared: int = 0
    complete: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.limits.seed)
        self.orders: dict[Segment, list[Setting]] = {}
        self.best: FusionScheme = unfused_scheme(len(self.space.kinds))

    def order(self, segment: Segment) -> list[Setting]:
        """A segment's settings in the order in which they are tried; the first one is the kernel's default."""
        if segment not in self.orders:
            first, *rest = self.space.settings_of(segment)
            self.random.shuffle(rest)
            self.orders[segment] = [first, *rest]
        return self.orders[segment]

    def measure(self, segment: Segment, setting: Setting) -> float:
        key = (segment, setting)
        if key not in self.measured:
            self.measured[key] = self.cost(segment, setting)
        return self.measured[key]

    def sample(self, segment: Segment, count: int) -> int:
        """Measures up to ``count`` new settings of a segment; returns how many."""
        new = [s for s in self.order(segment) if (segment, s) not in self.measured][:count]
        for done, setting in enumerate(new):
            if self.stop():
                self.complete = False
                return done
            self.measure(segment, setting)
        return len(new)

    def best_of(self, segment: Segment) -> tuple[Setting, float]:
        measured = [
            (self.measured[segment, s], i, s)
            for i, s in enumerate(self.order(segment))
            if (segment, s) in self.measured
        ]
        if not measured:
            return self.order(segment)[0], self.measure(segment, self.order(segment)[0])
        value, _, setting = min(measured)
        return setting, value

    def total(self, scheme: FusionScheme) -> float:
        return sum(self.best_of(s)[1] for s in scheme)

    def compare(self, scheme: FusionScheme) -> float | None:
        """The cost of a scheme by ``limits.samples`` settings for each segment; None when the search was stopped."""
        for segment in scheme:
            tried = sum((segment, s) in self.measured for s in self.order(segment))
            self.sample(segment, max(0, self.limits.samples - tried))
            if not any((segment, s) in self.measured for s in self.order(segment)):
                return None
        self.compared += 1
        return self.total(scheme)

    def walk(self, starts: Iterable[FusionScheme]) -> None:
        """Stage 1."""
        first = unfused_scheme(len(self.space.kinds))
        lowest = self.compare(first)
        if lowest is None:  # stopped before it began; the result still measures the unfused scheme
            return
        waiting = [(lowest, encode(first), first)]
        seen = {first}
        for scheme in starts:
            if scheme not in seen and all(self.space.is_valid(s) for s in scheme):
                seen.add(scheme)
                value = self.compare(scheme)
                if value is None:
                    return
                heapq.heappush(waiting, (value, encode(scheme), scheme))
                lowest, self.best = min((lowest, self.best), (value, scheme), key=lambda x: (x[0], encode(x[1])))
        while waiting:
            _, _, scheme = heapq.heappop(waiting)
            for other in neighbor_schemes(self.space, scheme):
                if other in seen:
                    continue
                if self.stop() or len(seen) >= self.limits.schemes:
                    self.complete = False
                    return
                seen.add(other)
                value = self.compare(other)
                if value is None:
                    return
                heapq.heappush(waiting, (value, encode(other), other))
                if (value, encode(other)) < (lowest, encode(self.best)):
                    lowest, self.best = value, other

    def tune(self) -> None:
        """Stage 2: rounds of settings. The segment that gained most in a round gets more settings in the next one."""
        segments = [s for s in self.best if len(self.order(s)) > 1]
        weights = dict.fromkeys(segments, 1.0)
        for _ in range(self.limits.rounds):
            if not segments or self.stop():
                self.complete = self.complete and not segments
                return
            gains = {}
            whole = sum(weights.values())
            for segment in segments:
                before = self.best_of(segment)[1]
                self.sample(segment, max(1, round(self.limits.budget * weights[segment] / whole)))
                gains[segment] = before - self.best_of(segment)[1]
            segments = [s for s in segments if any((s, x) not in self.measured for x in self.order(s))]
            if segments and max(gains.values()) > 0:
                winner = max(gains, key=lambda s: (gains[s], -s[0]))
                weights[winner] *= 2
            weights = {s: weights[s] for s in segments}
        self.complete = self.complete and not segments


def search_exhaustively(space: SchemeSpace, cost: Cost) -> tuple[FusionScheme, float]:
    """The best of every scheme and every setting: the reference of the search in small spaces."""
    costs: dict[Segment, float] = {}

    def least(segment: Segment) -> float:
        if segment not in costs:
            costs[segment] = min(cost(segment, s) for s in space.settings_of(segment))
        return costs[segment]

    best = min(space.schemes(), key=lambda scheme: (sum(least(s) for s in scheme), encode(scheme)))
    return best, sum(least(s) for s in best)
