# SPDX-License-Identifier: Apache-2.0
"""Masks of attention that is rounded to 8 bits: which of them the operator computes as the graph does."""

from __future__ import annotations

from stof.errors import UnsupportedError
from stof.mask.site import AttentionSite, EmptyRows, LiftedMask


def check_rounded_mask(site: AttentionSite, mask: LiftedMask) -> None:
    """Refuses masks whose effect depends on how they are rounded.

    Raises:
        UnsupportedError: for a bias that the graph rounds before it adds it, and for levels of masks.
    """
    assert site.roundings is not None
    for term in mask.bias:
        if term.tensor in site.roundings.unrounded:
            raise UnsupportedError(
                f"bias {term.tensor!r} is rounded to 8 bits before it is added, and it holds more than a mask does; "
                "--dequantize-attention computes the site in float"
            )
    if mask.weaker is not None:
        raise UnsupportedError(
            "fully masked rows attend by a weaker mask, which roundings to 8 bits do not keep apart from the stronger one; "
            "--empty-rows ignore, or --dequantize-attention"
        )
    if site.roundings.biased_score is not None and mask.empty_rows is EmptyRows.ALL:
        raise UnsupportedError(
            "fully masked rows attend all keys by scores, which the rounding behind the mask makes equal; "
            "--empty-rows ignore, or --dequantize-attention"
        )
