# SPDX-License-Identifier: Apache-2.0
"""Compares the search for fusion schemes with enumeration, random sampling and greedy merging, region by region."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.core.clone import load_module
from stof.bench.results import Record
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.regions import find_chains, retranslate_chains
from stof.fusion.search.cost import AnalyticalCost, SegmentedRegion, frequent_start
from stof.fusion.search.engine import Cost, SearchLimits, search, search_exhaustively
from stof.fusion.search.measure import Timer
from stof.fusion.search.space import FusionScheme, SchemeSpace, expand, unfused_scheme
from stof.fusion.translate import FusedChain
from stof.graph.external_data import read_constants
from stof.graph.load_save import load
from stof.recursion import deep_recursion

# Graphs under models/graphs that the search is held against enumeration on.
GRAPHS = (
    *("narrow/gemma3.torchscript.eager", "narrow/mistral.torchscript.eager", "narrow/embeddinggemma.dynamo.eager"),
    *("zoo/gpt2.torchscript.sdpa", "zoo/qwen3.transformers.sdpa", "zoo/t5.dynamo.eager"),
    *("narrow/modernbert.torchscript.sdpa", "zoo/deberta-v2.torchscript.eager"),
)
LEAST, MOST = 200, 5000  # schemes of a space that is enumerated
_WINDOW, _STEP = 13, 4  # operators of a space, and between the first ones of two
_ENUMERATED = 20_000  # schemes that are compared one by one
_SAMPLES = 2000


@dataclass(frozen=True)
class SearchComparison:
    """Costs of the best schemes of one region; ``enumerated`` is None where there are too many schemes."""

    operators: str
    occurrences: int  # in the model
    schemes: int
    unfused: float
    found: float
    greedy: float
    sampled: float
    enumerated: float | None
    seconds: float  # that the search took
    compared: int
    graph: str = ""
    cost: str = "analytical"

    def record(self, number: int) -> Record:
        """The comparison as a record of results/search.json, with costs over that of the search."""
        return {
            "key": [self.graph, number, self.cost],
            "grid": "search",
            "operators": self.operators,
            "schemes": self.schemes,
            "compared": self.compared,
            "seconds": round(self.seconds, 4),
            "exhaustive": None if self.enumerated is None else round(self.enumerated / self.found, 6),
            "greedy": round(self.greedy / self.found, 4),
            "random": round(self.sampled / self.found, 4),
            "unfused": round(self.unfused / self.found, 4),
        }

    def text(self) -> str:
        """The comparison as text, with costs over that of the search."""
        best = "-" if self.enumerated is None else f"{self.enumerated / self.found:.3f}"
        return (
            f"{self.occurrences:3d} x {self.schemes:>9d} schemes  unfused {self.unfused / self.found:6.2f}  greedy "
            f"{self.greedy / self.found:6.3f}  random {self.sampled / self.found:6.3f}  enumerated {best:>6s}  "
            f"({self.compared} compared in {self.seconds:.2f} s)  {self.operators}"
        )


def compare_regions(path: Path, batch: int, length: int, measured: bool, seed: int = 0) -> Iterator[SearchComparison]:
    """Compares on the different regions of a model. ``measured``: costs are times on this device, not the cost model's."""
    with deep_recursion():
        yield from _compare_regions(path, batch, length, measured, seed)


def _compare_regions(path: Path, batch: int, length: int, measured: bool, seed: int) -> Iterator[SearchComparison]:
    model = load(path)
    read_constants(path, model)
    from stof.symbolic import Symbolic

    graph = FusionGraph(model, Symbolic(model))
    chains = retranslate_chains(graph, find_chains(graph)[0])
    words = [tuple(graph.operator_names(c.region.node_indices).split()) for c in chains]
    counts = Counter(w[i:j] for w in words for i in range(len(w)) for j in range(i + 2, len(w) + 1))
    sizes = InputMaker(model, graph.symbolic, frozenset()).sizes(Case(batch, length, Padding.NONE))
    occurrences = Counter(c.description.text for c in chains)
    seen: set[str] = set()
    for chain, own in zip(chains, words, strict=True):
        if chain.description.text in seen:
            continue
        seen.add(chain.description.text)
        region = SegmentedRegion(graph, chain.region.node_indices)
        cost: Cost = _measured_cost(region, Timer(graph, sizes)) if measured else AnalyticalCost(region, sizes)
        yield _compare(region, cost, own, counts, occurrences[chain.description.text], seed)


def cut_regions(graph: FusionGraph) -> list[SegmentedRegion]:
    """Regions with the matmuls around them, cut to spaces that can be enumerated."""
    found = []
    seen = set()
    for chain in retranslate_chains(graph, find_chains(graph)[0]):
        if chain.description.text in seen:
            continue
        seen.add(chain.description.text)
        around = {q for p in chain.region.node_indices for q in (*graph.producers(p), *graph.consumers(p))}
        near = {q for q in around if graph.nodes[q].op_type in ("MatMul", "Gemm")}
        node_indices = tuple(sorted({*chain.region.node_indices, *near}))
        for start in range(0, len(node_indices), _STEP):
            region = SegmentedRegion(graph, node_indices[start : start + _WINDOW])
            if LEAST <= region.space().count() <= MOST:
                found.append(region)
    return found


