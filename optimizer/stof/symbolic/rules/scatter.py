# SPDX-License-Identifier: Apache-2.0
"""Rules of the operators that assign to slices or elements of a tensor."""

from __future__ import annotations

from collections.abc import Callable

from stof.symbolic.algebra.conditions import all_of, equal, less_equal, negate, select
from stof.symbolic.algebra.piecewise import to_int
from stof.symbolic.algebra.terms import Int, Scalar, integer, var
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules.movement_helpers import moved_fact, wrap_index
from stof.symbolic.tensor import Index, Shape, SymTensor

_MAX_ROWS = 16  # rows that are assigned one by one
ZERO, ONE = integer(0), integer(1)


def _scatter_nd(context: RuleContext) -> list[Fact] | None:
    """Slice assignment as exporters write it: each index tuple is its own position plus a constant, or there are few."""
    data, indices, updates = context.shape(0), context.value(1), context.value(2)
    if data is None:
        return None
    value = context.value(0)
    unknown = [Fact(context.fact(0).dtype, data)]
    _equate_updates(context, data)
    if value is None or indices is None or updates is None or str(context.attribute("reduction", "none")) != "none":
        return unknown
    depth = indices.shape[-1].constant
    if depth is None:
        return unknown
    shifts = _constant_shifts(indices, depth)
    if shifts is None:
        positions = _listed_indices(indices, depth, data)
        return (
            unknown
            if positions is None
            else [moved_fact(context, data, _with_updates(value, updates, positions, depth))]
        )
    counts = indices.shape[:-1]

    def at(index: Index) -> Scalar:
        source_index = tuple(i - s for i, s in zip(index[:depth], shifts, strict=True))
        inside = all_of(
            c for i, n in zip(source_index, counts, strict=True) for c in (less_equal(ZERO, i), less_equal(i + ONE, n))
        )
        placed = tuple(ZERO if n == ONE else i for i, n in zip(source_index, counts, strict=True))
        return select(negate(inside), value.at(index), updates.at((*placed, *index[depth:])))

    return [moved_fact(context, data, at)]


def _equate_updates(context: RuleContext, data: Shape) -> None:
    """Equates the shape of updates with that of the slices that indices name."""
    indices, updates = context.shape(1), context.shape(2)
    depth = indices[-1].constant if indices else None
    if indices is not None and updates is not None and depth is not None:
        context.equate_shapes(updates, (*indices[:-1], *data[depth:]))


def _constant_shifts(indices: SymTensor, depth: int) -> list[Int] | None:
    """The constants that index tuples [.., depth] add to their own position.

    None where these are no constants, or negative: negative indices count from the end.
    """
    rank = indices.rank - 1
    if depth != rank:
        return None
    probe = tuple(var(f"scatter{a}") for a in range(rank))
    shifts = []
    for a in range(depth):
        position = to_int(indices.at((*probe, integer(a))))
        shift = position - probe[a] if indices.shape[a] != ONE else position
        if shift.constant is None or shift.constant < 0:
            return None
        shifts.append(shift)
    return shifts


def _listed_indices(indices: SymTensor, depth: int, data: Shape) -> list[tuple[Int, ...]] | None:
    """The index tuples of a short list [n, depth]; None for other shapes."""
    sizes = indices.sizes()
    if sizes is None or len(sizes) != 2 or sizes[0] > _MAX_ROWS:
        return None
    return [
        tuple(wrap_index(to_int(indices.at((integer(i), integer(a)))), data[a]) for a in range(depth))
        for i in range(sizes[0])
    ]


def _with_updates(
    value: SymTensor, updates: SymTensor, positions: list[tuple[Int, ...]], depth: int
) -> Callable[[Index], Scalar]:
    """The elements of a tensor with updates [n, ..] at n positions."""

    def at(index: Index) -> Scalar:
        result = value.at(index)
        for i, position in enumerate(positions):
            here = all_of(equal(a, p) for a, p in zip(index, position, strict=False))
            result = select(here, updates.at((integer(i), *index[depth:])), result)
        return result

    return at


def _scatter_elements(context: RuleContext) -> list[Fact] | None:
    """Whole rows or columns are assigned, as exporters write it: few along the axis, all elements of the other axes."""
    data, indices, updates = context.shape(0), context.value(1), context.value(2)
    if data is None:
        return None
    value = context.value(0)
    axis = context.number("axis", 0) % len(data)
    count = None if indices is None else indices.shape[axis].constant
    if value is None or indices is None or updates is None or str(context.attribute("reduction", "none")) != "none":
        return [Fact(context.fact(0).dtype, data)]
    whole = all(n == d for a, (n, d) in enumerate(zip(indices.shape, data, strict=True)) if a != axis)
    if count is None or count > _MAX_ROWS or not whole:
        return [Fact(context.fact(0).dtype, data)]

    def at(index: Index) -> Scalar:
        result = value.at(index)
        for i in range(count):
            position = (*index[:axis], integer(i), *index[axis + 1 :])
            row = wrap_index(to_int(indices.at(position)), data[axis])
            result = select(equal(index[axis], row), updates.at(position), result)
        return result

    return [moved_fact(context, data, at)]


RULES: dict[str, Rule] = {
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
}
