# SPDX-License-Identifier: Apache-2.0
"""Removes nodes, initializers and value_info that an edit left without a reader."""

from __future__ import annotations

from collections.abc import Iterable

import onnx

from stof.graph.index import captured_tensors, needed_tensors, subgraphs
from stof.graph.protobuf import remove_named


def remove_dead_code(graph: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Removes dead nodes, and initializers and value_info of tensors that only the original's outputs needed.

    Initializers that nothing needed before the edit stay.

    Args:
        graph: the edited graph, changed in place.
        original: the graph before the edit.
    """
    live = needed_tensors(graph)
    newly_dead = needed_tensors(original) - live
    written_before = {o for n in original.node for o in n.output}
    for i in reversed(range(len(graph.node))):
        if not live.intersection(graph.node[i].output):  # also one that was dead before: it may read what is removed
            del graph.node[i]
    written = {o for n in graph.node for o in n.output}
    remove_named(graph.initializer, newly_dead - {i.name for i in graph.input})
    remove_named(graph.value_info, newly_dead | (written_before - written))


def remove_dead_nodes(graph: onnx.GraphProto | onnx.FunctionProto, outputs: Iterable[str]) -> None:
    """Removes nodes that nothing reads from a function or a subgraph, and from the subgraphs in it, in place.

    Runtimes inline functions, and warn of each constant that is left over.

    Args:
        graph: the function or subgraph.
        outputs: its outputs.
    """
    live = set(outputs)
    for i in reversed(range(len(graph.node))):
        node = graph.node[i]
        if not live.intersection(node.output):
            del graph.node[i]
            continue
        for inner in subgraphs(node):
            remove_dead_nodes(inner, [o.name for o in inner.output])
        live.update(node.input)
        live |= captured_tensors(node)
