# SPDX-License-Identifier: Apache-2.0
"""The conditions under which a lifted mask may replace the nodes of its site."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stof.errors import GuardError, UnsupportedError
from stof.mask.check.checker import MaskChecker
from stof.mask.empty_rows.check_empty_rows import check_empty_rows
from stof.mask.empty_rows.row_guard import check_guard
from stof.mask.expression import MaskExpression
from stof.mask.site import AttentionSite, LiftedMask

T = TypeVar("T")

# As MaskExpr of the library has them (docs/reference/mask-format.md).
_MAX_NODES_OF_ANY_LENGTH = 128
_MAX_WORK = 1 << 38  # nodes x queries x keys


def accept(checker: MaskChecker, site: AttentionSite, mask: LiftedMask, *, ignore_empty_rows: bool = False) -> None:
    """Proves the row guard, and compares the mask and its fully masked rows with the graph by running it.

    Raises:
        GuardError: when the row guard has another condition than the mask.
        UnsupportedError: naming what differs.
    """
    check_work(mask.expression, site.dims[2].constant, site.dims[3].constant)
    check_guard(checker.index, checker.symbolic, site, mask)
    checker.check(site, mask)
    if not ignore_empty_rows:
        check_empty_rows(checker, site, mask)


def check_work(expression: MaskExpression, queries: int | None, keys: int | None) -> None:
    """Refuses a mask that the library would not evaluate at all lengths, or at those that are fixed.

    Raises:
        UnsupportedError: with the number of nodes.
    """
    nodes = expression.node_count
    if nodes <= _MAX_NODES_OF_ANY_LENGTH:
        return
    most = f"at most {_MAX_NODES_OF_ANY_LENGTH}"
    if queries is None or keys is None:
        raise UnsupportedError(f"its mask has {nodes} nodes, expected {most} where lengths are not fixed")
    if nodes * queries * keys > _MAX_WORK:
        raise UnsupportedError(
            f"its mask has {nodes} nodes for {queries} x {keys} pairs, expected {most} nodes, or 2^38 for all pairs"
        )


def with_or_without_guard(site: AttentionSite, work: Callable[[AttentionSite], T]) -> T:
    """The result for a site; for the site without its row guard, which then stays in the graph, where that is not proven.

    Raises:
        UnsupportedError: what ``work`` raises for the last of them.
    """
    try:
        return work(site)
    except GuardError:
        if site.unguarded is None:
            raise
        return work(site.unguarded)
