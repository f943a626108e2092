# SPDX-License-Identifier: Apache-2.0
"""How far a model's outputs may differ from those of legal runs of the original."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stof.execution.case import Case
from stof.verification.result import Comparison, Coverage

MODEL_FACTOR = 4.0  # difference ≤ 4 × that of two legal runs + 1e-6 of the output's range
_ENOUGH = 64  # elements whose range tells how large an output is


def compare_outputs(
    case: Case,
    floor: float,
    name: str,
    plain: np.ndarray,
    legal: Sequence[np.ndarray],
    found: np.ndarray,
    expanded: Sequence[np.ndarray] = (),
    *,
    undefined: bool = False,
) -> Comparison:
    """What was found beside the original's own runs.

    Args:
        case: the inputs.
        floor: what is allowed anyway, of the output's range.
        name: of the output.
        plain: the original's, without graph optimizations.
        legal: its other runs.
        found: the optimized model's.
        expanded: runs of another graph that means the same; how far they are from its first one is allowed as well.
        undefined: whether the optimized model may be finite where the original is NaN.
    """
    what = f"output {name!r}, {case}"
    if found.shape != plain.shape:
        return Comparison(what, np.inf, 0.0, False, detail=f"shape {found.shape}, expected {plain.shape}")
    if plain.dtype.kind != "f":
        same = any(np.array_equal(found, x) for x in (plain, *legal))
        return Comparison(what, 0.0 if same else np.inf, 0.0, same, coverage=Coverage(plain.size))
    alone = np.isnan(plain) & np.isfinite(found) & undefined
    odd = (np.isfinite(found) != np.isfinite(plain)) & ~alone
    if odd.any():
        return Comparison(what, np.inf, 0.0, False, detail=describe_nonfinite(odd, found, plain))
    good = np.logical_and.reduce([np.isfinite(x) for x in (plain, *legal)])
    compared, only = int(good.sum()), int(alone.sum())
    rows = tuple(int(i) for i in np.unique(np.argwhere(alone)[:, 0])) if only and alone.ndim > 1 else ()
    coverage = Coverage(compared, plain.size - compared - only, undefined=only, rows=rows)
    first, *others = (x[good].astype(np.float64) for x in (plain, *legal))
    own = found[good].astype(np.float64)
    # The range of a few numbers can be small by chance, and of one it is 0.
    span = float(first.max() - first.min()) if first.size >= _ENOUGH else float(np.abs(first).max(initial=0.0))
    # Of a few numbers, legal runs that happen to agree tell little.
    floor *= MODEL_FACTOR if first.size < _ENOUGH else 1.0
    rounded_by = [np.abs(first - x) for x in others]
    for x in expanded[1:]:
        both = good & np.isfinite(expanded[0]) & np.isfinite(x)
        rounded_by.append(np.abs(x[both].astype(np.float64) - expanded[0][both]))
    budget = MODEL_FACTOR * max(float(x.max(initial=0.0)) for x in rounded_by) + floor * span
    # Any legal run may be the nearest one.
    difference = min(float(np.abs(own - x).max(initial=0.0)) for x in (first, *others))
    return Comparison(what, difference, budget, difference <= budget, coverage=coverage)


def find_undefined_outputs(by_case: Sequence[Sequence[Comparison]], names: Sequence[str]) -> list[Comparison]:
    """A failure for each output with NaN of the original alone of which no case compared most elements.

    Args:
        by_case: the comparisons of all outputs, case by case.
        names: of the outputs.
    """
    found = []
    for i, name in enumerate(names):
        covered = [comparisons[i].coverage for comparisons in by_case]
        if any(c.undefined for c in covered) and not any(2 * c.compared > c.elements for c in covered):
            detail = (
                "NaN in the original alone, which inputs without a query that has no key should end; but of no inputs half of "
                "the elements could be compared"
            )
            found.append(Comparison(f"output {name!r}", np.inf, 0.0, False, detail=detail))
    return found


def describe_nonfinite(odd: np.ndarray, found: np.ndarray, original: np.ndarray, axes: str = "") -> str:
    """Of elements that are finite in one of the two: how many, and the first one."""
    where = tuple(int(i) for i in np.argwhere(odd)[0])
    return (
        f"inf or NaN in one of the two in {int(odd.sum())} of {odd.size} elements, first at {axes}{where}: {found[where]}, "
        f"where the original has {original[where]}"
    )
