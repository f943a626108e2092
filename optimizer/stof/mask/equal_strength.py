# SPDX-License-Identifier: Apache-2.0
"""Run-time additive masks that may forbid as strongly as the model's own mask.

A caller's additive mask may hold 0 and the lowest number, as the model's window does. Let the caller forbid all keys in the
window of a query. In the graph this query attends to all keys that only one of the two masks forbids. In the operator, which
skips what the window forbids, it attends to those inside the window.
"""

from __future__ import annotations

import math

from stof.errors import UnsupportedError
from stof.mask.lift import element_of_pair, read_term
from stof.mask.site import AttentionSite, LiftedMask, MaskTerm, TermKind
from stof.mask.strength import FLOOR, UNDERFLOW
from stof.symbolic import Real, Symbolic
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import subterms


def find_equal_strength(symbolic: Symbolic, site: AttentionSite, mask: LiftedMask) -> list[MaskTerm]:
    """The additive terms of a site where a run-time term may forbid as strongly as the lifted ones; else none.

    Raises:
        UnsupportedError: when a lifted term is not additive, so that it cannot stay a bias.
    """
    if mask.expression.allows_all or site.row_guard is not None or site.pair_guard is not None:
        return []
    fills = {t: _fills(symbolic, site, t) for t in site.terms if t not in mask.bias}
    weakest = max((f for numbers in fills.values() for f in numbers if math.isfinite(f)), default=-math.inf)
    runtime = next((t for t in mask.by_data if _may_reach(symbolic, site, t, weakest)), None)
    if weakest == -math.inf or runtime is None:
        return []
    if site.zeroed:
        raise UnsupportedError(
            f"weights are made zero once more after {runtime.tensor!r} was added, which is known only at run time and may "
            "forbid as much as the mask: such rows are neither zeros nor sums of one; a fill of -inf makes this plain"
        )
    for term, numbers in fills.items():
        if term.kind is not TermKind.ADD and any(math.isfinite(f) for f in numbers):
            raise UnsupportedError(
                f"{runtime.tensor!r} is known only at run time and may forbid all keys that {term.tensor!r} leaves to a query, "
                f"which fills with {max(numbers):g}: such a query attends to other keys than the operator's; a fill of -inf "
                "makes this plain, and --empty-rows ignore accepts it"
            )
    return [t for t in site.terms if t.kind is TermKind.ADD]


def _fills(symbolic: Symbolic, site: AttentionSite, term: MaskTerm) -> tuple[float, ...]:
    try:
        fills = read_term(symbolic, site, term, {}).fills
    except UnsupportedError:
        fills = (-math.inf if term.fill is None else term.fill,)
    # Scores with a floor are finite: what -inf forbids is not lower than what the lowest number forbids.
    return tuple(max(f, FLOOR) for f in fills) if site.floored else fills


def _may_reach(symbolic: Symbolic, site: AttentionSite, term: MaskTerm, limit: float) -> bool:
    """Whether a term may be as low as a limit: floats of an input may."""
    tensor = symbolic.value(term.tensor)
    if tensor is None:
        return False  # computed by the network, as large as scores are
    value = element_of_pair(tensor, site, term)
    if not isinstance(value, Real) or any(isinstance(p, Real) and p.kind == "read" for p in subterms(value)):
        return True
    numbers = [x * term.scale for _, x in split_cases(value) if isinstance(x, float)]
    return any(x <= limit - UNDERFLOW for x in numbers)
