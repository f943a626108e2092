# SPDX-License-Identifier: Apache-2.0
"""Writes the nodes of a graph attribute into the graph around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from stof.errors import UnsupportedError
from stof.graph.external_data import is_external
from stof.graph.index import find_needed, subgraphs
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_node


def inline_subgraph(builder: Builder, graph: onnx.GraphProto, arguments: Sequence[str]) -> list[str]:
    """Appends the nodes of a graph attribute that its results depend on to a builder, and returns these.

    Its inputs become tensors of the graph around it, its own tensors get fresh names, its initializers become constants.
    What it reads of outer graphs stays as it is.

    Args:
        builder: of the graph around it.
        graph: the attribute.
        arguments: the tensors in the place of its inputs.

    Raises:
        UnsupportedError: for another number of inputs, and for initializers that are sparse or in another file.
    """
    if len(graph.input) != len(arguments):
        raise UnsupportedError(f"graph {graph.name!r} has {len(graph.input)} inputs, expected {len(arguments)}")
    if graph.sparse_initializer:
        raise UnsupportedError(f"graph {graph.name!r} has sparse initializers, expected dense ones")
    needed = find_needed((o.name for o in graph.output), graph.node) - {""}  # which names what is absent
    names = dict(zip((i.name for i in graph.input), arguments, strict=True))
    for tensor in graph.initializer:
        if is_external(tensor):
            raise UnsupportedError(f"initializer {tensor.name!r} of graph {graph.name!r} is in another file")
        if tensor.name not in names and tensor.name in needed:  # else the default of an input
            names[tensor.name] = builder.add("Constant", [], value=tensor)
    for node in graph.node:
        if not needed.intersection(node.output):
            continue
        copy = copy_node(node)
        names |= {o: builder.name() for o in node.output if o}
        copy.name = next(names[o] for o in node.output if o)
        _rename(copy, names)
        builder.nodes.append(copy)
    return [names.get(o.name, o.name) for o in graph.output]


def _rename(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Renames the tensors of a node and what its subgraphs read of them."""
    for field in (node.input, node.output):
        for i, name in enumerate(field):
            field[i] = names.get(name, name)
    for graph in subgraphs(node):
        own = {v.name for v in (*graph.input, *graph.initializer)} | {o for n in graph.node for o in n.output}
        outer = {name: new for name, new in names.items() if name not in own}
        for inner in graph.node:
            _rename(inner, outer)
        for output in graph.output:
            output.name = outer.get(output.name, output.name)
