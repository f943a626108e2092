# SPDX-License-Identifier: Apache-2.0
"""The search for fusion schemes beside enumeration, random sampling and greedy merging, region by region of a model."""

from __future__ import annotations

import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stof.chains.apply import operators
from stof.chains.find import Graph, find_chains, settled
from stof.chains.region import Chain
from stof.graph import load, read_constants
from stof.inputs import Case, InputMaker, Padding
from stof.search.cost import Analytical, Site, frequent_start
from stof.search.engine import Cost, Limits, exhaustive, search
from stof.search.measure import Timer
from stof.search.space import Scheme, Space, expanded, unfused

_ENUMERATED = 20_000  # schemes that are compared one by one
_SAMPLES = 2000


@dataclass(frozen=True)
class Line:
    """One region: seconds of schemes by the same cost; ``enumerated`` is None where there are too many."""

    operators: str
    times: int  # in the model
    schemes: int
    unfused: float
    found: float
    greedy: float
    sampled: float
    enumerated: float | None
    seconds: float  # that the search took
    compared: int

    def text(self) -> str:
        """The line with every cost over the search's own."""
        best = "-" if self.enumerated is None else f"{self.enumerated / self.found:.3f}"
        return (
            f"{self.times:3d} x {self.schemes:>9d} schemes  unfused {self.unfused / self.found:6.2f}  greedy "
            f"{self.greedy / self.found:6.3f}  random {self.sampled / self.found:6.3f}  enumerated {best:>6s}  "
            f"({self.compared} compared in {self.seconds:.2f} s)  {self.operators}"
        )


def lines(path: Path, batch: int, length: int, measured: bool, seed: int = 0) -> Iterator[Line]:
    """The different regions of a model. ``measured``: costs are times on this device, not the analytical model's."""
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))
    model = load(path)
    read_constants(path, model)
    from stof.symbolic import Symbolic

    graph = Graph(model, Symbolic(model))
    chains = settled(graph, find_chains(graph)[0])
    words = [tuple(operators(graph, c.region.places).split()) for c in chains]
    counts = Counter(w[i:j] for w in words for i in range(len(w)) for j in range(i + 2, len(w) + 1))
    sizes = InputMaker(model, graph.symbolic, frozenset()).sizes(Case(batch, length, Padding.NONE))
    times = Counter(c.description.text for c in chains)
    seen: set[str] = set()
    for chain, own in zip(chains, words, strict=True):
        if chain.description.text in seen:
            continue
        seen.add(chain.description.text)
        site = Site(graph, chain.region.places)
        cost: Cost = _measured(site, Timer(graph, sizes)) if measured else Analytical(site, sizes)
        yield _line(site, cost, own, counts, times[chain.description.text], seed)


def _line(
    site: Site, cost: Cost, words: tuple[str, ...], counts: Counter[tuple[str, ...]], times: int, seed: int
) -> Line:
    space = site.space()
    known: dict[object, float] = {}

    def kept(*key: object) -> float:
        if key not in known:
            known[key] = cost(*key)  # type: ignore[arg-type]
        return known[key]

    start = time.perf_counter()
    found = search(space, kept, [tuple(frequent_start(space, words, counts))], Limits(seed=seed))
    took = time.perf_counter() - start
    total = space.count()
    generator = random.Random(seed)
    samples = (_total(kept, _random(space, generator)) for _ in range(_SAMPLES))
    return Line(
        " ".join(words),
        times,
        total,
        _total(kept, unfused(len(words))),
        found.cost,
        _total(kept, _greedy(space, kept)),
        min(samples),
        exhaustive(space, kept)[1] if total <= _ENUMERATED else None,
        took,
        found.schemes,
    )


def _measured(site: Site, timer: Timer) -> Cost:
    def cost(segment: tuple[int, int], setting: tuple[int, ...]) -> float:
        places = site.places[segment[0] : segment[1]]
        chain = site.chain(segment) if len(places) > 1 else None
        chains = [chain] if isinstance(chain, Chain) else []
        try:
            return timer.seconds(places, chains, site.graph.outputs(places))
        except Exception:  # a part that does not run by itself is no candidate
            return math.inf if chains else 0.0

    return cost


def _total(cost: Cost, scheme: Scheme) -> float:
    return sum(cost(s, ()) for s in scheme)


def _random(space: Space, generator: random.Random) -> Scheme:
    """A scheme with ends drawn one after another among those that are valid."""
    found = []
    start, count = 0, len(space.kinds)
    while start < count:
        end = generator.choice([e for e in range(start + 1, count + 1) if space.valid((start, e))])
        found.append((start, end))
        start = end
    return tuple(found)


def _greedy(space: Space, cost: Cost) -> Scheme:
    """Merges that gain most, one by one, until none gains."""
    scheme = unfused(len(space.kinds))
    while True:
        best = min(expanded(space, scheme), key=lambda s: _total(cost, s), default=scheme)
        if _total(cost, best) >= _total(cost, scheme):
            return scheme
        scheme = best
