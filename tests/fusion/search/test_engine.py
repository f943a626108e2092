# SPDX-License-Identifier: Apache-2.0
"""The search beside every scheme there is, on spaces of real graphs: of three, of all with STOF_TEST_ALL=1."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from functools import lru_cache

import pytest

import build
from bench.cpu.search import GRAPHS, MOST, cut_regions
from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.fusion.fusion_graph import FusionGraph
from stof.fusion.search.cost import AnalyticalCost, SegmentedRegion, frequent_start
from stof.fusion.search.engine import SearchLimits, search, search_exhaustively
from stof.fusion.search.space import SchemeSpace, Segment, Setting, unfused_scheme
from stof.symbolic import Symbolic

CHOSEN = GRAPHS if os.environ.get("STOF_TEST_ALL") == "1" else GRAPHS[::3]


@lru_cache(maxsize=1)
def sites() -> list[tuple[SegmentedRegion, SchemeSpace, dict[str, int]]]:
    """The spaces that python -m bench search enumerates."""
    found = []
    for name in CHOSEN:
        graph = FusionGraph(build.load_graph(name), Symbolic(build.load_graph(name)))
        sizes = InputMaker(graph.model, graph.symbolic, frozenset()).sizes(Case(2, 128, Padding.NONE))
        found += [(site, site.space(), sizes) for site in cut_regions(graph)]
    return found


def drawn(space: SchemeSpace, seed: int, settings: int) -> tuple[SchemeSpace, dict[tuple[Segment, Setting], float]]:
    """The same space with settings, and a cost of each segment that has no order that a search could follow."""
    values = random.Random(seed)
    count = len(space.kinds)
    space = SchemeSpace(space.kinds, space.is_valid, lambda _: (tuple(range(settings)),))
    segments = [s for s in itertools.combinations(range(count + 1), 2) if space.is_valid(s)]
    return space, {
        (s, x): values.uniform(0.2, 1.0) * (s[1] - s[0]) ** 0.8 for s in segments for x in space.settings_of(s)
    }


pytestmark = pytest.mark.slow


def test_there_are_enough_spaces() -> None:
    assert len(sites()) >= 2.5 * len(CHOSEN)


@pytest.mark.parametrize("settings", [1, 3])
def test_the_search_finds_what_enumeration_finds(settings: int) -> None:
    for i, (_, plain, _) in enumerate(sites()):
        space, costs = drawn(plain, i, settings)
        found = search(space, lambda *k, c=costs: c[k], [], SearchLimits(schemes=MOST + 1, seed=i))  # type: ignore[misc]
        scheme, cost = search_exhaustively(space, lambda *k, c=costs: c[k])  # type: ignore[misc]
        assert found.complete
        assert found.schemes == space.count()
        assert found.scheme == scheme
        assert found.cost == pytest.approx(cost)


def test_the_analytical_model_is_searched_to_its_best() -> None:
    for site, space, sizes in sites():
        cost = AnalyticalCost(site, sizes)
        words = [site.graph.nodes[p].op_type for p in site.node_indices]
        found = search(space, cost, [tuple(frequent_start(space, words, {}))], SearchLimits(schemes=MOST + 1))
        assert found.cost == pytest.approx(search_exhaustively(space, cost)[1])
        assert found.cost <= sum(cost(s) for s in unfused_scheme(len(site.node_indices)))


def test_equal_seeds_give_equal_searches() -> None:
    _, plain, _ = sites()[0]
    space, costs = drawn(plain, 7, 40)

    def run(seed: int) -> tuple[object, list[object]]:
        asked: list[object] = []

        def cost(segment: Segment, setting: Setting) -> float:
            asked.append((segment, setting))
            return costs[segment, setting]

        return search(space, cost, [], SearchLimits(schemes=60, samples=2, rounds=3, seed=seed)), asked

    assert run(1) == run(1)
    assert run(1)[1] != run(2)[1]


def test_a_search_that_is_ended_has_the_best_so_far() -> None:
    _, plain, _ = sites()[0]
    space, costs = drawn(plain, 3, 4)
    whole = search_exhaustively(space, lambda *k: costs[k])[1]
    before = sum(costs[s, ()] for s in unfused_scheme(len(space.kinds)))
    last = float("inf")
    for most in (0, 1, 5, 30, 200, 100_000):
        left: Iterator[int] = iter(range(most))
        found = search(
            space, lambda *k: costs[k], [], SearchLimits(schemes=MOST + 1), lambda it=left: next(it, None) is None
        )  # type: ignore[misc]
        assert all(space.is_valid(s) for s in found.scheme)
        assert found.cost <= before + 1e-12
        assert found.cost <= last + 1e-12
        last = found.cost
        assert found.complete == (most == 100_000)
    assert last == pytest.approx(whole)


def test_a_segment_is_asked_for_once() -> None:
    _, plain, _ = sites()[0]
    space, costs = drawn(plain, 5, 3)
    asked: list[object] = []

    def cost(segment: Segment, setting: Setting) -> float:
        asked.append((segment, setting))
        return costs[segment, setting]

    search(space, cost, [], SearchLimits(schemes=MOST + 1))
    assert len(asked) == len(set(asked))


def test_missing_kernels_leave_compute_bound_operators_alone() -> None:
    for _, space, _ in sites():
        for start, end in itertools.combinations(range(len(space.kinds) + 1), 2):
            if "C" in space.kinds[start:end] and end - start > 1:
                assert not space.is_valid((start, end))


def test_stage_two_gives_more_to_the_segment_that_gains() -> None:
    """One segment's settings are all alike, the other's get better: it is sampled more."""
    space = SchemeSpace("MMMM", lambda s: s in ((0, 2), (2, 4)), lambda _: (tuple(range(200)),))

    def cost(segment: Segment, setting: Setting) -> float:
        if segment[1] - segment[0] == 1:
            return 10.0
        return 1.0 if segment == (0, 2) else 1.0 + 1.0 / (1 + setting[0])

    asked = {(0, 2): 0, (2, 4): 0}

    def counted(segment: Segment, setting: Setting) -> float:
        if segment in asked:
            asked[segment] += 1
        return cost(segment, setting)

    found = search(space, counted, [], SearchLimits(samples=2, rounds=6, budget=16, seed=1))
    assert found.scheme == ((0, 2), (2, 4))
    assert asked[2, 4] > 1.5 * asked[0, 2]
