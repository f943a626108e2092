# SPDX-License-Identifier: Apache-2.0
"""ONNX's own shape inference, for operators that have no rule here: types and shapes, no values.

A node is inferred in a model of its own, whose inputs have the types and shapes that are known. Each size that is no number
stands there under a name, and is found again by that name in the shapes of the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.graph.index import all_nodes, captured_tensors, subgraphs
from stof.symbolic.algebra.terms import Int, dim, integer
from stof.symbolic.facts import Fact
from stof.symbolic.tensor import SMALL, Shape

_LARGEST_NODE = 1 << 26  # bytes of a node with its subgraphs, which is copied
_LOOP_ROUNDS = 4  # in each, sizes that a loop changes become unknown


class OnnxInference:
    """Infers nodes one by one, in the order of the graph.

    Args:
        opsets: the operator sets of the model.
        ir_version: of the model.
    """

    def __init__(self, opsets: Sequence[onnx.OperatorSetIdProto], ir_version: int) -> None:
        self._opsets = {o.domain: o.version for o in opsets}
        self._ir_version = ir_version
        self._names: dict[Int, str] = {}
        self._sizes: dict[str, Int] = {}
        self._sequences: dict[str, onnx.TypeProto] = {}  # types of sequences and optional tensors, which no fact holds

    def infer(self, node: onnx.NodeProto, facts: Mapping[str, Fact]) -> list[Fact] | None:
        """The facts of a node's outputs; None where ONNX does not know the operator or cannot infer anything.

        Args:
            node: its inputs, and what its subgraphs take from outside, are looked up in ``facts``.
            facts: the tensors known so far.
        """
        version = self._opsets.get(node.domain)
        if version is None or not onnx.defs.has(node.op_type, version, node.domain) or node.ByteSize() > _LARGEST_NODE:
            return None
        model = self._model(node.name)
        model.graph.node.append(node)
        _forget_sizes(model.graph.node[0])
        self._declare_all(model.graph, (*node.input, *(captured_tensors(node) - _own_tensors(node))), facts)
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
        types = _types(model)
        if types is None:
            return None
        for name in node.output:
            if name in types and types[name].WhichOneof("value") in ("sequence_type", "optional_type"):
                self._sequences[name] = types[name]
        unknown: dict[str, Int] = {}
        inferred = [self._fact(name, types.get(name), unknown) for name in node.output]
        return self._with_loop_states(node, facts, inferred) if node.op_type == "Loop" else inferred

    def _with_loop_states(self, node: onnx.NodeProto, facts: Mapping[str, Fact], inferred: list[Fact]) -> list[Fact]:
        """ONNX gives no shapes of what a loop carries along. Those are the sizes that its body does not change."""
        body = next((a.g for a in node.attribute if a.name == "body"), None)
        states = [facts.get(name, Fact()) for name in node.input[2:]]
        if body is None or len(body.input) != 2 + len(states) or len(body.output) <= len(states):
            return inferred
        outer = captured_tensors(node) - _own_tensors(node)
        for _ in range(_LOOP_ROUNDS):
            model = self._model("body")
            model.graph.CopyFrom(body)
            del model.graph.input[2:]
            del model.graph.value_info[:]
            for inner in model.graph.node:
                _forget_sizes(inner)
            carried = {v.name: state for v, state in zip(body.input[2:], states, strict=True)}
            self._declare_all(model.graph, carried, {n: Fact(f.dtype, f.shape) for n, f in carried.items()})
            self._declare_all(model.graph, outer, facts)
            for output in model.graph.output:
                output.ClearField("type")
            types = _types(model) or {}
            unknown: dict[str, Int] = {}
            after = [self._fact(v.name, types.get(v.name), unknown) for v in body.output[1 : 1 + len(states)]]
            kept = [_keep_common(name, one, two) for name, one, two in zip(node.output, states, after, strict=False)]
            if kept == [(s.dtype, s.shape) for s in states[: len(kept)]]:
                return [Fact(f.dtype, kept[i][1]) if i < len(kept) else f for i, f in enumerate(inferred)]
            states = [Fact(*kept[i]) if i < len(kept) else state for i, state in enumerate(states)]
        return inferred

    def _model(self, name: str) -> onnx.ModelProto:
        model = onnx.ModelProto(ir_version=self._ir_version)
        model.opset_import.extend(helper.make_opsetid(domain, number) for domain, number in self._opsets.items())
        model.graph.name = name or "node"
        return model

    def _declare_all(self, graph: onnx.GraphProto, names: Iterable[str], facts: Mapping[str, Fact]) -> None:
        for name in dict.fromkeys(names):
            if name:
                self._declare(graph, name, facts.get(name, Fact()))

    def _declare(self, graph: onnx.GraphProto, name: str, fact: Fact) -> None:
        if name in self._sequences:
            graph.input.append(helper.make_value_info(name, self._sequences[name]))
            return
        if not fact.dtype:
            return
        shape = None if fact.shape is None else [self._write_size(size) for size in fact.shape]
        graph.input.append(helper.make_tensor_value_info(name, fact.dtype, shape))
        constant = None if fact.value is None else fact.value.constant
        if constant is not None and constant.size <= SMALL and constant.dtype.kind in "biuf":
            array = constant.astype(helper.tensor_dtype_to_np_dtype(fact.dtype))
            graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))

    def _write_size(self, size: Int) -> int | str:
        if size.constant is not None:
            return size.constant
        name = self._names.setdefault(size, f"size{len(self._names)}")
        self._sizes[name] = size
        return name

    def _fact(self, name: str, type_proto: onnx.TypeProto | None, unknown: dict[str, Int]) -> Fact:
        if type_proto is None or type_proto.WhichOneof("value") != "tensor_type":
            return Fact()
        tensor = type_proto.tensor_type
        return Fact(tensor.elem_type, self._shape(name, tensor, unknown) if tensor.HasField("shape") else None)

    def _shape(self, name: str, tensor: onnx.TypeProto.Tensor, unknown: dict[str, Int]) -> Shape:
        """``unknown`` has sizes that ONNX made a name for: the same name means the same size."""
        sizes: list[Int] = []
        for axis, d in enumerate(tensor.shape.dim):
            if d.HasField("dim_value") and d.dim_value >= 0:
                sizes.append(integer(d.dim_value))
            elif d.dim_param in self._sizes:
                sizes.append(self._sizes[d.dim_param])
            elif d.dim_param:
                sizes.append(unknown.setdefault(d.dim_param, dim(f"{name}#{axis}")))
            else:
                sizes.append(dim(f"{name}#{axis}"))
        return tuple(sizes)


def _types(model: onnx.ModelProto) -> dict[str, onnx.TypeProto] | None:
    """The types of a graph's outputs and inner tensors; None where ONNX refuses the graph."""
    try:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    except Exception:  # the C++ library raises several types, on graphs that break the standard's rules
        return None
    return {v.name: v.type for v in (*graph.value_info, *graph.output)}


def _forget_sizes(node: onnx.NodeProto) -> None:
    """Leaves out sizes by name in the subgraphs of a node: inside and outside, one name may mean two sizes."""
    for graph in subgraphs(node):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for d in value.type.tensor_type.shape.dim:
                d.ClearField("dim_param")
        for inner in graph.node:
            _forget_sizes(inner)


def _keep_common(name: str, one: Fact, other: Fact) -> tuple[int, Shape | None]:
    """The type and shape of a tensor that is one of two: sizes that differ are unknown."""
    if one.shape is None or other.shape is None or len(one.shape) != len(other.shape):
        return one.dtype, None
    sizes = (a if a == b else dim(f"{name}#{i}") for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)))
    return one.dtype, tuple(sizes)


def _own_tensors(node: onnx.NodeProto) -> set[str]:
    """What the subgraphs of a node, and those within these, define."""
    names: set[str] = set()
    for inner in (node, *all_nodes(n for g in subgraphs(node) for n in g.node)):
        for graph in subgraphs(inner):
            names.update(v.name for v in graph.input)
            names.update(t.name for t in graph.initializer)
            names.update(name for n in graph.node for name in n.output)
    return names
