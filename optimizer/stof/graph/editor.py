# SPDX-License-Identifier: Apache-2.0
"""A graph under edit: GraphSurgeon's view of it, and the way back into a copy of the original model.

GraphSurgeon holds the structure only. Weights, attributes, types, functions, metadata and documentation stay in the
original protobuf, of which it would lose parts; every node that was not replaced is put back as it was.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, TensorProto, helper

from stof.graph.model_graph import node_tensors

_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


class Editing:
    """Nodes and tensors of a model by name, with fresh names and shared initializers for what is added."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph: gs.Graph = gs.import_onnx(_bare(model))
        self.protos = {id(n): p for n, p in zip(self.graph.nodes, model.graph.node, strict=True)}
        self.originals = list(self.graph.nodes)  # keeps them alive: the keys above are their ids
        self.tensors: dict[str, gs.Tensor] = {t.name: t for t in self.graph.inputs} | self.graph.tensors()
        self._node_names = {n.name for n in model.graph.node}
        self._tensor_names = set(self.tensors) | {t.name for t in model.graph.initializer}
        for node in model.graph.node:
            self._tensor_names |= node_tensors(node)
        self._shared: dict[tuple[str, tuple[int, ...], bytes], gs.Constant] = {}
        self._infos: list[onnx.ValueInfoProto] = []

    def unique(self, name: str) -> str:
        """A node name that no node has."""
        return _fresh(name, self._node_names)

    def variable(self, name: str, dtype: int, shape: list[int | str] | None = None) -> gs.Variable:
        """A new tensor with a fresh name, and its value_info."""
        found = gs.Variable(_fresh(name, self._tensor_names))
        self.tensors[found.name] = found
        self._infos.append(helper.make_tensor_value_info(found.name, dtype, shape))
        return found

    def declare(self, name: str, dtype: int, shape: list[int | str]) -> None:
        """value_info for a tensor of the original that has none."""
        known = {v.name for v in (*self.model.graph.value_info, *self.model.graph.output)}
        if name not in known:
            self._infos.append(helper.make_tensor_value_info(name, dtype, shape))

    def initializer(self, name: str, array: np.ndarray) -> gs.Constant:
        """A new constant; equal ones are shared."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            constant = gs.Constant(_fresh(name, self._tensor_names), array)
            self.tensors[constant.name] = constant
            self._shared[key] = constant
        return self._shared[key]

    def producer(self, tensor: str) -> gs.Node | None:
        """The node that writes a tensor."""
        found = self.tensors.get(tensor)
        return found.inputs[0] if found is not None and found.inputs else None

    def node(
        self, op: str, name: str, inputs: list[gs.Tensor], outputs: list[gs.Tensor], **attributes: object
    ) -> gs.Node:
        """A new node of the standard domain; the caller puts it into the graph."""
        return gs.Node(op, self.unique(name), dict(attributes), inputs, outputs)

    def finish(self) -> onnx.ModelProto:
        """The edited graph in a copy of the original model."""
        exported = gs.export_onnx(self.graph, do_type_check=False).graph
        result = onnx.ModelProto()
        result.CopyFrom(self.model)
        graph = result.graph
        del graph.node[:]
        for node, proto in zip(self.graph.nodes, exported.node, strict=True):
            graph.node.append(self.protos.get(id(node), proto))
        used = {name for node in graph.node for name in node_tensors(node)} | {o.name for o in graph.output}
        before = {name for node in self.model.graph.node for name in node_tensors(node)}
        gone = (before - used) - {i.name for i in graph.input}
        _remove(graph.initializer, gone)
        _remove(graph.value_info, gone)
        added = {t.name for t in self._shared.values()} & used
        graph.initializer.extend(t for t in exported.initializer if t.name in added)
        graph.value_info.extend(v for v in self._infos if v.name in used)
        return result


def captured(node: gs.Node) -> list[gs.Tensor]:
    """The tensors that the subgraphs of a node read, outer ones among them."""
    found: list[gs.Tensor] = []
    for value in node.attrs.values():
        for graph in value if isinstance(value, list) else [value]:
            if isinstance(graph, gs.Graph):
                found.extend(graph.outputs)
                for inner in graph.nodes:
                    found.extend(inner.inputs)
                    found.extend(captured(inner))
    return found


def _fresh(name: str, taken: set[str]) -> str:
    candidate, i = name, 1
    while candidate in taken:
        i += 1
        candidate = f"{name}_{i}"
    taken.add(candidate)
    return candidate


def _remove(entries: object, names: set[str]) -> None:
    """Deletes entries of a repeated field in place: a copy would double the weights."""
    for i in range(len(entries) - 1, -1, -1):  # type: ignore[arg-type]
        if entries[i].name in names:  # type: ignore[index]
            del entries[i]  # type: ignore[attr-defined]


def _bare(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model's structure: nodes with their subgraphs, names of initializers, inputs and outputs."""
    bare = onnx.ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    _copy_graph(model.graph, bare.graph)
    return bare


def _copy_graph(source: onnx.GraphProto, target: onnx.GraphProto) -> None:
    target.name = source.name
    for tensor in source.initializer:
        # Nobody reads the data: only the name counts.
        stub = target.initializer.add(name=tensor.name, data_type=TensorProto.FLOAT, dims=[0])
        stub.raw_data = b""
    for field in ("input", "output"):
        for value in getattr(source, field):
            getattr(target, field).append(helper.make_tensor_value_info(value.name, TensorProto.FLOAT, None))
    for node in source.node:
        copy = target.node.add(op_type=node.op_type, domain=node.domain, name=node.name)
        copy.input.extend(node.input)
        copy.output.extend(node.output)
        for attribute in node.attribute:
            if attribute.type in _GRAPHS:
                own = copy.attribute.add(name=attribute.name, type=attribute.type)
                if attribute.type == AttributeProto.GRAPH:
                    _copy_graph(attribute.g, own.g)
                for inner in attribute.graphs:
                    _copy_graph(inner, own.graphs.add())
