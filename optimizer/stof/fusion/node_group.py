# SPDX-License-Identifier: Apache-2.0
"""Nodes that may become one kernel, with what is known about them. It is known for a union from its parts.

Only what crosses between the parts is looked at: a region of n nodes is made by n unions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stof.fusion.fusion_graph import FusionGraph


@dataclass(frozen=True)
class NodeGroup:
    """Some nodes of a graph.

    Attributes:
        members: their indices.
        written: the tensors that they write and other nodes, or the graph's outputs, read, in the order of the graph.
        read: the tensors whose data they read and do not write.
        computed: the tensors that they write and do not only move, row statistics and moved results of theirs among them.
        reductions: how many of them reduce a row.
    """

    members: frozenset[int]
    written: tuple[str, ...]
    read: frozenset[str]
    computed: frozenset[str]
    reductions: int

    def outputs(self, graph: FusionGraph) -> tuple[str, ...]:
        """What a kernel of them has to write: see ``FusionGraph.outputs``."""
        substitutes = graph.find_shape_substitutes(self.members, self.written, lambda: self.inputs(graph))
        return tuple(o for o in self.written if o not in substitutes)

    def inputs(self, graph: FusionGraph) -> set[str]:
        """The tensors that it reads, constants of one element left out."""
        return {n for n in self.read if not graph.is_number(n)}


def make_group(graph: FusionGraph, index: int) -> NodeGroup:
    """One node by itself."""
    members = frozenset([index])
    kind = graph.kinds[index]
    outputs = tuple(graph.nodes[index].output)
    return NodeGroup(
        members,
        tuple(o for o in outputs if graph.is_read_outside(o, members)),
        frozenset(graph.data[index]),
        frozenset() if kind == "moving" else frozenset(outputs),
        int(kind in ("reducing", "rowwise")),
    )


def join_groups(graph: FusionGraph, groups: Sequence[NodeGroup]) -> NodeGroup | None:
    """The union of groups.

    None where a kernel of it would compute elements again that broadcasting repeats; row statistics do not count.
    """
    members = frozenset().union(*(g.members for g in groups))
    computed = _find_computed(graph, groups, members)
    if computed is None:
        return None
    written = (o for g in groups for o in g.written if graph.is_read_outside(o, members))
    read = frozenset().union(*(g.read for g in groups))
    return NodeGroup(
        members,
        tuple(sorted(written, key=lambda o: (graph.writer[o], list(graph.nodes[graph.writer[o]].output).index(o)))),
        frozenset(n for n in read if graph.writer.get(n) not in members),
        frozenset(computed),
        sum(g.reductions for g in groups),
    )


def _find_computed(graph: FusionGraph, groups: Sequence[NodeGroup], members: frozenset[int]) -> set[str] | None:
    """The computed tensors of a union; None where one is read by a node that broadcasts it."""
    computed: set[str] = set().union(*(g.computed for g in groups))
    pending = [n for g in groups for n in g.read if n in computed]
    while pending:
        name = pending.pop()
        for p in graph.data_readers_among(name, members):
            node = graph.nodes[p]
            broadcasts = graph.kinds[p] in ("elementwise", "rowwise") or node.op_type == "Expand"
            if broadcasts and graph.is_broadcast(name, graph.symbolic.shape(node.output[0]) or ()):
                return None
            if graph.kinds[p] == "moving":
                pending += [o for o in node.output if o not in computed]
                computed.update(node.output)
    return computed
