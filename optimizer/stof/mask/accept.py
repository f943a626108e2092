# SPDX-License-Identifier: Apache-2.0
"""All that a lifted mask must hold before its site is replaced."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

from stof.errors import GuardError, UnsupportedError
from stof.mask.check.checker import MaskChecker
from stof.mask.empty_rows.policy import check_rows
from stof.mask.empty_rows.row_guard import check_guard
from stof.site import AttentionSite, LiftedMask

T = TypeVar("T")

_NODE = re.compile(r"\w+|[<>=!]=|//|[-+*%<>]")  # each node of the library's has one such word
_ANY_NODES, _WORK = 128, 1 << 38


def accept(checker: MaskChecker, site: AttentionSite, mask: LiftedMask, *, rows: bool = True) -> None:
    """Proves the row guard, compares mask and graph by running the graph's, and (``rows``) rows without a key.

    Raises:
        GuardError: when the guard is another than the mask's.
        UnsupportedError: naming what differs.
    """
    check_work(mask.expression, site.dims[2].constant, site.dims[3].constant)
    check_guard(checker.index, checker.symbolic, site, mask)
    checker.check(site, mask)
    if rows:
        check_rows(checker, site, mask)


def check_work(expression: str, queries: int | None, keys: int | None) -> None:
    """Whether the library evaluates a mask at all lengths, or at those that are fixed (docs/reference/mask-format.md).

    Raises:
        UnsupportedError: for an expression that is too large.
    """
    nodes = len(_NODE.findall(expression))
    if nodes <= _ANY_NODES:
        return
    if queries is None or keys is None:
        raise UnsupportedError(f"its mask has {nodes} nodes, expected at most {_ANY_NODES} where lengths are not fixed")
    if nodes * queries * keys > _WORK:
        raise UnsupportedError(
            f"its mask has {nodes} nodes for {queries} x {keys} pairs, expected at most {_ANY_NODES} nodes, or 2^38 for all pairs"
        )


def or_unguarded(site: AttentionSite, work: Callable[[AttentionSite], T]) -> T:
    """The result for a site; for the site without its row guard, which then stays in the graph, where that cannot go.

    Raises:
        UnsupportedError: what ``work`` raises for the last of them.
    """
    try:
        return work(site)
    except GuardError:
        if site.unguarded is None:
            raise
        return work(site.unguarded)
