# SPDX-License-Identifier: Apache-2.0
"""The bound on a fused chain's work: positions computed per element read or written (docs/reference/chain-format.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from stof.errors import ModelError, UnsupportedError
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.nodes import AffineIndex

MOST_POSITIONS = 4  # computed for each element that is read or written
MOST_WORK = 1 << 30  # values computed, below which any chain runs


def check_run(description: ChainDescription, sizes: Mapping[str, int], shapes: Sequence[Sequence[int]]) -> None:
    """Refuses a chain whose work the library would refuse at these sizes.

    Args:
        description: the chain.
        sizes: the sizes of its axes.
        shapes: the shapes of its inputs.

    Raises:
        ModelError: with the counts.
    """
    positions, values = math.prod(sizes.values()), len(description.values)
    elements = sum(math.prod(sizes[a] for d in out.dims for a in d) for out in description.outs)
    for read in description.reads:
        named = {name for index in read.indices for name, factor in index.terms if factor}
        number = int(float(read.value))
        count = math.prod(shapes[number]) if number < len(shapes) else 0  # a missing input is reported elsewhere
        elements += min(count, math.prod(sizes[a] for a in named))
    if positions > MOST_POSITIONS * elements and positions * values > MOST_WORK:
        raise ModelError(
            f"a chain has {positions} positions with {values} values each, but only {elements} elements to read and write; "
            f"expected at most {MOST_POSITIONS} positions for each element, or {MOST_WORK} values altogether"
        )


def check_any_run(description: ChainDescription) -> None:
    """Refuses a chain that may exceed the bound for some sizes of its inputs.

    Raises:
        UnsupportedError: when the bound is not proven.
    """
    axes = dict(description.axes)
    fixed = {name: size.number for name, size in axes.items() if size.input < 0}
    covered = [{a for d in out.dims for a in d} for out in description.outs]
    if all(n.op != "select" for n in description.values):  # a select may read at some positions only
        covered += [_distinct_axes(read.indices, fixed) for read in description.reads]
    for names in covered:
        rest = [a for a in axes if a not in names]
        if all(a in fixed for a in rest) and math.prod(fixed[a] for a in rest) <= MOST_POSITIONS:
            return
    # Half of the bound: the library may count values that this parser does not see.
    if len(fixed) < len(axes) or math.prod(fixed.values()) * len(description.values) > MOST_WORK // 2:
        raise UnsupportedError("it reduces rows that no input has as a whole: their length is not bounded")


def _distinct_axes(indices: Sequence[AffineIndex], fixed: Mapping[str, int]) -> set[str]:
    """Axes along which a read touches a different element at each position."""
    distinct: set[str] = set()
    for index in indices:
        terms = sorted((t for t in index.terms if t[1]), key=lambda t: abs(t[1]))
        reach = 0  # largest sum of the smaller terms
        for number, (name, factor) in enumerate(terms):
            if index.op or abs(factor) <= reach or name in distinct:
                break
            distinct.add(name)
            if number + 1 < len(terms):
                if name not in fixed:
                    break
                reach += abs(factor) * (fixed[name] - 1)
    return distinct
