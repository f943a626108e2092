# SPDX-License-Identifier: Apache-2.0
"""Why tensors are in a graph: the attention that reads or makes them, and what the report says of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping

import onnx

from stof.graph.index import DOMAIN, GraphIndex

_MOST_NODES = 200  # on the way from a tensor to its attention


class TensorReasons:
    """Finds reasons of tensors.

    Args:
        graph: the graph.
        tensors: those that are looked at; ways to an attention lead through them.
        reasons: why sites are as they are, by their names: nodes of the graph, or of the original.
    """

    def __init__(self, graph: onnx.GraphProto, tensors: Collection[str], reasons: Mapping[str, str]) -> None:
        self._index = GraphIndex(graph)
        self._tensors = frozenset(tensors)
        self._reasons = reasons
        self._by_scope: dict[str, list[str]] = {}
        for site in reasons:
            self._by_scope.setdefault(_scope(site), []).append(site)

    def find(self, tensor: str) -> str:
        """The reason in words; empty where none is known."""
        return self._search(tensor, self._index.consumers) or self._search(tensor, self._writers)

    def _writers(self, tensor: str) -> list[onnx.NodeProto]:
        node = self._index.producer(tensor)
        return [] if node is None else [node]

    def _search(self, tensor: str, step: object) -> str:
        """The reason of the first attention that is met along readers, or along writers."""
        pending, seen = deque([tensor]), {tensor}
        while pending and len(seen) < _MOST_NODES:
            name = pending.popleft()
            assert callable(step)
            nodes: Iterable[onnx.NodeProto] = step(name)
            for node in nodes:
                if words := self._describe(node, name):
                    return words
                ways = node.output if name in node.input else node.input
                for other in ways:
                    if other in self._tensors and other not in seen:
                        seen.add(other)
                        pending.append(other)
        return ""

    def _describe(self, node: onnx.NodeProto, tensor: str) -> str:
        """What is said of a node, if it is attention."""
        if node.name in self._reasons:
            return f"{node.name}: {self._reasons[node.name]}"
        if node.domain != DOMAIN or not node.op_type.endswith("Attention"):
            return ""
        sites = self._by_scope.get(_scope(node.name), [])
        notes = [self._reasons[s] for s in sites]
        note = next((n for n in notes if tensor in {w.strip("',;:") for w in n.split()}), next(iter(notes), ""))
        use = "read" if tensor in node.input else "written"
        return f"{use} by {node.name}{f': {note}' if note else ''}"


def _scope(name: str) -> str:
    """The module of a node, by its name."""
    return name.rpartition("/")[0] or name
