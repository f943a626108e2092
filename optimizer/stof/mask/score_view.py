# SPDX-License-Identifier: Apache-2.0
"""The axes in which a mask or bias meets the scores, where these are not [B, H, S, T] themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stof.errors import UnsupportedError
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.terms import Int, integer, of_atom
from stof.symbolic.axis_atoms import ONE, Axes, AxisAtom, size_of
from stof.symbolic.tensor import Index, Shape


@dataclass(frozen=True)
class SizeSource:
    """Where the size of a part comes from: a number, or the size of a whole axis divided by those of other parts.

    ``axis``: the tensor's own; ``total``: that axis of [B, H, S, T].
    """

    constant: int | None = None
    axis: int | None = None
    total: int | None = None
    over: tuple[AxisAtom, ...] = ()


@dataclass(frozen=True)
class ScoreView:
    """The axes of scores as a tensor meets them: products of parts of [B, H, S, T], or of the MatMul's result until H is known.

    Merged heads are one axis of two parts; windows, groups of heads and grids of queries and keys are parts in axes of their
    own. An axis of size 1 has no part. ``varies``: the axes in which the tensor has the axis's size; elsewhere it has size 1.
    """

    axes: Axes
    varies: tuple[bool, ...] = ()

    def of_tensor(self, shape: Shape) -> ScoreView:
        """The view for a tensor of this shape.

        Raises:
            UnsupportedError: when it has more axes.
        """
        missing = len(self.axes) - len(shape)
        if missing < 0:
            raise UnsupportedError(f"a mask has {len(shape)} axes, the scores that it meets {len(self.axes)}")
        return replace(self, varies=(*(False for _ in range(missing)), *(d != ONE for d in shape)))

    def parts(self, axis: int) -> tuple[AxisAtom, ...]:
        """The parts of an axis of [B, H, S, T], outermost first."""
        return tuple(sorted((a for group in self.axes for a in group if a.axis == axis), key=lambda a: a.part))

    def splits(self, axis: int) -> bool:
        """Whether an axis of [B, H, S, T] lies in several parts."""
        return len(self.parts(axis)) > 1

    @property
    def splits_heads_alone(self) -> bool:
        """Whether heads lie in two axes, and all other axes are those of [B, H, S, T]."""
        return self.splits(1) and all(len(group) < 2 for group in self.axes) and not any(map(self.splits, (0, 2, 3)))

    def varies_along(self, axis: int) -> bool:
        """Whether the tensor differs along an axis of [B, H, S, T]."""
        groups = zip(self.axes, self.varies, strict=True)
        return any(varies and any(a.axis == axis for a in group) for group, varies in groups)

    def element_index(self, index: Index) -> Index:
        """The index of the element that meets the score at (b, h, q, k), before broadcasting."""
        positions: dict[AxisAtom, Int] = {}
        for axis, position in enumerate(index):
            parts = self.parts(axis)
            for i, part in enumerate(parts):
                within, outer = size_of(parts[i + 1 :]), position
                if within != ONE:
                    outer = _divide(outer, within, "division")
                positions[part] = _divide(outer, part.size, "modulo") if i else outer
        indices = []
        for group in self.axes:
            total = integer(0)
            for part in group:
                total = total * part.size + positions[part]
            indices.append(total)
        return tuple(indices)

    def sources(self) -> dict[AxisAtom, SizeSource]:
        """Where the sizes of parts come from, each after those that it needs; without parts of which no size is known."""
        sources = {a: SizeSource(a.size.constant) for g in self.axes for a in g if a.size.constant is not None}
        for i, group in enumerate(self.axes):
            if len(group) == 1 and self.varies[i]:
                sources.setdefault(group[0], SizeSource(axis=i))
        wholes: list[tuple[Sequence[AxisAtom], SizeSource]] = [(self.parts(c), SizeSource(total=c)) for c in range(4)]
        wholes += [(group, SizeSource(axis=i)) for i, group in enumerate(self.axes) if self.varies[i]]
        while True:
            before = len(sources)
            sizes = {a.size: source for a, source in sources.items()}
            for parts, whole in wholes:
                unknown = [a for a in parts if a not in sources]
                if len(unknown) == 1:
                    sources[unknown[0]] = replace(whole, over=tuple(a for a in parts if a != unknown[0]))
                for part in unknown:
                    if part.size in sizes:
                        sources[part] = sizes[part.size]
            if len(sources) == before:
                return sources

    def needed_parts(self) -> tuple[AxisAtom, ...]:
        """The parts whose sizes are needed to spread a tensor: of axes that it differs along in some parts."""
        return tuple(a for axis in range(4) if self.splits(axis) and self.varies_along(axis) for a in self.parts(axis))

    def spread(self, array: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
        """A tensor's value as it broadcasts to [B, H, S, T] of these sizes.

        Raises:
            ValueError: when it does not.
        """
        array = array.reshape((1,) * (len(self.axes) - array.ndim) + array.shape)
        part_sizes = self._part_sizes(array.shape, sizes)
        order = [a for group in self.axes for a in group]
        split = []
        for group, varies, size in zip(self.axes, self.varies, array.shape, strict=True):
            split += [size] if len(group) == 1 else [part_sizes[a] if varies else 1 for a in group]
        array = array.reshape(split)
        array = array.transpose([order.index(a) for axis in range(4) for a in self.parts(axis)])
        full: list[int] = []
        merged: list[int] = []
        for axis in range(4):
            parts = self.parts(axis)
            axis_sizes = list(array.shape[len(full) : len(full) + len(parts)])
            if len(parts) > 1 and self.varies_along(axis):
                axis_sizes = [part_sizes[a] for a in parts]
            full += axis_sizes
            merged.append(int(np.prod(axis_sizes, dtype=np.int64)))
        spread: np.ndarray = np.broadcast_to(array, full).reshape(merged)
        return spread

    def _part_sizes(self, shape: Sequence[int], sizes: Sequence[int]) -> Mapping[AxisAtom, int]:
        part_sizes: dict[AxisAtom, int] = {}
        for part, source in self.sources().items():
            if source.constant is not None:
                part_sizes[part] = source.constant
                continue
            whole = shape[source.axis] if source.axis is not None else sizes[source.total or 0]
            by = int(np.prod([part_sizes[a] for a in source.over], dtype=np.int64))
            if by and whole % by:
                raise ValueError(f"an axis of {whole} is no multiple of {by}")
            part_sizes[part] = whole // by if by else 0
        return part_sizes


def _divide(index: Int, by: Int, word: str) -> Int:
    """Quotient or remainder; one of a size that is no number stands for itself, and no expression is made of it."""
    if by.constant is None:
        return of_atom("opaque", word, index, by)
    return floor_div(index, by.constant) if word == "division" else floor_mod(index, by.constant)


def name_parts(view: ScoreView, rank: int, batch: Int, heads: int, *, is_grouped: bool) -> ScoreView | None:
    """The view by parts of [B, H, S, T], from that by parts of the MatMul's result; None where its parts are no heads.

    Args:
        view: by parts of the result of the MatMul.
        rank: of that result: 3 where batch and heads are merged, 5 where heads (``is_grouped``) or the batch lie in two axes.
        batch: B.
        heads: H.
        is_grouped: of a result of rank 5.
    """
    of = {3: (0, 2, 3), 4: (0, 1, 2, 3), 5: (0, 1, 1, 2, 3) if is_grouped else (0, 0, 1, 2, 3)}[rank]
    atoms = sorted((a for group in view.axes for a in group), key=lambda a: (a.axis, a.part))
    merged = [a for a in atoms if a.axis == 0] if rank == 3 else []
    sizes: dict[AxisAtom, list[tuple[int, Int]]] = {a: [(of[a.axis], a.size)] for a in atoms}
    if len(merged) == 1:
        sizes[merged[0]] = [(0, batch), (1, integer(heads))]
    elif merged:
        heads_left = integer(heads)
        for atom in reversed(merged):
            rest, outer = heads_left.divide(atom.size), atom.size.divide(heads_left)
            if heads_left == ONE:
                continue
            if rest is None and outer is None:
                return None
            sizes[atom] = [(1, atom.size)] if rest is not None else [(0, outer or ONE), (1, heads_left)]
            heads_left = rest or ONE
        if heads_left != ONE:
            return None
    count = [0, 0, 0, 0]
    named: dict[AxisAtom, list[AxisAtom]] = {}
    for atom in atoms:
        named[atom] = []
        for axis, size in sizes[atom]:
            if size != ONE:
                named[atom].append(AxisAtom(axis, count[axis], size))
                count[axis] += 1
    return replace(view, axes=tuple(tuple(b for a in group for b in named[a]) for group in view.axes))
