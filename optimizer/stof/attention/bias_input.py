# SPDX-License-Identifier: Apache-2.0
"""Builds the bias operand of a call from the additive terms of a site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.graph.editor import Editor
from stof.mask.score_view import ScoreView
from stof.mask.site import AttentionSite, Layout, MaskTerm, TermKind
from stof.mask.strength import LOWEST
from stof.symbolic import Symbolic
from stof.symbolic.axis_atoms import Axes, AxisAtom, size_of


def build_bias(
    editor: Editor, symbolic: Symbolic, site: AttentionSite, terms: Sequence[MaskTerm], extra: list[gs.Node]
) -> gs.Tensor:
    """The sum of the terms, in fp32; a single additive term of an accepted type is used as it is.

    Terms that meet the scores in the same axes are summed in these.
    """
    types = {symbolic.dtype(t.tensor) for t in terms}
    accepted = {TensorProto.FLOAT} if site.floored else {site.dtype, TensorProto.FLOAT}
    is_used_as_is = len(terms) == 1 and terms[0].scale == 1.0 and types <= accepted and terms[0].kind is TermKind.ADD
    by_axes: dict[Axes | None, list[MaskTerm]] = {}
    for term in terms:
        by_axes.setdefault(None if term.view is None else term.view.axes, []).append(term)
    total: gs.Tensor | None = None
    for some in by_axes.values():
        part: gs.Tensor | None = None
        for term in some:
            tensor = editor.tensors[term.tensor]
            if term.kind is not TermKind.ADD:
                tensor = _bias_from_condition(editor, extra, tensor, term.kind is TermKind.KEEP)
            elif not is_used_as_is and symbolic.dtype(term.tensor) != TensorProto.FLOAT:
                tensor = append_fp32_node(editor, extra, "Cast", [tensor], to=int(TensorProto.FLOAT))
            if term.scale != 1.0:
                factor = editor.initializer("stof_bias_scale", np.array(term.scale, np.float32))
                tensor = append_fp32_node(editor, extra, "Mul", [tensor, factor])
            part = tensor if part is None else append_fp32_node(editor, extra, "Add", [part, tensor])
        assert part is not None
        view = _joint_view(some)
        if view is not None:
            dtype = symbolic.dtype(some[0].tensor) if is_used_as_is else int(TensorProto.FLOAT)
            rank = max(len(symbolic.shape(t.tensor) or ()) for t in some)
            part = _BiasSpread(editor, extra, site, view, rank, dtype).spread(part)
        total = part if total is None else append_fp32_node(editor, extra, "Add", [total, part])
    assert total is not None
    if site.floored:  # a row of nothing but -inf and the lowest number attends all keys
        least = editor.initializer("stof_bias_floor", np.array(-LOWEST[TensorProto.FLOAT], np.float32))
        total = append_fp32_node(editor, extra, "Max", [total, least])
    return total


def _joint_view(terms: Sequence[MaskTerm]) -> ScoreView | None:
    """The view of the sum of terms that meet the scores in the same axes."""
    views = [t.view for t in terms if t.view is not None]
    if not views:
        return None
    return replace(views[0], varies=tuple(any(column) for column in zip(*(v.varies for v in views), strict=True)))


def _bias_from_condition(editor: Editor, extra: list[gs.Node], tensor: gs.Tensor, keeps: bool) -> gs.Tensor:
    """0 where a condition keeps scores, -inf elsewhere."""
    condition = editor.variable("stof_bias_kept", TensorProto.BOOL)
    extra.append(editor.node("Cast", condition.name, [tensor], [condition], to=int(TensorProto.BOOL)))
    zero, minus = (editor.initializer("stof_bias_fill", np.array(x, np.float32)) for x in (0.0, -np.inf))
    return append_fp32_node(editor, extra, "Where", [condition, zero, minus] if keeps else [condition, minus, zero])


Size: TypeAlias = int | gs.Tensor  # a size, or the vector of one element that holds it


@dataclass
class _BiasSpread:
    """Writes a tensor that meets the scores in other axes as one that broadcasts to [B, H, S, T].

    Attributes:
        view: the axes in which it meets them.
        rank: of the tensor.
        dtype: its element type.
    """

    editor: Editor
    extra: list[gs.Node]
    site: AttentionSite
    view: ScoreView
    rank: int
    dtype: int
    _cached: dict[object, gs.Tensor] = field(default_factory=dict)

    def spread(self, tensor: gs.Tensor) -> gs.Tensor:
        """The tensor with its axes split into parts, transposed, broadcast and merged, as far as each is needed."""
        view = self.view
        missing = len(view.axes) - self.rank
        groups = [group if varies else () for group, varies in zip(view.axes, view.varies, strict=True)][missing:]
        present = [part for group in groups for part in group]
        wanted = [view.parts(axis) if view.varies_along(axis) else () for axis in range(4)]
        parts = [part for group in wanted for part in group]
        if [()] * (4 - len(groups)) + groups == wanted:
            return tensor
        source = tensor
        ordered = [part for part in parts if part in present]
        if ordered != present:
            if groups != [(part,) for part in present]:
                tensor = self._reshape(tensor, [self._size(part, source) for part in present])
            perm = [present.index(part) for part in ordered]
            tensor = self._add("Transpose", [tensor], self.dtype, perm=perm)
            groups = [(part,) for part in ordered]
        if ordered != parts:
            alone = [(part,) if part in present else () for part in parts]
            if groups != alone:
                tensor = self._reshape(tensor, [self._size(p, source) if p in present else 1 for p in parts])
            target = [1 if part in present else self._size(part, source) for part in parts]
            tensor = self._add("Expand", [tensor, self._vector(target)], self.dtype)
        return self._reshape(tensor, [self._merged_size(axis, group, source) for axis, group in enumerate(wanted)])

    def _merged_size(self, axis: int, parts: Sequence[AxisAtom], source: gs.Tensor) -> Size:
        if len(parts) == 1:
            return self._size(parts[0], source)
        whole = size_of(parts).constant
        return self._total(axis) if whole is None else whole

    def _size(self, part: AxisAtom, source: gs.Tensor) -> Size:
        """The size of a part; ``source`` is the tensor before it is moved."""
        part_source = self.view.sources()[part]
        if part_source.constant is not None:
            return part_source.constant
        if part not in self._cached:
            if part_source.axis is not None:
                size: Size = self._axis_size(source, part_source.axis - len(self.view.axes) + self.rank)
            else:
                size = self._total(part_source.total or 0)
            for other in part_source.over:
                size = self._add("Div", [self._tensor(size), self._tensor(self._size(other, source))])
            self._cached[part] = self._tensor(size)
        return self._cached[part]

    def _total(self, axis: int) -> Size:
        """The size of an axis of [B, H, S, T], from query and key."""
        site = self.site
        if axis == 1:
            return site.num_heads
        operand = site.key if axis == 3 else site.query
        tensor = self.editor.tensors[operand.tensor]
        if axis == 0 and operand.joined:
            return self._add("Mul", [self._axis_size(tensor, 0), self._axis_size(tensor, 1)])
        operand_axis = 0 if axis == 0 else 2 if operand.layout is Layout.BHSD else 1
        operand_axis = operand.perm[operand_axis] if operand.perm else operand_axis
        # Batch or heads in two axes stand before the length.
        more = operand.joined or (operand.grouped and operand.layout is Layout.BHSD)
        return self._axis_size(tensor, operand_axis + (1 if operand_axis and more else 0))

    def _axis_size(self, tensor: gs.Tensor, axis: int) -> gs.Tensor:
        shape = self._cached.get(tensor.name)
        if shape is None:
            shape = self._cached[tensor.name] = self._add("Shape", [tensor])
        return self._add("Gather", [shape, self._vector([axis])])

    def _reshape(self, tensor: gs.Tensor, sizes: Sequence[Size]) -> gs.Tensor:
        """A Reshape; the first size that is no number is left to it."""
        first = next((i for i, size in enumerate(sizes) if not isinstance(size, int)), -1)
        target = self._vector([-1 if i == first else size for i, size in enumerate(sizes)])
        return self._add("Reshape", [tensor, target], self.dtype)

    def _vector(self, sizes: Sequence[Size]) -> gs.Tensor:
        if all(isinstance(size, int) for size in sizes):
            return self.editor.initializer("stof_bias_sizes", np.array(sizes, np.int64))
        return self._add("Concat", [self._tensor(size) for size in sizes], axis=0)

    def _tensor(self, size: Size) -> gs.Tensor:
        return self._vector([size]) if isinstance(size, int) else size

    def _add(
        self, op: str, inputs: list[gs.Tensor], dtype: int = int(TensorProto.INT64), **attributes: object
    ) -> gs.Tensor:
        out = self.editor.variable(f"stof_bias_{op.lower()}", dtype)
        self.extra.append(self.editor.node(op, out.name, inputs, [out], **attributes))
        return out


def append_fp32_node(
    editor: Editor, extra: list[gs.Node], op: str, inputs: list[gs.Tensor], **attributes: object
) -> gs.Tensor:
    """Appends a node with one fp32 output and returns that."""
    out = editor.variable("stof_bias", TensorProto.FLOAT)
    extra.append(editor.node(op, out.name, inputs, [out], **attributes))
    return out
