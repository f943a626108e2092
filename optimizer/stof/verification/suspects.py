# SPDX-License-Identifier: Apache-2.0
"""A search for sites that make outputs differ only together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_MOST_SUSPECTS = 4


def find_suspects(sites: Sequence[str], fails: Callable[[Sequence[str]], bool]) -> tuple[list[str], bool]:
    """A smallest failing set of sites by repeated bisection, when all of them together fail.

    Takes about log2(n) runs for each site of the set. The set cannot lose one of its sites and still fail, as long as a set
    fails that holds a failing one.

    Args:
        sites: all of them, in the order of the graph.
        fails: whether the model in which these are replaced is wrong.

    Returns:
        The set in the order of the graph, and whether it fails by itself: the search ends at a few rewrites.
    """
    needed: list[str] = []
    rest = list(sites)
    while len(needed) < _MOST_SUSPECTS:
        # With `needed`, all of `rest` fails, and none of it does not: search the first number that fails.
        low, high = 0, len(rest)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails([*rest[:middle], *needed]) else (middle, high)
        needed.insert(0, rest[high - 1])
        rest = rest[: high - 1]
        if not rest or fails(needed):
            return needed, True
    return needed, False
