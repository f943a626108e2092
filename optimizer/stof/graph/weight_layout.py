# SPDX-License-Identifier: Apache-2.0
"""Layouts of weights: a cut and an order along an axis, and a transposition, as values and as nodes of a graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof.graph.external_data import is_external
from stof.graph.index import is_standard, producers

_PIECE = 1 << 25  # bytes that are rearranged together
# The doc_string of the last node of a layout: what it gives is written into a file, whoever reads it.
LAYOUT_MARK = "stof: a weight in another layout"
LAYOUT_OPS = frozenset({"Gather", "Slice", "Transpose"})


@dataclass(frozen=True, eq=False)
class WeightLayout:
    """What is taken of a weight, and how it lies: a cut along an axis, an order along the same axis, then a transposition.

    Attributes:
        axis: 0 or 1, of the stored weight.
        start, stop: what is taken along it.
        order: of what is taken: the element at i is the one that was at order[i]; None: as it was.
        is_transposed: whether a matrix is transposed afterwards.
    """

    axis: int
    start: int
    stop: int
    order: np.ndarray | None = None
    is_transposed: bool = False

    def dims(self, stored: Sequence[int]) -> list[int]:
        """The shape of a weight of this shape in the layout."""
        dims = [int(d) for d in stored]
        dims[self.axis] = self.stop - self.start
        return dims[::-1] if self.is_transposed else dims

    def pieces(self, values: np.ndarray) -> Iterator[np.ndarray]:
        """The rows of a weight in the layout, some at a time."""
        cut = values[self.start : self.stop] if self.axis == 0 else values[:, self.start : self.stop]
        axis = self.axis
        if self.is_transposed:
            cut, axis = cut.T, 1 - axis
        size = max(1, cut.nbytes // max(1, cut.shape[0]))
        rows = max(1, _PIECE // size)
        for first in range(0, cut.shape[0], rows):
            if self.order is None:
                piece = cut[first : first + rows]
            elif axis == 0:
                piece = cut[self.order[first : first + rows]]
            else:
                piece = cut[first : first + rows][:, self.order]
            yield np.ascontiguousarray(piece)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """A weight in the layout."""
        pieces = list(self.pieces(values))
        return np.concatenate(pieces) if pieces else np.zeros(self.dims(values.shape), values.dtype)

    def make_nodes(
        self, source: str, dims: Sequence[int], output: str, name: str, *, is_marked: bool
    ) -> tuple[list[onnx.NodeProto], list[TensorProto]]:
        """Nodes that compute the layout, which :class:`LayoutReader` knows again, and their constants.

        Args:
            source: the stored weight.
            dims: its shape.
            output: the tensor to compute; other tensors get names that begin with it.
            name: of the last node; others get names that begin with it.
            is_marked: the result is written into a file of external data whoever reads it.
        """
        nodes: list[onnx.NodeProto] = []
        constants: list[TensorProto] = []

        def constant(what: str, values: Sequence[int] | np.ndarray) -> str:
            constants.append(numpy_helper.from_array(np.asarray(values, np.int64), f"{output}/{what}"))
            return constants[-1].name

        def add(op: str, inputs: list[str], **attributes: Any) -> str:
            nodes.append(helper.make_node(op, inputs, [f"{output}/{op}"], name=f"{name}/{op}", **attributes))
            return f"{output}/{op}"

        taken = source
        if (self.start, self.stop) != (0, dims[self.axis]):
            bounds = [constant(w, [v]) for w, v in (("start", self.start), ("stop", self.stop), ("axis", self.axis))]
            taken = add("Slice", [taken, *bounds])
        if self.order is not None:
            taken = add("Gather", [taken, constant("order", self.order)], axis=self.axis)
        if self.is_transposed:
            taken = add("Transpose", [taken], perm=[1, 0])
        if not nodes:
            add("Identity", [taken])
        nodes[-1].output[0], nodes[-1].name = output, name
        if is_marked:
            nodes[-1].doc_string = LAYOUT_MARK
        return nodes, constants


@dataclass(frozen=True)
class ReadLayout:
    """What a tensor is a layout of.

    Attributes:
        source: the initializer.
        layout: of it.
        nodes: what computes it, with the last one first.
    """

    source: TensorProto
    layout: WeightLayout
    nodes: list[onnx.NodeProto]


class LayoutReader:
    """Knows the layouts again that nodes of a graph compute.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: onnx.GraphProto) -> None:
        self.stored: Mapping[str, TensorProto] = {t.name: t for t in graph.initializer}
        self._producers = producers(graph.node)

    def read(self, tensor: str) -> ReadLayout | None:
        """The layout that a tensor is; None where it is none."""
        nodes: list[onnx.NodeProto] = []
        node = self._producers.get(tensor)
        order: np.ndarray | None = None
        axis: int | None = None
        bounds: tuple[int, int] | None = None
        is_transposed = False
        if node is not None and _is(node, "Transpose"):
            if [list(a.ints) for a in node.attribute] != [[1, 0]]:
                return None
            is_transposed, node = True, self._before(node, nodes)
        if node is not None and _is(node, "Gather"):
            axis = next((int(a.i) for a in node.attribute if a.name == "axis"), 0)
            order, node = self._integers(node.input[1]), self._before(node, nodes)
            if order is None:
                return None
        if node is not None and _is(node, "Slice"):
            numbers = [self._integers(t) for t in node.input[1:]]
            if len(numbers) != 3 or any(n is None or n.shape != (1,) for n in numbers):
                return None
            start, stop, cut = (int(n[0]) for n in numbers if n is not None)
            if axis not in (None, cut):
                return None
            axis, bounds, node = cut, (start, stop), self._before(node, nodes)
        source = self.stored.get(nodes[-1].input[0]) if nodes and node is None else None
        axis = axis or 0
        if (
            source is None
            or axis not in (0, 1)
            or axis >= len(source.dims)
            or (is_transposed and len(source.dims) != 2)
        ):
            return None
        size = int(source.dims[axis])
        start, stop = bounds or (0, size)
        if not 0 <= start <= stop <= size:
            return None
        if order is not None and not np.array_equal(np.sort(order), np.arange(stop - start)):
            return None
        return ReadLayout(source, WeightLayout(axis, start, stop, order, is_transposed), nodes)

    def _before(self, node: onnx.NodeProto, nodes: list[onnx.NodeProto]) -> onnx.NodeProto | None:
        nodes.append(node)
        return self._producers.get(node.input[0])

    def _integers(self, tensor: str) -> np.ndarray | None:
        stored = self.stored.get(tensor)
        if stored is None or is_external(stored) or stored.data_type != TensorProto.INT64 or len(stored.dims) != 1:
            return None
        values: np.ndarray = numpy_helper.to_array(stored)
        return values


def _is(node: onnx.NodeProto, op: str) -> bool:
    return node.op_type == op and is_standard(node)