def random_costs(space: SchemeSpace, seed: int) -> Cost:
    """Random costs of segments and settings, without any order that a search could follow."""
    values = random.Random(seed)
    segments = [s for s in itertools.combinations(range(len(space.kinds) + 1), 2) if space.is_valid(s)]
    known = {(s, x): values.uniform(0.2, 1.0) * (s[1] - s[0]) ** 0.8 for s in segments for x in space.settings_of(s)}
    return lambda segment, setting: known[segment, setting]


def compare_spaces(names: Sequence[str], batch: int, length: int, seed: int = 0) -> Iterator[SearchComparison]:
    """Compares on the enumerable spaces of stored graphs, each by the cost model and by random costs."""
    with deep_recursion():
        yield from _compare_spaces(names, batch, length, seed)


def _compare_spaces(names: Sequence[str], batch: int, length: int, seed: int) -> Iterator[SearchComparison]:
    from stof.symbolic import Symbolic

    build = load_module("models/build.py")
    for name in names:
        model = build.load_graph(name)
        graph = FusionGraph(model, Symbolic(model))
        sizes = InputMaker(model, graph.symbolic, frozenset()).sizes(Case(batch, length, Padding.NONE))
        for region in cut_regions(graph):
            words = tuple(graph.nodes[p].op_type for p in region.node_indices)
            line = _compare(region, AnalyticalCost(region, sizes), words, Counter(), 1, seed, MOST + 1)
            yield replace(line, graph=name)
            random_comparison = _compare(
                region, random_costs(region.space(), seed), words, Counter(), 1, seed, MOST + 1
            )
            yield replace(random_comparison, graph=name, cost="drawn")


def summary(found: Sequence[SearchComparison]) -> str:
    """How often the search is as good as enumeration, and the other methods' mean costs over its own."""
    equal = [math.isclose(x.enumerated or 0.0, x.found, rel_tol=1e-9) for x in found if x.enumerated is not None]
    means = {
        name: math.exp(sum(math.log(getattr(x, name) / x.found) for x in found) / max(1, len(found)))
        for name in ("greedy", "sampled", "unfused")
    }
    return (
        f"{sum(equal)} of {len(equal)} spaces: as good as enumeration; greedy {means['greedy']:.3f}, best of {_SAMPLES} "
        f"random schemes {means['sampled']:.3f}, unfused {means['unfused']:.2f} times its cost (geometric means)"
    )


def _compare(
    region: SegmentedRegion,
    cost: Cost,
    words: tuple[str, ...],
    counts: Counter[tuple[str, ...]],
    occurrences: int,
    seed: int,
    most: int = 4096,
) -> SearchComparison:
    space = region.space()
    known: dict[object, float] = {}

    def kept(*key: object) -> float:
        if key not in known:
            known[key] = cost(*key)  # type: ignore[arg-type]
        return known[key]

    start = time.perf_counter()
    found = search(space, kept, [tuple(frequent_start(space, words, counts))], SearchLimits(schemes=most, seed=seed))
    took = time.perf_counter() - start
    total = space.count()
    generator = random.Random(seed)
    samples = (_total(kept, _random(space, generator)) for _ in range(_SAMPLES))
    return SearchComparison(
        " ".join(words),
        occurrences,
        total,
        _total(kept, unfused_scheme(len(words))),
        found.cost,
        _total(kept, _greedy(space, kept)),
        min(samples),
        search_exhaustively(space, kept)[1] if total <= _ENUMERATED else None,
        took,
        found.schemes,
    )


def _measured_cost(region: SegmentedRegion, timer: Timer) -> Cost:
    def cost(segment: tuple[int, int], setting: tuple[int, ...]) -> float:
        node_indices = region.node_indices[segment[0] : segment[1]]
        chain = region.chain(segment) if len(node_indices) > 1 else None
        chains = [chain] if isinstance(chain, FusedChain) else []
        try:
            return timer.seconds(node_indices, chains, region.graph.outputs(node_indices))
        except Exception:  # a part that does not run by itself is no candidate
            return math.inf if chains else 0.0

    return cost


def _total(cost: Cost, scheme: FusionScheme) -> float:
    return sum(cost(s, ()) for s in scheme)


def _random(space: SchemeSpace, generator: random.Random) -> FusionScheme:
    """A scheme whose segments end at random, one after another, where they are valid."""
    found = []
    start, count = 0, len(space.kinds)
    while start < count:
        end = generator.choice([e for e in range(start + 1, count + 1) if space.is_valid((start, e))])
        found.append((start, end))
        start = end
    return tuple(found)


def _greedy(space: SchemeSpace, cost: Cost) -> FusionScheme:
    """The scheme after merging the segments that gain most, one by one, until none gains."""
    scheme = unfused_scheme(len(space.kinds))
    while True:
        best = min(expand(space, scheme), key=lambda s: _total(cost, s), default=scheme)
        if _total(cost, best) >= _total(cost, scheme):
            return scheme
        scheme = best
