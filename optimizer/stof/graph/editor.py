# SPDX-License-Identifier: Apache-2.0
"""Edits a model with onnx-graphsurgeon and writes the result into a copy of the original model.

GraphSurgeon sees the structure only: it would lose parts of the protobuf. Weights, attributes, types, functions, metadata
and documentation stay in the original, and every node that was not replaced is copied from it.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from onnx import AttributeProto, TensorProto, helper

from stof.graph.index import node_tensors
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_model, remove_named

_GRAPHS = (AttributeProto.GRAPH, AttributeProto.GRAPHS)


class Editor:
    """A model under edit: its nodes and tensors by name, fresh names, and shared initializers for new constants."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model
        self.graph: gs.Graph = gs.import_onnx(_copy_structure(model))
        self.protos = {id(n): p for n, p in zip(self.graph.nodes, model.graph.node, strict=True)}
        self.originals = list(self.graph.nodes)  # keeps the nodes alive whose ids are keys above
        self.tensors: dict[str, gs.Tensor] = {t.name: t for t in self.graph.inputs} | self.graph.tensors()
        self._node_names = FreshNames(n.name for n in model.graph.node)
        self._tensor_names = FreshNames({*self.tensors, *(t.name for t in model.graph.initializer)})
        for node in model.graph.node:
            self._tensor_names.reserve(node_tensors(node))
        self._shared: dict[tuple[str, tuple[int, ...], bytes], gs.Constant] = {}
        self._infos: list[onnx.ValueInfoProto] = []
        self._declared = {v.name for v in (*model.graph.value_info, *model.graph.output)}
        self._inserted: dict[int, list[gs.Node]] = {}
        self._early: list[gs.Node] = []

    def fresh_node_name(self, name: str) -> str:
        """A node name like ``name`` that no other node has."""
        return self._node_names.make(name)

    def variable(self, name: str, dtype: int, shape: list[int | str] | None = None) -> gs.Variable:
        """A new tensor with a fresh name, and its value_info."""
        variable = gs.Variable(self._tensor_names.make(name))
        self.tensors[variable.name] = variable
        self._infos.append(helper.make_tensor_value_info(variable.name, dtype, shape))
        return variable

    def declare(self, name: str, dtype: int) -> None:
        """Adds value_info with the type of a tensor of the original that has none."""
        if name not in self._declared:
            self._infos.append(helper.make_tensor_value_info(name, dtype, None))

    def initializer(self, name: str, array: np.ndarray) -> gs.Constant:
        """A new initializer, or the one that was made from an equal array."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._shared:
            constant = gs.Constant(self._tensor_names.make(name), array)
            self.tensors[constant.name] = constant
            self._shared[key] = constant
        return self._shared[key]

    def producer(self, tensor: str) -> gs.Node | None:
        """The node that writes a tensor."""
        variable = self.tensors.get(tensor)
        return variable.inputs[0] if variable is not None and variable.inputs else None

    def node(
        self, op: str, name: str, inputs: list[gs.Tensor], outputs: list[gs.Tensor], **attributes: object
    ) -> gs.Node:
        """A new node of the standard domain; the caller puts it into the graph."""
        return gs.Node(op, self.fresh_node_name(name), dict(attributes), inputs, outputs)

    def insert_before(self, node: gs.Node, nodes: list[gs.Node]) -> None:
        """Puts new nodes in front of a node of the original, with the next :meth:`place_inserted`."""
        self._inserted.setdefault(id(node), []).extend(nodes)

    def insert_early(self, nodes: list[gs.Node]) -> None:
        """Puts new nodes behind the last node that they read, with the next :meth:`place_inserted`.

        Of what a node reads, ONNX Runtime's sessions first run what the file has last. So what stands early is computed when
        its reader needs it. What stands in front of its reader is computed before all layers below, and waits for them.
        """
        self._early.extend(nodes)

    def place_inserted(self) -> None:
        """Puts inserted nodes into the graph, in one pass for all of them."""
        behind = self._place_early()
        nodes = behind.pop(-1, [])
        for i, node in enumerate(self.graph.nodes):
            nodes += (*self._inserted.pop(id(node), ()), node, *behind.pop(i, ()))
        self.graph.nodes = nodes

    def _place_early(self) -> dict[int, list[gs.Node]]:
        """The early nodes by the node of the graph that they follow; -1: they come first."""
        if not self._early:
            return {}
        # Of nodes by identity: a number of the graph's, and 0 in front of that node, else 1.
        places: dict[int, tuple[int, int]] = {}
        for i, node in enumerate(self.graph.nodes):
            places |= {id(n): (i, 0) for n in self._inserted.get(id(node), ())}
            places[id(node)] = (i, 1)
        behind: dict[int, list[gs.Node]] = {}
        for node in self._early:
            i, side = max((places[id(p)] for tensor in node.inputs for p in tensor.inputs), default=(-1, 1))
            places[id(node)] = (i, side)
            group = behind.setdefault(i, []) if side else self._inserted[id(self.graph.nodes[i])]
            group.append(node)
        self._early = []
        return behind

    def finish(self) -> onnx.ModelProto:
        """The edited graph in a copy of the original model."""
        exported = gs.export_onnx(self.graph, do_type_check=False).graph
        result = copy_model(self.model)
        graph = result.graph
        del graph.node[:]
        for node, proto in zip(self.graph.nodes, exported.node, strict=True):
            graph.node.append(self.protos.get(id(node), proto))
        used = {name for node in graph.node for name in node_tensors(node)} | {o.name for o in graph.output}
        before = {name for node in self.model.graph.node for name in node_tensors(node)}
        gone = (before - used) - {i.name for i in graph.input}
        remove_named(graph.initializer, gone)
        remove_named(graph.value_info, gone)
        added = {t.name for t in self._shared.values()} & used
        graph.initializer.extend(t for t in exported.initializer if t.name in added)
        graph.value_info.extend(v for v in self._infos if v.name in used)
        return result


def captured_gs_tensors(node: gs.Node) -> list[gs.Tensor]:
    """The tensors that the subgraphs of a node read, outer ones among them."""
    tensors: list[gs.Tensor] = []
    for value in node.attrs.values():
        for graph in value if isinstance(value, list) else [value]:
            if isinstance(graph, gs.Graph):
                tensors.extend(graph.outputs)
                for inner in graph.nodes:
                    tensors.extend(inner.inputs)
                    tensors.extend(captured_gs_tensors(inner))
    return tensors


def _copy_structure(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model's structure: nodes with their subgraphs, names of initializers, inputs and outputs."""
    bare = onnx.ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    _copy_graph(model.graph, bare.graph)
    return bare


def _copy_graph(source: onnx.GraphProto, target: onnx.GraphProto) -> None:
    target.name = source.name
    for tensor in source.initializer:
        # Only the name matters to the edit: an empty stub saves a copy of the weights.
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
                copied = copy.attribute.add(name=attribute.name, type=attribute.type)
                if attribute.type == AttributeProto.GRAPH:
                    _copy_graph(attribute.g, copied.g)
                for inner in attribute.graphs:
                    _copy_graph(inner, copied.graphs.add())
