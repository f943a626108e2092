# SPDX-License-Identifier: Apache-2.0
"""Masks of a run beside the model's own: which of two that forbid is the stronger, where no expression says what one forbids.

A caller's additive mask may be 0 and the lowest number, as the model's window is. A query all of whose keys in the window the
caller forbids attends to all keys that only one of them forbids. The operator, which leaves out what the window forbids, would
attend to those inside of it.
"""

from __future__ import annotations

import math

from stof.errors import UnsupportedError
from stof.mask.lift import FLOOR, UNDERFLOW, element, read_term
from stof.site import AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.symbolic import Real, Symbolic
from stof.symbolic.algebra.piecewise import cases
from stof.symbolic.algebra.terms import parts


def equals_in_strength(symbolic: Symbolic, site: AttentionSite, mask: LiftedMask) -> list[MaskTerm]:
    """The additive terms of a site where one that depends on data may forbid as much as those that the mask leaves out.

    Raises:
        UnsupportedError: when one of the latter is no additive term, which could stay a bias.
    """
    if mask.expression.allows_all or site.row_guard is not None or site.pair_guard is not None:
        return []
    fills = {t: _fills(symbolic, site, t) for t in site.terms if t not in mask.bias}
    weakest = max((f for own in fills.values() for f in own if math.isfinite(f)), default=-math.inf)
    rival = next((t for t in mask.by_data if _reaches(symbolic, site, t, weakest)), None)
    if weakest == -math.inf or rival is None:
        return []
    if site.zeroed:
        raise UnsupportedError(
            f"weights are made zero once more after {rival.tensor!r} was added, which is data of a run and may forbid as much as "
            "the mask: such rows are neither zeros nor sums of one; a fill of -inf makes this plain"
        )
    for term, own in fills.items():
        if term.kind is not TermKind.ADD and any(math.isfinite(f) for f in own):
            raise UnsupportedError(
                f"{rival.tensor!r} is added by data of a run and may forbid all keys that {term.tensor!r} leaves to a query, "
                f"which fills with {max(own):g}: such a query attends to other keys than the operator's; a fill of -inf makes "
                "this plain, and --empty-rows ignore accepts it"
            )
    return [t for t in site.terms if t.kind is TermKind.ADD]


def _fills(symbolic: Symbolic, site: AttentionSite, term: MaskTerm) -> tuple[float, ...]:
    try:
        found = read_term(symbolic, site, term, {}).fills
    except UnsupportedError:
        found = (-math.inf if term.fill is None else term.fill,)
    # Scores with a floor are finite: what -inf forbids is not lower than what the lowest number forbids.
    return tuple(max(f, FLOOR) for f in found) if site.floored else found


def _reaches(symbolic: Symbolic, site: AttentionSite, term: MaskTerm, level: float) -> bool:
    """Whether a term may be as low as a level: floats of an input may."""
    tensor = symbolic.value(term.tensor)
    if tensor is None:
        return False  # computed by the network, as large as scores are
    value = element(tensor, site, term)
    if not isinstance(value, Real) or any(isinstance(p, Real) and p.kind == "read" for p in parts(value)):
        return True
    numbers = [x * term.scale for _, x in cases(value) if isinstance(x, float)]
    return any(x <= level - UNDERFLOW for x in numbers)
