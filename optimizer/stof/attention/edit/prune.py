# SPDX-License-Identifier: Apache-2.0
"""Removes the nodes that only the replaced sites needed.

A Shape node would keep a removed tensor alive. It is replaced by sizes of graph inputs, or of the site's query and key.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_graphsurgeon as gs
from onnx import TensorProto

from stof.attention.edit.shape_sources import ShapeSource, ShapeSources
from stof.graph.editor import Editor, captured_gs_tensors
from stof.graph.index import GraphIndex
from stof.mask.site import AttentionSite
from stof.symbolic import Symbolic

Elements = list[ShapeSource | int]


class Pruner:
    """Removes nodes that an edit made dead. Create it before the edit; call ``prune`` after it."""

    def __init__(self, editor: Editor, symbolic: Symbolic, sites: Sequence[AttentionSite]) -> None:
        self.editor = editor
        self.sources = ShapeSources(editor.model, symbolic)
        self.shapes = self._replaceable_shapes(sites)
        self.live_before = self._live({})
        self._sizes: dict[ShapeSource, gs.Tensor] = {}
        self._head: list[gs.Node] = []

    def _replaceable_shapes(self, sites: Sequence[AttentionSite]) -> dict[int, Elements]:
        """Ids of the Shape nodes of tensors inside the sites and their masks, with the sources of their elements."""
        index = GraphIndex(self.editor.model.graph)
        inside: dict[str, tuple[str, ...]] = {}
        for site in sites:
            stop = {site.query.tensor, site.key.tensor, site.value.tensor}
            guards = [site.row_guard or "", site.pair_guard.tensor if site.pair_guard is not None else ""]
            for tensor in _mask_tensors(index, [t.tensor for t in site.terms] + guards, stop):
                inside.setdefault(tensor, ())
            inside.update(dict.fromkeys(site.nodes, (site.query.tensor, site.key.tensor)))
            for operand in stop:
                inside.pop(operand, None)
        shapes: dict[int, Elements] = {}
        for node in self.editor.graph.nodes:
            if node.op == "Shape" and node.inputs[0].name in inside:
                elements = self.sources.find(node.outputs[0].name, inside[node.inputs[0].name])
                if elements is not None:
                    shapes[id(node)] = elements
        return shapes

    def _live(self, shapes: dict[int, Elements]) -> set[int]:
        """Ids of the nodes that the outputs depend on, where the Shape nodes of ``shapes`` read nothing."""
        pending = [n for t in self.editor.graph.outputs for n in t.inputs]
        live: set[int] = set()
        while pending:
            node = pending.pop()
            if id(node) in live:
                continue
            live.add(id(node))
            if id(node) not in shapes:
                pending.extend(n for t in node.inputs for n in t.inputs)
            # Subgraphs hold other objects for outer tensors: these are found by name.
            for tensor in captured_gs_tensors(node):
                producer = self.editor.producer(tensor.name)
                if producer is not None:
                    pending.append(producer)
        return live

    def prune(self) -> None:
        """Removes every node that was live and is dead now, and dead readers of such nodes."""
        live = self._live(self.shapes)
        gone: set[int] = set()
        nodes: list[gs.Node] = []
        for node in self.editor.graph.nodes:
            if id(node) in live:
                source = node.inputs[0].inputs if id(node) in self.shapes else []
                nodes.extend(self._size_nodes(node) if source and id(source[0]) not in live else [node])
            elif id(node) in self.live_before or any(id(n) in gone for t in node.inputs for n in t.inputs):
                gone.add(id(node))
            else:
                nodes.append(node)
        kept = {id(n) for n in nodes}
        for node in self.editor.graph.nodes:
            if id(node) not in kept:
                node.inputs.clear()
        self.editor.graph.nodes = [*self._head, *nodes]

    def _size_nodes(self, node: gs.Node) -> list[gs.Node]:
        """Nodes that write a Shape node's output from sizes of tensors that are kept."""
        output = node.outputs[0]
        sizes: list[gs.Tensor] = []
        nodes: list[gs.Node] = []
        inputs = {i.name for i in self.editor.model.graph.input}
        for element in self.shapes[id(node)]:
            if isinstance(element, int):
                sizes.append(self.editor.initializer("stof_size", np.array([element], np.int64)))
                continue
            if element[0] not in inputs:
                sizes.append(self._size(element, nodes))
                continue
            if element not in self._sizes:
                self._sizes[element] = self._size(element, self._head)
            sizes.append(self._sizes[element])
        output.inputs.clear()
        nodes.append(self.editor.node("Concat", f"{node.name}/stof", sizes, [output], axis=0))
        return nodes

    def _size(self, source: ShapeSource, nodes: list[gs.Node]) -> gs.Tensor:
        tensor, axis, factor = source
        whole = self.editor.variable(f"{tensor}/stof_shape", TensorProto.INT64)
        one = self.editor.variable(f"{tensor}/stof_size{axis}", TensorProto.INT64, [1])
        which = self.editor.initializer("stof_axis", np.array([axis], np.int64))
        nodes.append(self.editor.node("Shape", whole.name, [self.editor.tensors[tensor]], [whole]))
        nodes.append(self.editor.node("Gather", one.name, [whole, which], [one], axis=0))
        if factor == 1:
            return one
        times = self.editor.variable(f"{tensor}/stof_size{axis}x{factor}", TensorProto.INT64, [1])
        number = self.editor.initializer("stof_factor", np.array([factor], np.int64))
        nodes.append(self.editor.node("Mul", times.name, [one, number], [times]))
        return times


def _mask_tensors(index: GraphIndex, tensors: Iterable[str], stop: set[str]) -> set[str]:
    """The tensors from which masks are computed, up to ``stop``; a Shape node reads no data."""
    pending = [t for t in tensors if t]
    sources: set[str] = set()
    while pending:
        tensor = pending.pop()
        node = index.producer(tensor)
        if node is None or tensor in sources or tensor in stop:
            continue
        sources.add(tensor)
        if node.op_type != "Shape":
            pending.extend(n for n in node.input if n)
    return sources
