# SPDX-License-Identifier: Apache-2.0
"""Builds the tables of relative terms as operands [H or 1, L, D or D + 1] of a call."""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.attention.bias_input import append_fp32_node
from stof.attention.relative_terms.narrowed_rows import build_limits, narrow_rows
from stof.attention.relative_terms.row_axes import Cut
from stof.graph.editor import Editor
from stof.mask.site import AttentionSite, BiasFactor, LiftedMask, RelativeTable, RelativeTerm
from stof.symbolic import Symbolic
from stof.symbolic.axis_atoms import ONE

_SAME = 1e-7  # a factor that differs from 1 by rounding of the graph's own numbers


def build_tables(
    editor: Editor, symbolic: Symbolic, site: AttentionSite, mask: LiftedMask, extra: list[gs.Node]
) -> dict[str, gs.Tensor]:
    """The tables of a site's relative terms by role; nodes that compute them are appended to ``extra``."""
    return {t.role: _build_table(editor, symbolic, site, t, extra) for t in mask.relative_terms}


def relative_index_of(mask: LiftedMask) -> str:
    """The text of attribute ``relative_index``; empty where a site has no relative terms."""
    return "; ".join(f"{term.role}: {term.index.text}" for term in mask.relative_terms)


def build_factor(
    editor: Editor, symbolic: Symbolic, site: AttentionSite, factor: BiasFactor, extra: list[gs.Node]
) -> gs.Tensor:
    """The factor of a table by distance as an operand [B, H, S]."""
    tensor, dtype = editor.tensors[factor.tensor], symbolic.dtype(factor.tensor)

    def add(op: str, inputs: list[gs.Tensor], kind: int, **attributes: object) -> gs.Tensor:
        out = editor.variable(f"stof_factor_{op.lower()}", kind)
        extra.append(editor.node(op, out.name, inputs, [out], **attributes))
        return out

    if factor.is_merged:
        sizes = add("Shape", [tensor], int(TensorProto.INT64))
        rows = add(
            "Gather", [sizes, editor.initializer("stof_factor_axis", np.array([1], np.int64))], int(TensorProto.INT64)
        )
        heads = editor.initializer("stof_factor_heads", np.array([-1, site.num_heads], np.int64))
        shape = add("Concat", [heads, rows], int(TensorProto.INT64), axis=0)
        tensor = add("Reshape", [tensor, shape], dtype)
    else:
        tensor = add("Gather", [tensor, editor.initializer("stof_factor_first", np.array(0, np.int64))], dtype, axis=3)
    if dtype not in (site.dtype, TensorProto.FLOAT):
        tensor = append_fp32_node(editor, extra, "Cast", [tensor], to=int(TensorProto.FLOAT))
    return tensor


def compute_table(term: RelativeTerm, rows: np.ndarray, queries: int, keys: int) -> np.ndarray:
    """What a call's nodes make of the tensor of rows, for tests of the call alone."""
    table = term.table
    if table.rows is not None:
        chosen: list[slice] = [slice(None)] * rows.ndim
        chosen[table.row_axis] = slice(*table.rows.limits(queries, keys))
        rows = rows[tuple(chosen)]
    axes = [a for a in (table.head_axis, table.row_axis, table.column_axis) if a is not None]
    others = [a for a in range(rows.ndim) if a not in axes]
    array = np.transpose(rows, [*others, *axes]).reshape(-1, *(rows.shape[a] for a in axes))
    array = array[0] if table.head_axis is not None else array[:1]
    if table.is_padded:
        array = np.pad(array, ((0, 0), (1, 1), (0, 0)))
    if abs(table.factor - 1.0) > _SAME:
        array = array.astype(np.float32) * np.float32(table.factor)
    shift = table.shift_array()
    if shift is None:
        return np.ascontiguousarray(array)
    array = np.broadcast_to(array.astype(np.float32), (term.heads, *array.shape[1:]))
    return np.concatenate([array, array @ shift[:, :, None]], axis=2)


