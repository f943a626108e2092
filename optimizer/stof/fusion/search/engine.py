# SPDX-License-Identifier: Apache-2.0
"""The two-stage search. Stage 1 walks schemes by moves, stage 2 samples the settings of the best one's segments.

As in STOF (section 7 of its description), with what it leaves open made definite: costs are of segments and add up, so that
a segment is asked for once whatever schemes it is in; the walk takes the best scheme first that it has not left yet, and so
rolls back by itself; it ends when nothing is left, which is after every valid scheme where there are few.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stof.fusion.search.space import Scheme, Segment, Setting, Space, encode, neighbours, unfused

Cost = Callable[[Segment, Setting], float]  # seconds; inf where a setting does not run
Stop = Callable[[], bool]


@dataclass(frozen=True)
class Limits:
    """How far a search goes: schemes that are left, settings of a segment that stage 1 tries, rounds of stage 2."""

    schemes: int = 4096
    samples: int = 4
    rounds: int = 8
    budget: int = 16  # settings in each round of stage 2, over all segments
    seed: int = 0


@dataclass(frozen=True)
class Found:
    """The best scheme with its settings and cost. ``complete``: not interrupted, and no scheme was left out."""

    scheme: Scheme
    settings: tuple[Setting, ...]
    cost: float
    schemes: int  # that were compared
    measured: int  # pairs of segment and setting
    complete: bool


def no_stop() -> bool:
    """A search that nobody interrupts."""
    return False


def search(
    space: Space, cost: Cost, starts: Iterable[Scheme] = (), limits: Limits | None = None, stop: Stop = no_stop
) -> Found:
    """The best scheme found; the unfused one is always among those compared.

    Args:
        space: the schemes.
        cost: of a segment with a setting.
        starts: schemes to begin with, beside the unfused one; those that are not valid are left out.
        limits: how far to go.
        stop: asked between measurements: True ends the search with the best so far.
    """
    engine = _Engine(space, cost, limits or Limits(), stop)
    engine.walk(starts)
    engine.tune()
    scheme = engine.best
    settings = tuple(engine.best_of(s)[0] for s in scheme)
    return Found(scheme, settings, engine.total(scheme), engine.compared, len(engine.known), engine.complete)


@dataclass
class _Engine:
    space: Space
    cost: Cost
    limits: Limits
    stop: Stop
    known: dict[tuple[Segment, Setting], float] = field(default_factory=dict)
    compared: int = 0
    complete: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.limits.seed)
        self.orders: dict[Segment, list[Setting]] = {}
        self.best: Scheme = unfused(len(self.space.kinds))

    def order(self, segment: Segment) -> list[Setting]:
        """A segment's settings in the order in which they are tried: the first one is the template's own choice."""
        if segment not in self.orders:
            first, *rest = self.space.settings_of(segment)
            self.random.shuffle(rest)
            self.orders[segment] = [first, *rest]
        return self.orders[segment]

    def ask(self, segment: Segment, setting: Setting) -> float:
        key = (segment, setting)
        if key not in self.known:
            self.known[key] = self.cost(segment, setting)
        return self.known[key]

    def sample(self, segment: Segment, count: int) -> int:
        """Asks for settings that were not asked for yet; returns how many there were."""
        new = [s for s in self.order(segment) if (segment, s) not in self.known][:count]
        for done, setting in enumerate(new):
            if self.stop():
                self.complete = False
                return done
            self.ask(segment, setting)
        return len(new)

    def best_of(self, segment: Segment) -> tuple[Setting, float]:
        found = [
            (self.known[segment, s], i, s) for i, s in enumerate(self.order(segment)) if (segment, s) in self.known
        ]
        if not found:
            return self.order(segment)[0], self.ask(segment, self.order(segment)[0])
        value, _, setting = min(found)
        return setting, value

    def total(self, scheme: Scheme) -> float:
        return sum(self.best_of(s)[1] for s in scheme)

    def compare(self, scheme: Scheme) -> float | None:
        """The cost of a scheme with a fixed number of settings for each segment; None when the search was ended."""
        for segment in scheme:
            tried = sum((segment, s) in self.known for s in self.order(segment))
            self.sample(segment, max(0, self.limits.samples - tried))
            if not any((segment, s) in self.known for s in self.order(segment)):
                return None
        self.compared += 1
        return self.total(scheme)

    def walk(self, starts: Iterable[Scheme]) -> None:
        """Stage 1."""
        first = unfused(len(self.space.kinds))
        lowest = self.compare(first)
        if lowest is None:  # ended before it began: what the unfused scheme costs is asked for all the same
            return
        waiting = [(lowest, encode(first), first)]
        seen = {first}
        for scheme in starts:
            if scheme not in seen and all(self.space.valid(s) for s in scheme):
                seen.add(scheme)
                value = self.compare(scheme)
                if value is None:
                    return
                heapq.heappush(waiting, (value, encode(scheme), scheme))
                lowest, self.best = min((lowest, self.best), (value, scheme), key=lambda x: (x[0], encode(x[1])))
        while waiting:
            _, _, scheme = heapq.heappop(waiting)
            for other in neighbours(self.space, scheme):
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
        """Stage 2: rounds of settings; a segment whose settings gained most in a round gets more in the next one."""
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
            segments = [s for s in segments if any((s, x) not in self.known for x in self.order(s))]
            if segments and max(gains.values()) > 0:
                winner = max(gains, key=lambda s: (gains[s], -s[0]))
                weights[winner] *= 2
            weights = {s: weights[s] for s in segments}
        self.complete = self.complete and not segments


def exhaustive(space: Space, cost: Cost) -> tuple[Scheme, float]:
    """The best of every scheme and every setting, for small spaces: what the search is held against."""
    known: dict[Segment, float] = {}

    def least(segment: Segment) -> float:
        if segment not in known:
            known[segment] = min(cost(segment, s) for s in space.settings_of(segment))
        return known[segment]

    best = min(space.schemes(), key=lambda scheme: (sum(least(s) for s in scheme), encode(scheme)))
    return best, sum(least(s) for s in best)
