# SPDX-License-Identifier: Apache-2.0
"""The policy of fully masked rows, from the numbers that a site's masks fill in or add."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stof.errors import UnsupportedError
from stof.mask.site import AttentionSite, EmptyRows, TermKind
from stof.mask.strength import ABSORBING, FLOOR


def policy_from_fills(
    site: AttentionSite, fills: Sequence[float], fills_of_terms: Sequence[Sequence[float]] = ()
) -> EmptyRows:
    """What a fully masked row gives in the graph, from the values that forbid: of all terms, and of each where known.

    Raises:
        UnsupportedError: where it depends on which term forbids.
    """
    certain = _policy_of_any_scores(site, fills)
    if certain is not None:
        return certain
    if all(t.kind is not TermKind.ADD for t in site.terms) or (fills_of_terms and _replace_all(site, fills_of_terms)):
        return EmptyRows.MEAN  # every score of the row was replaced by the same number
    # The lowest finite number of fp32 and bf16 absorbs any score that is added to it; -1e9 those up to 32 (half
    # the distance of fp32 numbers there). That of fp16 absorbs only in fp16 arithmetic, which runtimes replace by fp32 as
    # they see fit.
    return EmptyRows.MEAN if min(_finite_fills(site, fills)) <= ABSORBING else EmptyRows.ALL


def policy_with_bias(site: AttentionSite, policy: EmptyRows, *, forbids: bool, has_bias: bool) -> EmptyRows:
    """The policy where a bias stays, which may be -inf throughout a row; ``forbids``: the mask forbids pairs itself."""
    if not has_bias or forbids or site.row_guard is not None or site.sink is not None:
        return policy
    if site.floored:
        return EmptyRows.MEAN
    return policy if site.nan_guard else EmptyRows.NAN


def has_different_strengths(site: AttentionSite, fills: Sequence[float]) -> bool:
    """Whether masks of different strength are added, so that a fully masked row may attend to those of the weakest."""
    if _policy_of_any_scores(site, fills) is not None:
        return False
    finite = _finite_fills(site, fills)
    # Two tensors that are added forbid some pairs twice: those are lower than the others.
    added = sum(t.kind is TermKind.ADD for t in site.terms)
    return len(set(finite)) > 1 or len(finite) < len(fills) or (added > 1 and len(finite) > 1)


def _policy_of_any_scores(site: AttentionSite, fills: Sequence[float]) -> EmptyRows | None:
    """The policy where it does not depend on how large scores are beside the fills."""
    # A sink takes all of a fully masked row.
    if not fills or site.zeroed or site.row_guard is not None or site.sink is not None:
        return EmptyRows.ZERO
    if site.pair_guard is not None:
        return _policy_behind_pair_guard(site, fills)
    if site.floored and max(fills) <= FLOOR:
        return EmptyRows.MEAN
    if not site.floored and all(math.isinf(f) for f in fills):
        return EmptyRows.ZERO if site.nan_guard else EmptyRows.NAN
    return None


def _finite_fills(site: AttentionSite, fills: Sequence[float]) -> list[float]:
    return [max(f, FLOOR) if site.floored else f for f in fills if site.floored or math.isfinite(f)]


def _policy_behind_pair_guard(site: AttentionSite, fills: Sequence[float]) -> EmptyRows:
    """The policy where the weights of all forbidden pairs are made 0 after the softmax."""
    assert site.pair_guard is not None
    missing = [f == -math.inf for f in fills]
    if site.pair_guard.fill is not None or site.floored or site.nan_guard or not any(missing):
        return EmptyRows.ZERO
    if not all(missing):
        raise UnsupportedError(
            f"{site.pair_guard.tensor!r} multiplies the attention weights after masks some of which fill with -inf: rows "
            "without a key would be NaN or 0 by which of them forbids"
        )
    return EmptyRows.NAN


def _replace_all(site: AttentionSite, fills_of_terms: Sequence[Sequence[float]]) -> bool:
    """Whether what is added to the scores forbids nothing, and is added before masks replace them by a number."""
    first = next((i for i, t in enumerate(site.terms) if t.kind is not TermKind.ADD), len(site.terms))
    adding = [(i, fills_of_terms[i]) for i, t in enumerate(site.terms) if t.kind is TermKind.ADD]
    return first < len(site.terms) and all(i < first and not fills for i, fills in adding)
