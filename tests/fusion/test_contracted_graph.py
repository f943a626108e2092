# SPDX-License-Identifier: Apache-2.0
"""Groups of nodes that merge: convexity against a search of the whole graph, and the work that a merge takes."""

from __future__ import annotations

import random

import pytest

from stof.fusion.contracted_graph import ContractedGraph


class Graph:
    """A random acyclic graph whose groups are known, and which counts how often a node is looked at."""

    def __init__(self, readers: list[list[int]]) -> None:
        self.readers = readers
        self.writers: list[list[int]] = [[] for _ in readers]
        for p, some in enumerate(readers):
            for q in some:
                self.writers[q].append(p)
        self.looks = 0
        self.contracted = ContractedGraph(lambda p: self._look(self.readers[p]), lambda p: self._look(self.writers[p]))
        self.groups = {p: frozenset([p]) for p in range(len(readers))}  # by the least node

    def _look(self, found: list[int]) -> list[int]:
        self.looks += 1
        return found

    def group_of(self, node: int) -> frozenset[int]:
        return next(g for g in self.groups.values() if node in g)

    def is_convex(self, union: frozenset[int]) -> bool:
        """By a search of the whole graph, in which a group is entered and left at any of its nodes."""
        pending = [q for p in union for q in self.readers[p] if q not in union]
        seen: set[int] = set()
        while pending:
            node = pending.pop()
            if node in union:
                return False
            if node not in seen:
                inside = self.group_of(node)
                seen |= inside
                pending += [q for p in inside for q in self.readers[p] if q not in inside]
        return True

    def merge(self, names: list[int]) -> None:
        union = frozenset().union(*(self.groups.pop(n) for n in names))
        self.groups[self.contracted.merge(names)] = union


@pytest.mark.parametrize("seed", range(40))
def test_convexity_is_that_of_the_whole_graph(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(4, 24)
    density = rng.choice([1, 2, 3])
    readers = [sorted(rng.sample(range(p + 1, count), min(density, count - p - 1))) for p in range(count)]
    graph = Graph(readers)
    verdicts = []
    for _ in range(60):
        if len(graph.groups) < 3:
            break
        names = rng.sample(sorted(graph.groups), rng.choice([2, 2, 3]) if len(graph.groups) > 3 else 2)
        union = frozenset().union(*(graph.groups[n] for n in names))
        verdicts.append(graph.is_convex(union))
        assert graph.contracted.is_convex(names) == verdicts[-1]
        if verdicts[-1]:
            graph.merge(names)
            assert min(union) in graph.groups
    assert verdicts


@pytest.mark.parametrize("kind", ["chain", "residual"])
def test_work_grows_with_the_graph_and_no_faster(kind: str) -> None:
    def looks(count: int) -> int:
        step = 1 if kind == "chain" else 3  # of a residual: it is read again three nodes later
        graph = Graph([[q for q in dict.fromkeys((p + 1, p + step)) if q < count] for p in range(count)])
        for first in range(0, count - 3, 4):
            for p in range(first + 1, first + 4):
                assert graph.contracted.is_convex([first, p])
                graph.merge([first, p])
        return graph.looks

    assert looks(800) <= 2.2 * looks(400)
