# SPDX-License-Identifier: Apache-2.0
"""All that a lifted mask must hold before its site is replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stof.errors import GuardError
from stof.mask.check import MaskChecker
from stof.mask.guard import check_guard
from stof.mask.rows import check_rows
from stof.site import AttentionSite, LiftedMask

T = TypeVar("T")


def accept(checker: MaskChecker, site: AttentionSite, mask: LiftedMask, *, rows: bool = True) -> None:
    """Proves the row guard, compares mask and graph by running the graph's, and (``rows``) rows without a key.

    Raises:
        GuardError: when the guard is another than the mask's.
        UnsupportedError: naming what differs.
    """
    check_guard(checker.index, checker.symbolic, site, mask)
    checker.check(site, mask)
    if rows:
        check_rows(checker, site, mask)


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
