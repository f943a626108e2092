# SPDX-License-Identifier: Apache-2.0
"""Looking around in a graph: who writes and reads a tensor, subgraphs, domains, opsets and an order of execution."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import onnx

DOMAIN = "stof"
STANDARD_DOMAINS = ("", "ai.onnx")  # two spellings of one domain
_GRAPH = int(onnx.AttributeProto.GRAPH)


class GraphIndex:
    """Producers and consumers of a graph's tensors.

    Args:
        graph: the graph; later changes to its nodes are not seen.
        materialized: tensors that the graph computes whatever is replaced, so an operand is read there and not behind them.
        fused_nodes: for each tensor that stands for a part of an expanded fused node, the index of that node.
    """

    def __init__(
        self,
        graph: onnx.GraphProto,
        materialized: frozenset[str] = frozenset(),
        fused_nodes: Mapping[str, int] | None = None,
    ) -> None:
        self.graph = graph
        self.fused_nodes = fused_nodes or {}
        self.materialized = set(materialized)
        self.outputs = {o.name for o in graph.output}
        self.inputs = {i.name for i in graph.input}
        self._producer = producers(graph.node)
        self._consumers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in graph.node:
            for name in dict.fromkeys(node.input):
                if name:
                    self._consumers[name].append(node)
        # Subgraphs of If and Loop read outer tensors without naming them as inputs.
        self.captured = {name for node in graph.node if node.attribute for name in captured_tensors(node)}

    @cached_property
    def initializers(self) -> dict[str, onnx.TensorProto]:
        """The graph's initializers by name; those among its inputs are defaults, which a caller may override."""
        return {t.name: t for t in self.graph.initializer}

    def producer(self, tensor: str) -> onnx.NodeProto | None:
        """The node that writes a tensor."""
        return self._producer.get(tensor)

    def consumers(self, tensor: str) -> list[onnx.NodeProto]:
        """The nodes that read a tensor, each once."""
        return self._consumers.get(tensor, [])


def producers(nodes: Iterable[onnx.NodeProto]) -> dict[str, onnx.NodeProto]:
    """For each tensor the node that writes it."""
    return {o: node for node in nodes for o in node.output if o}


def producer_indices(nodes: Iterable[onnx.NodeProto]) -> dict[str, int]:
    """For each tensor the index of the node that writes it."""
    return {o: i for i, node in enumerate(nodes) for o in node.output if o}


def subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """The graphs in a node's attributes."""
    attributes = node.attribute
    if not attributes:
        return []
    graphs = [a.g for a in attributes if a.type == _GRAPH]
    return graphs + [g for a in attributes for g in a.graphs]


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Nodes with those of their subgraphs."""
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph.node)


def captured_tensors(node: onnx.NodeProto) -> set[str]:
    """The tensors that the subgraphs of a node read: outer ones, and the subgraphs' own."""
    names: set[str] = set()
    for graph in subgraphs(node):
        names.update(o.name for o in graph.output)
        for inner in graph.node:
            names.update(inner.input)
            names |= captured_tensors(inner)
    return names


def node_tensors(node: onnx.NodeProto) -> set[str]:
    """All tensor names in a node and its subgraphs."""
    names = {*node.input, *node.output}
    for graph in subgraphs(node):
        names.update(o.name for o in graph.output)
        for inner in graph.node:
            names |= node_tensors(inner)
    return names


def needed_tensors(graph: onnx.GraphProto) -> set[str]:
    """The tensors that a graph's outputs depend on, the outputs among them."""
    return find_needed((o.name for o in graph.output), graph.node)


def find_needed(outputs: Iterable[str], nodes: Iterable[onnx.NodeProto]) -> set[str]:
    """The tensors that outputs of some nodes depend on, the outputs among them."""
    producer = producers(nodes)
    pending = list(outputs)
    needed: set[str] = set()
    while pending:
        name = pending.pop()
        if name in needed:
            continue
        needed.add(name)
        if name in producer:
            pending.extend(node_tensors(producer[name]) - needed)
    return needed


def topological_order(nodes: Sequence[onnx.NodeProto], ranks: Sequence[int] | None = None) -> list[int]:
    """Node indices with writers before readers, and otherwise by rank, which is the index unless ``ranks`` are given.

    Nodes on a cycle, and those that depend on one, are left out.
    """
    ranks = range(len(nodes)) if ranks is None else ranks
    writer = producer_indices(nodes)
    waits_for = [{writer[n] for n in {*node.input, *captured_tensors(node)} if n in writer} for node in nodes]
    readers: dict[int, list[int]] = defaultdict(list)
    for i, before in enumerate(waits_for):
        for other in before:
            readers[other].append(i)
    ready = [(ranks[i], i) for i, before in enumerate(waits_for) if not before]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        _, i = heapq.heappop(ready)
        order.append(i)
        for reader in readers[i]:
            waits_for[reader].discard(i)
            if not waits_for[reader]:
                heapq.heappush(ready, (ranks[reader], reader))
    return order


def is_standard(node: onnx.NodeProto) -> bool:
    """Whether a node is of the standard ONNX domain."""
    return node.domain in STANDARD_DOMAINS


def domain_of(node: onnx.NodeProto) -> str:
    """A node's domain, the standard one by its short name ""."""
    return "" if node.domain in STANDARD_DOMAINS else str(node.domain)


def opset_of(model: onnx.ModelProto) -> int:
    """The version of the standard domain that a model imports.

    Raises:
        StopIteration: when it imports none; ``load`` refuses such models.
    """
    return int(next(e.version for e in model.opset_import if e.domain in STANDARD_DOMAINS))


def contrib_version_of(model: onnx.ModelProto) -> int:
    """The version of domain com.microsoft that a model imports; 1 where it imports none."""
    return next((int(e.version) for e in model.opset_import if e.domain == "com.microsoft"), 1)


def describe(node: onnx.NodeProto) -> str:
    """A node in words: its operator and name. It may be one of a broken model, without outputs."""
    operator = node.op_type if is_standard(node) else f"{node.domain}::{node.op_type}"
    if node.name:
        return f"{operator} node {node.name!r}"
    return f"the {operator} node that writes {node.output[0]!r}" if node.output else f"a nameless {operator} node"
