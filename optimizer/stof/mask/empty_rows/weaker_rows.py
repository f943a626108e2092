# SPDX-License-Identifier: Apache-2.0
"""Rows that attend by a weaker mask: a second StofAttention node computes them, the first one all others.

Each query has a number in every run: how many of the masks, from the strictest on, leave it no key. The second node reads it as
``segment_q``, so that it skips every tile without such rows. Then both are joined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.graph.editor import Editor
from stof.graph.import_nodes import import_nodes, select_needed
from stof.graph.index import opset_of
from stof.graph.node_builder import Builder
from stof.mask.expression import PADDING, MaskExpression
from stof.mask.expression_nodes import TRUE, B, Binary, Constant, Lookup, Name, Node, Q, join
from stof.mask.relative_roles import RELATIVE_VALUE
from stof.mask.site import AttentionSite, EmptyRows, Layout, LiftedMask, RuntimeOperand
from stof.mask.to_onnx import ScoreSizes


def strictest_mask(mask: LiftedMask) -> LiftedMask:
    """The mask of the first node: without weaker ones. What it gives for fully masked rows is replaced."""
    if mask.weaker is None:
        return mask
    return replace(_reading_less(mask, mask.expression), weaker=None, empty_rows=EmptyRows.ZERO)


def weaker_mask(site: AttentionSite, mask: LiftedMask) -> LiftedMask:
    """The mask of the second node. Its run-time operand ``segment_q`` is made by :class:`RowNumbers`."""
    assert mask.weaker is not None
    row: Node = Binary("-", Q, Name("P")) if site.query_offset else Q
    conditions = []
    for number, expression in enumerate(mask.weaker.expressions, 1):
        condition: Node = Binary("==", Lookup("segment_q", (B, row)), Constant(number))
        conditions.append(condition if expression.root == TRUE else join("and", [condition, expression.root]))
    if not mask.weaker.keeps_scores:
        kept = tuple(t for t in mask.relative_terms if t.role == RELATIVE_VALUE)  # the weights' own
        mask = replace(mask, bias=(), by_data=(), relative=None, relative_factor=None, relative_terms=kept)
    return replace(_reading_less(mask, MaskExpression(join("or", conditions))), weaker=None)


def weaker_site(site: AttentionSite, mask: LiftedMask) -> AttentionSite:
    """The site as the second node computes it: without scores where all of a row are the same number."""
    assert mask.weaker is not None
    return site if mask.weaker.keeps_scores else replace(site, scale=0.0, softcap=0.0)


def _reading_less(mask: LiftedMask, expression: MaskExpression) -> LiftedMask:
    """The mask with another expression, and what that and its relative terms read."""
    read = expression.reads.union(*(t.index.reads for t in mask.relative_terms))
    return replace(
        mask,
        expression=expression,
        operands=tuple(o for o in mask.operands if o.role in expression.reads),
        tables=tuple(t for t in mask.tables if t[0] in read),
    )


def number_rows(masks: Sequence[np.ndarray]) -> np.ndarray:
    """How many of some masks, bool [B, H, S, T], leave each row no key, from the first on: int64 [B, S]."""
    row_numbers = np.zeros((masks[0].shape[0], masks[0].shape[2]), np.int64)
    for number, allowed in enumerate(masks):
        row_numbers += (row_numbers == number) & ~allowed[:, 0].any(axis=-1)
    return row_numbers


MakeOperand = Callable[[RuntimeOperand, list[gs.Node]], gs.Tensor]


class RowNumbers:
    """Nodes that number the rows of sites; sites with the same masks of the same operands share them.

    Args:
        editor: of the graph with the sites.
        make_operand: appends the nodes that bring a run-time operand into the operator's shape.
        tensorrt: whether TensorRT's parser reads the model.
    """

    def __init__(self, editor: Editor, make_operand: MakeOperand, tensorrt: bool) -> None:
        self.editor = editor
        self.make_operand = make_operand
        self.tensorrt = tensorrt
        self.tensors: dict[tuple[object, ...], tuple[gs.Tensor, gs.Tensor]] = {}

    def find(
        self,
        site: AttentionSite,
        mask: LiftedMask,
        heads: Mapping[str, gs.Tensor],
        layouts: Sequence[Layout],
        nodes: list[gs.Node],
    ) -> tuple[gs.Tensor, gs.Tensor]:
        """The rows' numbers int32 [B or 1, S], and as booleans whether they are 0; new nodes are appended.

        ``heads`` are the tensors ``query`` and ``key`` as the operator reads them, in ``layouts``.
        """
        assert mask.weaker is not None
        # The last mask needs none: rows that it leaves no key are fully masked in the second node, too.
        expressions = (mask.expression, *mask.weaker.expressions[:-1])
        # Padding has the length of keys and of as many queries, and belongs to all layers.
        is_square = site.dims[2] == site.dims[3] and [o.role for o in mask.operands] == ["pad"]
        sources = {} if is_square else heads
        key = (expressions, mask.operands, mask.tables, site.query_offset, *(t.name for t in sources.values()))
        if key not in self.tensors:
            self.tensors[key] = self._make(expressions, site, mask, sources, layouts, nodes)
        return self.tensors[key]

    def _make(
        self,
        expressions: Sequence[MaskExpression],
        site: AttentionSite,
        mask: LiftedMask,
        heads: Mapping[str, gs.Tensor],
        layouts: Sequence[Layout],
        nodes: list[gs.Node],
    ) -> tuple[gs.Tensor, gs.Tensor]:
        read = frozenset[str]().union(*(e.reads for e in expressions))
        operands = {o.role: self.make_operand(o, nodes) for o in mask.operands if o.role in read or not heads}
        inputs = {f"given_{role}": tensor for role, tensor in (*heads.items(), *operands.items())}
        b = Builder(opset_of(self.editor.model), "made_")
        names = {role: f"given_{role}" for role in operands}
        for name, dtype, shape, data in mask.tables:
            if name in read:
                names[name] = b.constant(np.frombuffer(data, np.dtype(dtype)).reshape(shape), np.dtype(dtype))
        sizes = _sizes(b, site, layouts, is_square=not heads)
        # Each query has its own position among the keys, and TensorRT sums no integers.
        counts = (not heads or bool(site.query_offset)) and not self.tensorrt
        total = ""
        for expression in expressions:
            window_count = _count_padded_window(b, expression, sizes, names) if counts else None
            keys = _count_keys(b, expression, sizes, names) if window_count is None else window_count
            missing = b.add("Cast", [b.add("Equal", [keys, b.constant(0, np.int32)])], to=TensorProto.INT32)
            # A row that a mask leaves a key has one under all weaker masks.
            total = b.add("Add", [total, missing]) if total else missing
        if all("q" not in e.reads for e in expressions):
            rows = b.add("Concat", [b.constant([1]), b.unsqueeze(sizes.S, [0])], axis=0)
            total = b.add("Expand", [total, rows])
        is_usual = b.add("Equal", [total, b.constant(0, np.int32)])
        made = import_nodes(self.editor, select_needed(b.nodes, [total, is_usual]), inputs, nodes, "stof_rows")
        return made[total], made[is_usual]


def _count_keys(b: Builder, expression: MaskExpression, sizes: ScoreSizes, names: Mapping[str, str]) -> str:
    """The number of keys that a mask leaves each row, int32 [B or 1, S or 1]; takes an element for every pair."""
    every = b.constant(np.ones((1, 1, 1, 1), np.bool_), np.bool_)  # brings the mask to four axes
    allowed = b.add("And", [expression.to_onnx(b, sizes, names), every])
    allowed = b.add("Cast", [allowed], to=TensorProto.INT32)
    counts = b.add("ReduceSum", [allowed, b.constant([3])], keepdims=1)  # a maximum over no keys is an error
    return b.add("Squeeze", [counts, b.constant([1, 3])])


def _count_padded_window(
    b: Builder, expression: MaskExpression, sizes: ScoreSizes, names: Mapping[str, str]
) -> str | None:
    """The same for a window over padded keys, from running sums of the padding; None for other masks.

    Queries stand at positions of keys.
    """
    window = expression.window()
    if window is None or expression.vectors != {"pad"} or expression.conjuncts.count(PADDING.root) != 1:
        return None
    left, right = window
    keys = b.add("Cast", [b.add("Cast", [names["pad"]], to=TensorProto.BOOL)], to=TensorProto.INT32)
    if left < 0 and right < 0:
        return b.add("ReduceSum", [keys, b.constant([1])], keepdims=1)
    sums = b.add("CumSum", [keys, b.constant(1)])
    zero, one = b.constant(0), b.constant(1)
    queries = b.add("Range", [sizes.P, sizes.T, one])
    last = b.add("Sub", [sizes.T, one])
    ends = last if right < 0 else b.add("Min", [b.add("Add", [queries, b.constant(right)]), last])
    count = b.add("Gather", [sums, b.unsqueeze(ends, [0]) if right < 0 else ends], axis=1)
    if left < 0:
        return count
    starts = b.add("Max", [b.add("Sub", [queries, b.constant(left)]), zero])
    before = b.add("Gather", [b.add("Sub", [sums, keys]), starts], axis=1)
    return b.add("Sub", [count, before])


def _sizes(b: Builder, site: AttentionSite, layouts: Sequence[Layout], *, is_square: bool) -> ScoreSizes:
    """The sizes of the scores: those of the padding [B or 1, T] where S is T, else of query and key."""

    def size(tensor: str, axis: int) -> str:
        return b.add("Gather", [b.add("Shape", [tensor]), b.constant(axis)])

    if is_square:
        rows = keys = size("given_pad", 1)
        batch = size("given_pad", 0)
    else:
        rows, keys = (
            size(f"given_{n}", 2 if layout is Layout.BHSD else 1)
            for n, layout in zip(("query", "key"), layouts, strict=False)
        )
        batch = size("given_query", 0)
    past = b.add("Sub", [keys, rows]) if site.query_offset else b.constant(0)
    return ScoreSizes(batch, b.constant(1), rows, keys, past)


def join_rows(
    editor: Editor,
    is_usual: gs.Tensor,
    layout: Layout,
    both: Sequence[gs.Tensor],
    empty_rows: EmptyRows,
    result: gs.Tensor,
) -> list[gs.Node]:
    """Nodes that write the rows of the first of two results where they are usual, of the second elsewhere.

    ``empty_rows``: what the second result gives for other rows than its own; the first gives zeros.
    """
    if empty_rows is EmptyRows.ZERO:  # half the memory traffic of Where in ONNX Runtime
        return [editor.node("Add", result.name, list(both), [result])]
    axes = {Layout.BHSD: [1, 3], Layout.BSHD: [2, 3], Layout.BSN: [2]}[layout]
    wide = editor.variable("stof_rows_wide", TensorProto.BOOL)
    where = editor.initializer("stof_axes", np.array(axes, np.int64))
    return [
        editor.node("Unsqueeze", wide.name, [is_usual, where], [wide]),
        editor.node("Where", result.name, [wide, *both], [result]),
    ]
