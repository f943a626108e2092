# SPDX-License-Identifier: Apache-2.0
"""Where the axes of a moved tensor lie in its source.

An axis of a tensor is an ordered product of *atoms*: axes of the source tensor, or factors of them. Transpose permutes
axes, Reshape regroups atoms, Expand adds a broadcast atom.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from stof.symbolic.algebra.terms import Int, integer
from stof.symbolic.tensor import Shape

ONE = integer(1)


@dataclass(frozen=True)
class AxisAtom:
    """A factor of an axis of the source."""

    axis: int  # -1: broadcast
    part: int  # which factor of the axis, from the outermost; which broadcast atom
    size: Int


Axes = tuple[tuple[AxisAtom, ...], ...]


def whole_axes(shape: Shape) -> Axes:
    """The axes of a tensor that is its own source."""
    return tuple((AxisAtom(a, 0, d),) for a, d in enumerate(shape))


def without_ones(axes: Axes) -> Axes:
    """The axes without atoms of size 1."""
    return tuple(tuple(a for a in group if a.size != ONE) for group in axes)


def merge_parts(axes: Axes) -> Axes:
    """The axes with adjacent factors of one source axis as one atom, as they are where it was split and merged again."""
    groups = [list(group) for group in without_ones(axes)]
    for i in range(len(groups)):
        for j in range(len(groups[i]) - 1, 0, -1):
            one, other = groups[i][j - 1 : j + 1]
            if one.axis == other.axis >= 0 and other.part == one.part + 1:
                groups[i][j - 1 : j + 1] = [replace(one, size=one.size * other.size)]
                groups = [renumber(group, one, -1) for group in groups]
    return tuple(tuple(group) for group in groups)


def ends_with_whole_axes(axes: Axes, rank: int) -> bool:
    """Whether the last two of some axes are those of their source, of this rank, and the others hold the rest in order."""
    *outer, rows, columns = merge_parts(axes)
    if any([(a.axis, a.part) for a in g] not in ([], [(rank - n, 0)]) for g, n in ((rows, 2), (columns, 1))):
        return False
    rest = [(a.axis, a.part) for group in outer for a in group]
    return rest == sorted(rest) and all(0 <= axis < rank - 2 for axis, _ in rest)


def size_of(group: Sequence[AxisAtom]) -> Int:
    """The size of an axis."""
    total = ONE
    for atom in group:
        total = total * atom.size
    return total


def regroup(axes: Axes, result: Shape) -> Axes | None:
    """The same atoms in the same order as the axes of another shape; an atom may be split in two. None where they do not fit."""
    pending = [a for group in axes for a in group if a.size != ONE]
    grouped: list[tuple[AxisAtom, ...]] = []
    for size in result:
        group: list[AxisAtom] = []
        while size_of(group) != size:
            if not pending:
                return None
            rest = size.divide(size_of(group))
            if rest is None:
                return None
            atom = pending.pop(0)
            if rest.divide(atom.size) is not None:
                group.append(atom)
                continue
            lower = atom.size.divide(rest)
            if lower is None or atom.axis < 0:
                return None
            grouped = [tuple(renumber(g, atom, 1)) for g in grouped]
            group, pending = (renumber(g, atom, 1) for g in (group, pending))
            group.append(replace(atom, size=rest))
            pending.insert(0, AxisAtom(atom.axis, atom.part + 1, lower))
        grouped.append(tuple(group))
    return tuple(grouped) if not pending else None


def renumber(group: Sequence[AxisAtom], atom: AxisAtom, by: int) -> list[AxisAtom]:
    """The atoms, with ``by`` added to the part of those that follow ``atom`` in the same axis."""
    return [replace(a, part=a.part + by) if a.axis == atom.axis and a.part > atom.part else a for a in group]
