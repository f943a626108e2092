# SPDX-License-Identifier: Apache-2.0
"""What an edited graph holds that only the original's outputs needed."""

from __future__ import annotations

import onnx

from stof.graph.model_graph import node_tensors


def drop_unneeded(graph: onnx.GraphProto, original: onnx.GraphProto) -> None:
    """Removes what the outputs of the original needed and those of ``graph`` do not, and nodes that nobody ever reads.

    Args:
        graph: changed in place: nodes, initializers, and what is said of tensors that nobody writes any more.
        original: the graph before it was edited.
    """
    live = needed(graph)
    gone = needed(original) - live
    written = {o for n in original.node for o in n.output}
    for i in reversed(range(len(graph.node))):
        if not live.intersection(graph.node[i].output):  # also what nothing ever read: it may read what is gone
            del graph.node[i]
    inputs = {i.name for i in graph.input}
    still = {o for n in graph.node for o in n.output}
    for entries, dead in (
        (graph.initializer, gone - inputs),
        (graph.value_info, gone | (written - still)),
    ):
        for i in reversed(range(len(entries))):
            if entries[i].name in dead:
                del entries[i]


def needed(graph: onnx.GraphProto) -> set[str]:
    """The tensors that a graph's outputs need."""
    producer = {o: n for n in graph.node for o in n.output if o}
    pending = [o.name for o in graph.output]
    found: set[str] = set()
    while pending:
        name = pending.pop()
        if name in found:
            continue
        found.add(name)
        if name in producer:
            pending.extend(node_tensors(producer[name]) - found)
    return found
