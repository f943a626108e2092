# SPDX-License-Identifier: Apache-2.0
"""Finds the tensor and the memory layout from which a MatMul operand comes, and the layouts in which a result can be written.

``move_paths`` gives the paths of movement operators as maps of axes. So every path says where batch, heads, rows and size
lie in the source, however it is spelled: 3-D or 4-D transposes, GQA by Unsqueeze-Expand-Reshape, packed heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx

from stof.attention.move_paths import MovePath, is_move, move_paths, scalar_factor, trace_axes
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe
from stof.mask.site import Layout, Operand
from stof.symbolic import Int, Symbolic, integer
from stof.symbolic.axis_atoms import ONE, Axes, AxisAtom, renumber, size_of


@dataclass(frozen=True)
class OperandLayout:
    """A candidate for a query, key or value operand: tensor, layout, heads and sizes."""

    operand: Operand
    dtype: int
    batch: Int
    heads: int  # of the tensor itself: G where they are repeated for H
    rows: Int
    size: int
    repeat: int  # H // G
    scale: float
    batch_axes: tuple[Int, ...] = ()  # sizes of the MatMul operand's two batch axes, where it has two
    groups: tuple[int, ...] = ()  # sizes of the MatMul operand's two head axes, where it has two


def check_axes(symbolic: Symbolic, node: onnx.NodeProto, role: str) -> None:
    """Refuses a MatMul that broadcasts one operand over the batch of the other, where its first axis meets the heads.

    Raises:
        UnsupportedError: one operand of ``node`` has fewer axes than the other and is no single matrix.
    """
    first, second = symbolic.shape(node.input[0]), symbolic.shape(node.input[1])
    if first is None or second is None or len(first) == len(second):
        return
    fewer = min(first, second, key=len)
    if any(d != ONE for d in fewer[:-2]):
        raise UnsupportedError(
            f"{describe(node)}: the {role} has {len(second)} axes where the other operand has {len(first)}, expected as many: "
            "heads are repeated for every batch"
        )


def _drop_ones(group: Sequence[AxisAtom]) -> list[AxisAtom]:
    return [a for a in group if a.size != ONE]


def layout_candidates(
    index: GraphIndex,
    symbolic: Symbolic,
    tensor: str,
    *,
    transposed: bool,
    order: tuple[int, ...] = (),
    grouped: bool = False,
) -> list[OperandLayout]:
    """The layouts from which the op can read a MatMul operand; of each element type the best is last.

    The farther away the source, the more copies the op makes unnecessary. A tensor that the graph computes anyway, for
    another consumer, is as good as its source and ends the search.

    Args:
        index: of the graph.
        symbolic: shapes of its tensors.
        tensor: the operand, [.., rows, D].
        transposed: it is [.., D, rows] instead.
        order: permutation of the tensor's axes that gives that shape, where it differs.
        grouped: an operand of five axes is [B, G, R, .., ..]; otherwise its first two axes are the batch.
    """
    candidates: list[OperandLayout] = []
    for path in move_paths(index, symbolic, tensor):
        axes = trace_axes(symbolic, path)
        if axes is None and path.nodes:
            break
        if axes is None or len(axes) < 3:
            continue
        axes = tuple(axes[i] for i in order) if order else axes
        rows, size = (axes[-1], axes[-2]) if transposed else (axes[-2], axes[-1])
        if grouped:
            heads = _match_split_heads(
                symbolic, path, (*axes[:-2], ()) if order and len(axes) == 4 else axes[:-2], rows, size
            )
        else:
            batch = [a for group in axes[:-2] for a in group]
            classify = _match_split_batch if len(axes) == 5 else _match_layout
            heads = classify(symbolic, path, batch, rows, size)
        if heads is None:
            continue
        # A layout that needs a transposition is the last choice.
        candidates.insert(0 if heads.operand.perm else len(candidates), heads)
        if _is_materialized(index, symbolic, path.source):
            break
    # [B*H, S, D] is also a layout of B*H batches with one head: the worse choice, since masks need the heads.
    return sorted(candidates, key=lambda h: not any(_separates_heads(o, h) for o in candidates))


def _separates_heads(one: OperandLayout, other: OperandLayout) -> bool:
    """Whether a layout has heads where another one counts them as batches."""
    by_parts = one.operand.layout is Layout.BSN or not one.operand.perm
    return other.heads == 1 < one.heads and by_parts and other.batch == one.batch * integer(one.heads * one.repeat)


def _is_materialized(index: GraphIndex, symbolic: Symbolic, tensor: str) -> bool:
    if tensor in index.outputs or tensor in index.captured or tensor in index.materialized:
        return True
    users = [n for n in index.consumers(tensor) if n.op_type not in ("Shape", "MatMul", "FusedMatMul")]
    return any(not is_move(symbolic, n) and scalar_factor(symbolic, n) is None for n in users)


def _match_layout(
    symbolic: Symbolic, path: MovePath, batch: Sequence[AxisAtom], rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> OperandLayout | None:
    shape = symbolic.shape(path.source)
    if shape is None:
        return None
    dtype = symbolic.dtype(path.source)
    whole = [AxisAtom(a, 0, d) for a, d in enumerate(shape)]
    if len(shape) == 4:
        for layout, head_axis, row_axis in ((Layout.BHSD, 1, 2), (Layout.BSHD, 2, 1)):
            heads, width = shape[head_axis].constant, shape[3].constant
            repeat = _repeat_count(batch, [whole[0], whole[head_axis]])
            fits = _drop_ones(rows) == _drop_ones([whole[row_axis]]) and _drop_ones(size) == _drop_ones([whole[3]])
            if heads and width and repeat and fits:
                operand = Operand(path.source, layout)
                return OperandLayout(operand, dtype, shape[0], heads, shape[row_axis], width, repeat, path.scale)
        perm = _find_transposition(whole, batch, rows, size)
        if perm is not None:
            b, h, r, d = (shape[a] for a in perm)
            if h.constant and d.constant:
                operand = Operand(path.source, Layout.BHSD, perm)
                return OperandLayout(operand, dtype, b, h.constant, r, d.constant, _broadcast_count(batch), path.scale)
    if len(shape) == 3 and len(_drop_ones(size)) == 1:
        head_size = _drop_ones(size)[0]
        if head_size.axis < 0:
            return None
        heads_int = shape[head_size.axis].divide(head_size.size)
        heads, width = (None if heads_int is None else heads_int.constant), head_size.size.constant
        if not heads or not width:
            return None
        split = head_size.part == 1 if heads > 1 else head_size.part == 0
        inner = AxisAtom(head_size.axis, 0, integer(heads))
        # The second is nn.MultiheadAttention of torch (length before batch), the third follows a convolution.
        for perm in ((0, 1, 2), (1, 0, 2), (0, 2, 1)):
            repeat = _repeat_count(batch, [whole[perm[0]], inner])
            if head_size.axis == perm[2] and split and repeat and _drop_ones(rows) == _drop_ones([whole[perm[1]]]):
                operand = Operand(path.source, Layout.BSN, () if perm == (0, 1, 2) else perm)
                return OperandLayout(operand, dtype, shape[perm[0]], heads, shape[perm[1]], width, repeat, path.scale)
    return None


def _match_split_batch(
    symbolic: Symbolic, path: MovePath, batch: Sequence[AxisAtom], rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> OperandLayout | None:
    """The layout of an operand of five axes, the first two of which are the batch (blocks of a sequence, for example)."""
    shape = symbolic.shape(path.source)
    if shape is None or len(shape) != 5:
        return None
    whole = [AxisAtom(a, 0, d) for a, d in enumerate(shape)]
    for layout, head_axis, row_axis in ((Layout.BHSD, 2, 3), (Layout.BSHD, 3, 2)):
        heads, width = shape[head_axis].constant, shape[4].constant
        wanted = [whole[a] for a in (0, 1, head_axis, row_axis, 4)]
        if heads and width and [*batch, *rows, *size] == wanted:
            operand, dtype = Operand(path.source, layout, joined=True), symbolic.dtype(path.source)
            return OperandLayout(
                operand, dtype, shape[0] * shape[1], heads, shape[row_axis], width, 1, path.scale, shape[:2]
            )
    return None


def _match_split_heads(
    symbolic: Symbolic, path: MovePath, outer: Axes, rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> OperandLayout | None:
    """The layout of an operand of five axes, the second and third of which are its heads: groups, and heads of a group."""
    shape = symbolic.shape(path.source)
    if shape is None or len(outer) != 3:
        return None
    batch, *of_heads = (size_of(group) for group in outer)
    groups = tuple(s.constant or 0 for s in of_heads)
    count = groups[0] * groups[1]
    if not count:
        return None
    if len(shape) == 5:
        whole = [AxisAtom(a, 0, d) for a, d in enumerate(shape)]
        for layout, head_axis, row_axis in ((Layout.BHSD, 1, 3), (Layout.BSHD, 2, 1)):
            wanted = [[whole[a]] for a in (0, head_axis, head_axis + 1, row_axis, 4)]
            if shape[4].constant and [list(g) for g in (*outer, rows, size)] == wanted:
                operand, dtype = Operand(path.source, layout, grouped=True), symbolic.dtype(path.source)
                return OperandLayout(
                    operand, dtype, batch, count, shape[row_axis], shape[4].constant, 1, path.scale, groups=groups
                )
        return None
    merged_layout = _match_layout(symbolic, path, *_merge_head_atoms(outer, rows, size))
    if merged_layout is None or merged_layout.batch != batch or merged_layout.heads * merged_layout.repeat != count:
        return None
    return replace(merged_layout, groups=groups)


def _merge_head_atoms(
    outer: Axes, rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> tuple[list[AxisAtom], list[AxisAtom], list[AxisAtom]]:
    """The atoms with the two head axes as one atom, where they are consecutive parts of one axis."""
    batch, rest = list(outer[0]), [list(rows), list(size)]
    heads = _drop_ones([a for group in outer[1:] for a in group])
    for i in range(len(heads) - 1, 0, -1):
        one, other = heads[i - 1 : i + 1]
        if one.axis == other.axis >= 0 and other.part == one.part + 1:
            heads[i - 1 : i + 1] = [replace(one, size=one.size * other.size)]
            batch, heads, *rest = (renumber(g, one, -1) for g in (batch, heads, *rest))
    return [*batch, *heads], rest[0], rest[1]


def _find_transposition(
    whole: Sequence[AxisAtom], batch: Sequence[AxisAtom], rows: Sequence[AxisAtom], size: Sequence[AxisAtom]
) -> tuple[int, ...] | None:
    """The permutation of a 4-D tensor that gives batch, heads, rows, size; an axis of size 1 stands for a missing one."""
    outer = [a for a in _drop_ones(batch) if a.axis >= 0]
    groups = [outer[:1], outer[1:], _drop_ones(rows), _drop_ones(size)]
    if len(outer) == 1 and outer[0].size.constant is not None:
        groups[:2] = [[], outer]
    used = [a for group in groups for a in group]
    if len(outer) > 2 or any(len(g) > 1 for g in groups) or any(a not in whole for a in used):
        return None
    spare = [a.axis for a in whole if a.size == ONE]
    order = [g[0].axis if g else (spare.pop(0) if spare else -1) for g in groups]
    return tuple(order) if sorted(order) == [0, 1, 2, 3] else None


def _broadcast_count(batch: Sequence[AxisAtom]) -> int:
    last = _drop_ones(batch)[-1:]
    return (last[0].size.constant or 1) if last and last[0].axis < 0 else 1


def _repeat_count(batch: Sequence[AxisAtom], wanted: Sequence[AxisAtom]) -> int | None:
    """How often each head is repeated; None unless the batch axes are those wanted, with at most a broadcast atom last."""
    stripped = _drop_ones(batch)
    base = _drop_ones(wanted)
    if stripped == base:
        return 1
    if stripped[:-1] == base and stripped[-1].axis == -1:
        return stripped[-1].size.constant
    return None


def output_layout(
    shape: tuple[Int, ...], axes: Axes, heads: int, order: tuple[int, ...] = (), grouped: bool = False
) -> tuple[Layout, tuple[int, ...], bool] | None:
    """The layout in which the op has to write to give a moved result of the second MatMul.

    Args:
        shape: of the result, [.., S, Dv].
        axes: of the moved result, as atoms of the result.
        heads: H.
        order: permutation of the result's axes that gives [.., S, Dv], where it differs.
        grouped: a result of five axes has its heads in two of them; otherwise its batch.

    Returns:
        The layout, the permutation of it that the moved result is, and whether its first two axes are merged. None where
        the op cannot write it.
    """
    whole = [AxisAtom(a, 0, d) for a, d in enumerate(shape)]
    whole = [whole[i] for i in order] if order else whole
    groups = [_drop_ones(g) for g in axes]
    if len(shape) == 5 and grouped:
        outer, inner, of_group, s5, d5 = ([w] for w in whole)
        five = {Layout.BHSD: [outer, inner, of_group, s5, d5], Layout.BSHD: [outer, s5, inner, of_group, d5]}
        five_axis_layout = next((layout for layout, wanted in five.items() if [list(g) for g in axes] == wanted), None)
        if five_axis_layout is not None:
            return five_axis_layout, (), False
        b, h, s, d = (_drop_ones(g) for g in (outer, inner + of_group, s5, d5))
    elif len(shape) == 5:
        outer, inner, h, s, d = ([w] for w in whole)
        orders = {Layout.BHSD: [outer, inner, h, s, d], Layout.BSHD: [outer, inner, s, h, d]}
        return next(((layout, (), False) for layout, order in orders.items() if [list(g) for g in axes] == order), None)
    elif len(shape) == 4:
        b, h, s, d = (_drop_ones([w]) for w in whole)
    elif len(shape) == 3 and len(axes) in (2, 3, 4) and whole[0].axis == 0:  # [B*H, S, Dv]
        first = sorted(_drop_ones([a for g in axes for a in g if a.axis == 0]), key=lambda a: a.part)
        # Without a second part the axis is all batch (one head) or all heads (one batch).
        b = first[:1] if heads == 1 or len(first) == 2 else []
        h = first[len(b) :]
        if size_of(h) != integer(heads) or len(first) > 2:
            return None
        s, d = _drop_ones([whole[1]]), _drop_ones([whole[2]])
    else:
        return None
    legal: list[tuple[list[list[AxisAtom]], Layout, tuple[int, ...], bool]] = [
        ([b, h, s, d], Layout.BHSD, (), False),
        ([b, s, h, d], Layout.BSHD, (), False),
        ([b, s, h + d], Layout.BSN, (), False),
        ([s, b, h + d], Layout.BSN, (1, 0, 2), False),
        ([b + s, h + d], Layout.BSN, (), True),
        ([s + b, h + d], Layout.BSN, (1, 0, 2), True),
        ([b, h + d, s], Layout.BSN, (0, 2, 1), False),  # channels first
        ([b, h, d, s], Layout.BHSD, (0, 1, 3, 2), False),
    ]
    for legal_groups, layout, perm, flat in legal:
        if groups == legal_groups:
            return layout, perm, flat
    if (
        len(groups) == 4 and all(groups) and all(g in (b, h, s, d) for g in groups) and len({g[0] for g in groups}) == 4
    ):  # any other permutation
        return Layout.BHSD, tuple([b, h, s, d].index(g) for g in groups), False
    return None
