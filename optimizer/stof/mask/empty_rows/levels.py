# SPDX-License-Identifier: Apache-2.0
"""The levels of masked scores: which masks forbid a pair decides how far its score lies below those of allowed pairs.

A softmax sees only the highest level of a row. Where no pair of a row is allowed, the row attends to the pairs of the next
level that it has: those that the weaker mask forbids, say, and not the stronger one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stof.errors import UnsupportedError
from stof.mask.site import AttentionSite, MaskTerm, TermKind
from stof.mask.strength import ABSORBING, FLOOR, UNDERFLOW
from stof.symbolic import Cond
from stof.symbolic.algebra.conditions import all_of, any_of, negate

Forbidding = frozenset[int]  # the terms of a site, by index, that forbid a pair
_MOST_TERMS = 6  # of which each may forbid a pair or not


@dataclass(frozen=True)
class Level:
    """Pairs whose scores lie equally far below those of allowed pairs.

    ``keeps_scores``: the differences of their scores are left; else all are the same number.
    """

    offset: float
    keeps_scores: bool
    pairs: tuple[Forbidding, ...]


def find_levels(
    site: AttentionSite,
    fills: Sequence[Sequence[float]],
    biases: Sequence[bool],
    is_possible: Callable[[Forbidding], bool],
) -> list[Level]:
    """The levels of a site's masked scores, the highest first: that of allowed pairs. The last may be -inf.

    Args:
        site: whose terms are applied in order, in fp32.
        fills: the numbers of each term that forbid.
        biases: which terms add other numbers, too.
        is_possible: whether there are pairs that just these terms forbid.

    Raises:
        UnsupportedError: where levels are so close that a softmax sees two of them, or a number is not certain.
    """
    if len(fills) > _MOST_TERMS or any(len(set(numbers)) > 1 for numbers in fills):
        raise UnsupportedError("a mask forbids with several numbers, or there are too many masks")
    forbidding = [i for i, (t, numbers) in enumerate(zip(site.terms, fills, strict=True)) if numbers or t.zeroes]
    pairs_by_offset: dict[float, list[tuple[bool, Forbidding]]] = {}
    for count in range(len(forbidding) + 1):
        for some in map(frozenset, itertools.combinations(forbidding, count)):
            if is_possible(some):
                offset, keeps_scores = _score_of(site, fills, biases, some)
                pairs_by_offset.setdefault(offset, []).append((keeps_scores, some))
    levels: list[Level] = []
    for offset in sorted(pairs_by_offset, reverse=True):
        if levels and levels[-1].offset - offset < -UNDERFLOW:
            raise UnsupportedError("masks forbid with numbers that are too close to each other")
        if len({keeps for keeps, _ in pairs_by_offset[offset]}) > 1 and offset > -np.inf:
            raise UnsupportedError("forbidden scores that are all the same number stand beside others as low")
        levels.append(
            Level(offset, pairs_by_offset[offset][0][0], tuple(pairs for _, pairs in pairs_by_offset[offset]))
        )
    return levels


def condition_down_to(
    levels: Sequence[Level], allowed: Sequence[Cond], is_possible: Callable[[Forbidding], bool]
) -> Cond:
    """The pairs of some levels, from the highest on; ``allowed``: the pairs that each term allows.

    A term that forbids more pairs takes none of them to a higher level, mostly. Then the largest sets of terms say it all.
    """
    pairs = [p for level in levels for p in level.pairs]
    largest = [p for p in pairs if not any(p < other for other in pairs)]
    pair_set = set(pairs)
    if all(sub in pair_set or not is_possible(sub) for p in largest for sub in _subsets(p)):
        return any_of(all_of(c for i, c in enumerate(allowed) if i not in p) for p in largest)
    return any_of(all_of(negate(c) if i in p else c for i, c in enumerate(allowed)) for p in pairs)


def _subsets(pairs: Forbidding) -> list[Forbidding]:
    return [frozenset(some) for count in range(len(pairs)) for some in itertools.combinations(pairs, count)]


def _score_of(
    site: AttentionSite, fills: Sequence[Sequence[float]], biases: Sequence[bool], forbidding: Forbidding
) -> tuple[float, bool]:
    """How far a score ends below an allowed one where some terms forbid it, and whether it still depends on the score.

    Raises:
        UnsupportedError: where a bias stays visible in place of the score.
    """
    offset, keeps_scores = np.float32(0), True
    with np.errstate(over="ignore"):
        for i, term in enumerate(site.terms):
            if i in forbidding:
                offset, keeps_scores = _forbid(
                    term, np.float32(0 if term.zeroes else fills[i][0]), offset, keeps_scores
                )
            elif biases[i] and not keeps_scores and offset > ABSORBING:
                raise UnsupportedError(f"{term.tensor!r} is added to scores that a mask made {offset:g}")
    if site.floored:
        offset = max(offset, np.float32(FLOOR))
    return float(offset), keeps_scores and bool(offset > ABSORBING)


def _forbid(term: MaskTerm, fill: np.float32, offset: np.float32, keeps_scores: bool) -> tuple[np.float32, bool]:
    if term.kind is not TermKind.ADD:
        return fill, False
    return np.float32(offset + fill), keeps_scores
