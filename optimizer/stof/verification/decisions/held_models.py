# SPDX-License-Identifier: Apache-2.0
"""Models in which tensors are held to the values of one run, so that what follows from them can be compared in others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx
from onnx import helper

from stof.graph.index import GraphIndex, node_tensors, producers
from stof.graph.protobuf import remove_named
from stof.verification.decisions.find_decisions import Held

_FREE = "/stof_free"
_COPIED = "/stof_copied"


def free_name(tensor: str) -> str:
    """The name of what a model itself computes for a tensor that is held."""
    return tensor + _FREE


def list_tensors(graph: onnx.GraphProto) -> set[str]:
    """All tensors of the main graph by name."""
    written = {o for node in graph.node for o in node.output if o}
    return written | {v.name for v in graph.input} | {t.name for t in graph.initializer}


def hold_tensors(model: onnx.ModelProto, dtypes: Mapping[str, int]) -> onnx.ModelProto:
    """A copy in which tensors are inputs; what the model itself computes for them are outputs (``free_name``).

    Args:
        model: a model.
        dtypes: the tensors, all written by nodes, with their element types.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    for node in graph.node:
        for i, name in enumerate(node.output):
            if name in dtypes:
                node.output[i] = free_name(name)
    for field in (graph.output, graph.value_info):
        remove_named(field, dtypes.keys())
    graph.output.extend(_values({free_name(name): dtype for name, dtype in dtypes.items()}))
    graph.input.extend(_values(dtypes))
    return result


def add_outputs(
    model: onnx.ModelProto, original: onnx.GraphProto, dtypes: Mapping[str, int]
) -> tuple[onnx.ModelProto, dict[str, str]]:
    """A copy of a model that also gives tensors of the original, and the names of these outputs by tensor.

    A tensor inside of a fused node is computed by copies of the original's nodes, from the tensors that both models have.

    Args:
        model: a model.
        original: the graph that it was made of.
        dtypes: the tensors with their element types.
    """
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    available, producer = list_tensors(graph), producers(original.node)
    weights = {t.name: t for t in original.initializer}
    copied: dict[str, str] = {}
    needed, written = _find_between(available, producer, weights, dtypes)
    graph.initializer.extend(weights[n] for n in needed)
    for node in [n for n in original.node if written & set(n.output)]:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{node.name or node.output[0]}{_COPIED}"
        for i, name in enumerate(node.input):
            copy.input[i] = copied.get(name, name)
        for i, name in enumerate(node.output):
            if name:
                copied[name] = copy.output[i] = name + _COPIED
        graph.node.append(copy)
    declared = {o.name for o in graph.output}
    names = {name: copied.get(name, name) for name in dtypes}
    for name, output in names.items():
        if output not in declared:
            graph.output.append(helper.make_tensor_value_info(output, dtypes[name], None))
            declared.add(output)
    return result, names


def _find_between(
    available: set[str],
    producer: Mapping[str, onnx.NodeProto],
    weights: Mapping[str, onnx.TensorProto],
    wanted: Iterable[str],
) -> tuple[list[str], set[str]]:
    """The initializers that wanted tensors are computed of with available ones, and all tensors that nodes write for them."""
    needed: list[str] = []
    written: set[str] = set()
    pending = list(wanted)
    while pending:
        name = pending.pop()
        if not name or name in available or name in written or name in needed:
            continue
        if name in weights:
            needed.append(name)
        elif (node := producer.get(name)) is not None:
            written.update(o for o in node.output if o)
            pending.extend(node_tensors(node) - set(node.output))
    return needed, written


def cut_decision(
    model: onnx.ModelProto, held: Held, before: Mapping[str, int], results: Mapping[str, int]
) -> onnx.ModelProto:
    """A model of a decision alone: from the floats before it to what is held of its result.

    Args:
        model: the model with the decision.
        held: the nodes.
        before: the inputs with their element types.
        results: the outputs with theirs.
    """
    index = GraphIndex(model.graph)
    read = [n for node in held.nodes for n in node.input if n and n not in before]
    constants = [p for n in dict.fromkeys(read) if (p := index.producer(n)) is not None and p.op_type == "Constant"]
    order = {name: i for i, node in enumerate(model.graph.node) for name in node.output}
    graph = helper.make_graph(
        [*constants, *sorted(held.nodes, key=lambda n: order[n.output[0]])],
        "decision",
        _values(before),
        _values(results),
        [index.initializers[n] for n in dict.fromkeys(read) if n in index.initializers],
    )
    cut = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    cut.functions.extend(model.functions)
    return cut


def _values(dtypes: Mapping[str, int]) -> Sequence[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, dtype, None) for name, dtype in dtypes.items()]
