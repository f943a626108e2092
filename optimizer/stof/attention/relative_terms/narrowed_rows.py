# SPDX-License-Identifier: Apache-2.0
"""Some rows of a relative table, computed from as many rows of what the table is made of.

The nodes behind a table mostly work row by row: positions, their sines, a MatMul by weights, moves of axes. Copies of them
compute the rows that a window reads, so that no tensor has as many rows as the graph's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.attention.edit.shape_sources import ShapeSources
from stof.attention.relative_terms.row_axes import REGROUPING, Cut, cuts_of_inputs
from stof.graph.editor import Editor
from stof.graph.node_fields import attributes_of
from stof.mask.site import AttentionSite, RowRange
from stof.symbolic import Int, Symbolic

_INT64 = int(TensorProto.INT64)


Limits = tuple[gs.Tensor, gs.Tensor]  # the first row, and the one behind the last: int64 [1]


def build_limits(
    editor: Editor, symbolic: Symbolic, site: AttentionSite, rows: RowRange, extra: list[gs.Node]
) -> Limits:
    """The limits of a range of rows; nodes are appended to ``extra``."""
    sources = ShapeSources(editor.model, symbolic)

    def add(op: str, *inputs: gs.Tensor) -> gs.Tensor:
        out = editor.variable(f"stof_rows_{op.lower()}", _INT64)
        extra.append(editor.node(op, out.name, list(inputs), [out]))
        return out

    def number(value: int) -> gs.Tensor:
        return editor.initializer("stof_rows_number", np.array([value], np.int64))

    def size_of(size: Int) -> gs.Tensor:
        """A size of the scores, of graph inputs where it can be: so layers' limits are equal."""
        found = sources.find_size(size, (site.query.tensor, site.key.tensor))
        assert found is not None  # query and key have these axes
        if isinstance(found, int):
            return number(found)
        tensor, axis, factor = found
        one = add("Gather", add("Shape", editor.tensors[tensor]), number(axis))
        return one if factor == 1 else add("Mul", one, number(factor))

    queries = size_of(site.dims[2])
    keys = queries if site.dims[3] == site.dims[2] else size_of(site.dims[3])
    middle = number(rows.offset)
    for size, factor in ((queries, rows.of_queries), (keys, rows.of_keys)):
        if factor:
            middle = add("Add", middle, size if factor == 1 else add("Mul", size, number(factor)))
    first = add("Max", add("Sub", middle, number(rows.before)), number(0))
    longest = queries if queries is keys else add("Max", queries, keys)
    end = add("Add", add("Add", middle, number(1)), add("Min", longest, number(rows.after)))
    return first, add("Max", end, number(1))


def narrow_rows(
    editor: Editor, symbolic: Symbolic, tensor: str, cut: Cut, limits: Limits | None, extra: list[gs.Node]
) -> gs.Tensor:
    """The elements of a tensor that a cut leaves, the rows being those within limits; nodes are appended to ``extra``."""
    return _NarrowedRows(editor, symbolic, limits, extra).make(editor.tensors[tensor], cut)


class _NarrowedRows:
    """Copies of nodes for some rows of what they compute."""

    def __init__(self, editor: Editor, symbolic: Symbolic, limits: Limits | None, extra: list[gs.Node]) -> None:
        self.editor, self.symbolic, self.limits, self.extra = editor, symbolic, limits, extra
        self._made: dict[tuple[str, Cut], gs.Tensor] = {}

    def make(self, tensor: gs.Tensor, cut: Cut) -> gs.Tensor:
        """The elements of a tensor that a cut leaves."""
        key = (tensor.name, cut)
        if key not in self._made:
            producer = self.editor.producer(tensor.name)
            node = None if producer is None else self.editor.protos.get(id(producer))
            cuts = None if node is None else cuts_of_inputs(self.symbolic, node, cut)
            if node is None or cuts is None:
                self._made[key] = self._slice(tensor, cut)
            else:
                whole = [self.editor.tensors[n] if n else gs.Variable.empty() for n in node.input]
                inputs = [t if c is None else self.make(t, c) for t, c in zip(whole, cuts, strict=True)]
                self._made[key] = self._copy(node, inputs, cut)
        return self._made[key]

    def _copy(self, node: onnx.NodeProto, inputs: list[gs.Tensor], cut: Cut) -> gs.Tensor:
        """A node's result for other inputs."""
        output = self.editor.tensors[node.output[0]]
        shape = self.symbolic.shape(output.name) or ()
        if node.op_type == "Slice" and (copied := self._copy_slice(node, inputs, cut)) is not None:
            return copied
        if node.op_type in REGROUPING:
            whole = [-1 if size.constant is None else size.constant for size in shape]
            sizes = [-1 if a == cut.row else 1 if a in cut.firsts else size for a, size in enumerate(whole)]
            return self._add(output, "Reshape", [inputs[0], self._numbers(sizes)])
        if node.op_type == "Expand":
            missing = len(shape) - len(self.symbolic.shape(node.input[0]) or ())
            return self._add(output, "Unsqueeze", [inputs[0], self._numbers(range(missing))]) if missing else inputs[0]
        return self._add(output, node.op_type, inputs, **attributes_of(node))

    def _copy_slice(self, node: onnx.NodeProto, inputs: list[gs.Tensor], cut: Cut) -> gs.Tensor | None:
        """The input, which holds the rows of a Slice along rows already; None for one along other axes."""
        value = self.symbolic.value(node.input[3]) if len(node.input) > 3 else None
        axes = None if value is None else value.elements()
        rank = len(self.symbolic.shape(node.output[0]) or ())
        known = list(range(rank)) if axes is None else [a.constant for a in axes if isinstance(a, Int)]
        is_of_rows = [a % rank for a in known if a is not None] == [cut.row]
        return inputs[0] if is_of_rows else None

    def _slice(self, tensor: gs.Tensor, cut: Cut) -> gs.Tensor:
        if not cut.axes:
            return tensor
        zero, one = self._numbers([0]), self._numbers([1])
        joined = []
        for limit, of_first in zip(self.limits or (zero, one), (zero, one), strict=True):
            for name in cut.shift:
                limit = self._add(limit, "Add", [limit, self.editor.tensors[name]])
            limits = [limit if a == cut.row else of_first for a in cut.axes]
            joined.append(limits[0] if len(limits) == 1 else self._add(limit, "Concat", limits, axis=0))
        return self._add(tensor, "Slice", [tensor, *joined, self._numbers(cut.axes)])

    def _numbers(self, numbers: Sequence[int] | range) -> gs.Tensor:
        return self.editor.initializer("stof_rows_numbers", np.array(list(numbers), np.int64))

    def _add(self, like: gs.Tensor, op: str, inputs: list[gs.Tensor], **attributes: object) -> gs.Tensor:
        """The result of a new node, of the same type as another tensor."""
        dtype = self.symbolic.dtype(like.name) or _INT64
        out = self.editor.variable(f"stof_rows_{op.lower()}", dtype)
        self.extra.append(self.editor.node(op, out.name, inputs, [out], **attributes))
        return out
