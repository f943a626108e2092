# SPDX-License-Identifier: Apache-2.0
"""Masks of attention that is rounded to 8 bits: which of them the operator computes as the graph does."""

from __future__ import annotations

from stof.attention.quantized.score_roundings import RoundingError
from stof.mask.site import FORBIDDING_VALUE, AttentionSite, EmptyRows, LiftedMask


def check_rounded_mask(site: AttentionSite, mask: LiftedMask) -> None:
    """Refuses masks whose effect depends on how they are rounded.

    Raises:
        RoundingError: for a bias that the graph rounds before it adds it, and for levels of masks.
    """
    assert site.roundings is not None
    for term in mask.bias:
        if term.tensor in site.roundings.unrounded:
            raise RoundingError(
                f"bias {term.tensor!r} is rounded to 8 bits before it is added, and it holds more than a mask does"
            )
    lowest = site.roundings.lowest
    if (
        site.roundings.biased_score is not None
        and not mask.expression.allows_all
        and (lowest is None or lowest > FORBIDDING_VALUE)
    ):
        raise RoundingError(
            f"the rounding behind the mask takes masked scores to {'an unknown number' if lowest is None else f'{lowest:.4g}'}, "
            "which does not forbid"
        )
    if mask.weaker is not None:
        raise RoundingError(
            "fully masked rows attend by a weaker mask, which roundings to 8 bits do not keep apart from the stronger one; "
            "--empty-rows ignore leaves them out"
        )
    if site.roundings.biased_score is not None and mask.empty_rows is EmptyRows.ALL:
        raise RoundingError(
            "fully masked rows attend all keys by scores, which the rounding behind the mask makes equal; "
            "--empty-rows ignore leaves them out"
        )
