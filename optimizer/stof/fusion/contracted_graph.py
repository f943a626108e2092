# SPDX-License-Identifier: Apache-2.0
"""An acyclic graph whose nodes merge into groups, with an order of the groups in which writers come before readers.

The order bounds each search: a path into a group leads only through groups that come earlier. A merge moves the groups
between the first and the last one that it joins, and no others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

Neighbors = Callable[[int], Iterable[int]]


class ContractedGraph:
    """Groups of nodes, each named by its least node index. A path enters and leaves a group at any of its nodes.

    Args:
        consumers: the indices of the nodes that read a node's outputs; all are larger than the node's own.
        producers: the opposite.
    """

    def __init__(self, consumers: Neighbors, producers: Neighbors) -> None:
        self._consumers = consumers
        self._producers = producers
        self._group: dict[int, int] = {}  # of nodes in groups of several
        self._members: dict[int, tuple[int, ...]] = {}
        self._outside: dict[
            tuple[int, bool], set[int]
        ] = {}  # consumers (True) and producers of a group's nodes, outside of it
        self._rank: dict[int, int] = {}  # where it is not the group's name

    def is_convex(self, groups: Collection[int]) -> bool:
        """Whether no path leaves these groups and comes back."""
        members = set(groups)
        last = max(self._rank_of(g) for g in members)
        return self._search(members, True, lambda rank: rank < last, stops_at_own=True) is not None

    def merge(self, groups: Collection[int]) -> int:
        """Makes groups, which are convex together, one group; returns its name."""
        merged = set(groups)
        ranks = [self._rank_of(g) for g in merged]
        first, last = min(ranks), max(ranks)
        before = self._search(merged, False, lambda rank: rank > first) or set()
        behind = self._search(merged, True, lambda rank: rank < last) or set()
        # Groups before the new one only move up, and groups behind it only down, so that all other pairs keep their order.
        slots = sorted(self._rank_of(g) for g in (*merged, *before, *behind))
        ordered = [sorted(some, key=self._rank_of) for some in (before, behind)]
        members = tuple(p for g in merged for p in self._members.get(g, (g,)))
        name = min(merged)
        outside = {forward: set().union(*(self._outside_of(g, forward) for g in merged)) for forward in (True, False)}
        for g in merged:
            self._members.pop(g, None)
            self._rank.pop(g, None)
        self._members[name] = members
        for forward, nodes in outside.items():
            self._outside[name, forward] = nodes.difference(members)
        self._group.update(dict.fromkeys(members, name))
        self._rank[name] = slots[len(before)]
        self._rank.update(zip(ordered[0], slots, strict=False))
        self._rank.update(zip(reversed(ordered[1]), reversed(slots), strict=False))
        return name

    def _rank_of(self, group: int) -> int:
        return self._rank.get(group, group)

    def _outside_of(self, group: int, forward: bool) -> set[int]:
        if group not in self._members:
            return set(self._consumers(group) if forward else self._producers(group))
        return self._outside[group, forward]

    def _neighbors(self, group: int, forward: bool) -> set[int]:
        return {self._group.get(q, q) for q in self._outside_of(group, forward)}

    def _search(
        self, start: set[int], forward: bool, is_within: Callable[[int], bool], stops_at_own: bool = False
    ) -> set[int] | None:
        """The groups that paths from ``start`` lead to; None where one leads back and that ends the search."""
        pending = list({h for g in start for h in self._neighbors(g, forward)} - start)
        reached: set[int] = set()
        while pending:
            group = pending.pop()
            if group in reached or not is_within(self._rank_of(group)):
                continue
            reached.add(group)
            following = self._neighbors(group, forward)
            if stops_at_own and following & start:
                return None
            # The nearest to the end of the search first: where a path leads back, that finds it soonest.
            pending.extend(sorted(following - reached, key=self._rank_of))
        return reached