def _build_table(
    editor: Editor, symbolic: Symbolic, site: AttentionSite, term: RelativeTerm, extra: list[gs.Node]
) -> gs.Tensor:
    table, dtype = term.table, site.dtype
    data = table.rows_array(site.head_size)
    if data is not None:
        tensor, own = editor.initializer("stof_relative_rows", data[None].copy()), int(TensorProto.FLOAT)
    else:
        own = symbolic.dtype(table.tensor)
        limits = None if table.rows is None else build_limits(editor, symbolic, site, table.rows, extra)
        rows = narrow_rows(editor, symbolic, table.tensor, _cut_of(symbolic, table), limits, extra)
        tensor = _lay_out(editor, symbolic, table, rows, own, extra)
    if table.is_padded:
        pads = editor.initializer("stof_relative_pads", np.array([0, 1, 0, 0, 1, 0], np.int64))
        padded = editor.variable("stof_relative_padded", own)
        extra.append(editor.node("Pad", padded.name, [tensor, pads], [padded]))
        tensor = padded
    shift = table.shift_array()
    is_scaled = abs(table.factor - 1.0) > _SAME
    if own != TensorProto.FLOAT and (is_scaled or shift is not None or own != dtype):
        tensor, own = append_fp32_node(editor, extra, "Cast", [tensor], to=int(TensorProto.FLOAT)), TensorProto.FLOAT
    if is_scaled:
        factor = editor.initializer("stof_relative_factor", np.array(table.factor, np.float32))
        tensor = append_fp32_node(editor, extra, "Mul", [tensor, factor])
    if shift is None:
        return tensor
    vectors = editor.initializer("stof_relative_shift", shift[:, None, :].copy())
    if len(shift) > 1 and table.head_axis is None:  # each head has a row bias of its own
        heads = editor.initializer("stof_relative_heads", np.array([len(shift), 1, 1], np.int64))
        tensor = append_fp32_node(editor, extra, "Expand", [tensor, heads])
    # No MatMul: ONNX Runtime would fuse it with a Transpose in front of it, and its fused kernel divides by 0 rows.
    product = append_fp32_node(editor, extra, "Mul", [tensor, vectors])
    axis = editor.initializer("stof_relative_axis", np.array([2], np.int64))
    row_bias = append_fp32_node(editor, extra, "ReduceSum", [product, axis], keepdims=1)
    return append_fp32_node(editor, extra, "Concat", [tensor, row_bias], axis=2)


def _cut_of(symbolic: Symbolic, table: RelativeTable) -> Cut:
    """The rows that the operand has, if not all, and the first elements along the axes that are read at 0."""
    axes = (table.row_axis, table.head_axis, table.column_axis)
    shape = symbolic.shape(table.tensor) or ()
    firsts = frozenset(a for a, size in enumerate(shape) if a not in axes and size != ONE)
    return Cut(None if table.rows is None else table.row_axis, firsts)


def _lay_out(
    editor: Editor, symbolic: Symbolic, table: RelativeTable, tensor: gs.Tensor, dtype: int, extra: list[gs.Node]
) -> gs.Tensor:
    """The tensor of rows as [H or 1, L, D], of its own type."""
    axes: list[int | None] = [table.head_axis, table.row_axis, table.column_axis]

    def add(op: str, inputs: list[gs.Tensor], **attributes: object) -> gs.Tensor:
        out = editor.variable(f"stof_relative_{op.lower()}", dtype)
        extra.append(editor.node(op, out.name, inputs, [out], **attributes))
        return out

    rank = len(symbolic.shape(table.tensor) or ())
    others = [a for a in range(rank) if a not in axes]  # of size 1: batches share the rows
    if others:
        tensor = add("Squeeze", [tensor, editor.initializer("stof_relative_first", np.array(others, np.int64))])
        axes = [a if a is None else a - sum(o < a for o in others) for a in axes]
    kept = [a for a in axes if a is not None]
    if kept != sorted(kept):
        tensor = add("Transpose", [tensor], perm=kept)
    if table.head_axis is None:
        tensor = add("Unsqueeze", [tensor, editor.initializer("stof_relative_head", np.array([0], np.int64))])
    return tensor
