# SPDX-License-Identifier: Apache-2.0
"""Comparisons of an operator over a KV cache, and of the node that it replaced, with the contract in fp64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stof.arguments.precisions import RoundedOperands
from stof.cached_attention.node_site import NodeSite
from stof.verification.array_distance import largest_difference, largest_number, ulp_of_largest
from stof.verification.compare import describe_nonfinite
from stof.verification.result import Comparison, Coverage

_FACTOR = 2.0  # operator error ≤ 2 × that of the contract in the site's own type + 4 ulp
_ORIGINAL_FACTOR = 16.0  # the replaced nodes sum in other orders
_ULPS = 4


@dataclass(frozen=True, eq=False)
class NarrowResult:
    """The output of a node whose products may be computed in a narrower precision.

    Attributes:
        output: the contract with operands that are rounded as kernels round them, fp64.
        slack: how far a kernel may be from it.
    """

    output: np.ndarray
    slack: float

    @classmethod
    def of(cls, precision: RoundedOperands, output: np.ndarray, values: np.ndarray) -> NarrowResult:
        """``values``: those that were attended; undefined ones are NaN."""
        return cls(output, precision.slack * largest_number(values))

    def distance(self, computed: np.ndarray, exact: np.ndarray) -> float:
        """The largest distance of elements, each to the nearer one of both contracts. A kernel may compute in full precision."""
        rounded = np.maximum(np.abs(computed.astype(np.float64) - self.output) - self.slack, 0.0)
        return float(np.minimum(rounded, np.abs(computed.astype(np.float64) - exact)).max(initial=0.0))


def make_failure(site: NodeSite, detail: str) -> Comparison:
    """A comparison of nothing, where the operator does not run or its node is wrong."""
    return Comparison(f"site {site.name!r}", np.inf, 0.0, False, site.name, detail)


def compare_original(site: NodeSite, original: np.ndarray, exact: np.ndarray, single: np.ndarray) -> Comparison | None:
    """A failed comparison where the replaced node's output differs from the contract; None where it agrees.

    Args:
        site: the site.
        original: what the node computed.
        exact: the contract in fp64.
        single: the contract in fp32.
    """
    away = largest_difference(original, exact)
    budget = _ORIGINAL_FACTOR * (largest_difference(single, exact) + _ULPS * ulp_of_largest(exact, original.dtype))
    if np.isfinite(away) and away <= budget:
        return None
    detail = "the replaced node computes something else than the operator's contract"
    return Comparison(f"site {site.name!r}", away, budget, False, site.name, detail)


def compare_with_contract(
    site: NodeSite,
    label: str,
    computed: np.ndarray,
    exact: np.ndarray,
    rounded: np.ndarray,
    dtype: np.dtype,
    unused: int = 0,
    narrow: NarrowResult | None = None,
) -> Comparison:
    """One output of the operator beside the contract.

    Args:
        site: the site.
        label: what is compared, for people.
        computed: the output, of the operator.
        exact: the contract in fp64.
        rounded: the contract in fp32, with values rounded to the site's type.
        dtype: the site's type.
        unused: how many elements of the output are left out, since nothing reads them.
        narrow: the contract with rounded operands, where the node allows it.
    """
    odd = ~np.isfinite(computed.astype(np.float32))
    if odd.any():
        return make_failure(site, f"{label}: {describe_nonfinite(odd, computed, exact)}")
    away = largest_difference(computed, exact)
    if narrow is not None:
        away = narrow.distance(computed, exact)
    budget = _FACTOR * largest_difference(rounded, exact) + _ULPS * ulp_of_largest(exact, dtype)
    ok = bool(np.isfinite(away) and away <= budget)
    coverage = Coverage(int(computed.size), unused=unused)
    return Comparison(f"site {site.name!r}", away, budget, ok, site.name, "" if ok else label, coverage)


def worst_of(results: Sequence[Comparison]) -> Comparison:
    """A failed comparison where there is one, else that nearest to its budget; it covers all elements that were compared.

    Its relative RMS is the largest one.
    """

    def badness(c: Comparison) -> tuple[bool, float]:
        return not c.ok, c.difference / c.budget if c.budget else c.difference

    worst = max(results, key=badness)
    whole = Coverage(sum(c.coverage.compared for c in results), unused=sum(c.coverage.unused for c in results))
    errors = [c.relative_rms for c in results if c.relative_rms is not None]
    return replace(worst, coverage=whole, relative_rms=max(errors, default=None))
