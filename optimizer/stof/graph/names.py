# SPDX-License-Identifier: Apache-2.0
"""Fresh names for nodes, tensors and rows of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import onnx

from stof.graph.index import all_nodes, node_tensors


def _with_suffix(name: str, number: int) -> str:
    return f"{name}_{number}"


class FreshNames:
    """Makes names that are not taken: the wanted name, else ``name_2``, ``name_3`` and so on.

    Args:
        taken: names that must not be made.
        numbered: makes the candidate from the wanted name and a number.
    """

    def __init__(self, taken: Iterable[str] = (), numbered: Callable[[str, int], str] = _with_suffix) -> None:
        self._taken = set(taken)
        self._numbered = numbered

    def __contains__(self, name: object) -> bool:
        return name in self._taken

    def reserve(self, names: Iterable[str]) -> None:
        """Marks names as taken."""
        self._taken.update(names)

    def make(self, wanted: str) -> str:
        """A name like ``wanted`` that is not taken; marks it as taken."""
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = self._numbered(wanted, number)
        self._taken.add(name)
        return name


def name_nodes(model: onnx.ModelProto) -> None:
    """Gives every node of the main graph and its subgraphs a name of its own: TensorRT identifies layers by name."""
    nodes = list(all_nodes(model.graph.node))
    names = FreshNames((n.name for n in nodes), lambda name, number: f"{name}_{number - 1}")
    seen: set[str] = set()
    for node in nodes:
        if not node.name or node.name in seen:
            node.name = names.make(node.name or f"{node.op_type}_{node.output[0] if node.output else ''}")
        seen.add(node.name)


def unused_prefix(graph: onnx.GraphProto, prefix: str) -> str:
    """A prefix that no tensor of a graph or its subgraphs has: the wanted one, with more before it where it is taken."""
    taken = {name for node in graph.node for name in node_tensors(node)}
    taken |= {value.name for value in (*graph.input, *graph.initializer)}
    while any(name.startswith(prefix) for name in taken):
        prefix = f"_{prefix}"
    return prefix


def rename_tensor(graph: onnx.GraphProto, name: str, new: str) -> None:
    """Gives a tensor another name where the nodes of a graph write and read it; those of subgraphs keep the old one."""
    for node in graph.node:
        for names in (node.input, node.output):
            for i, found in enumerate(names):
                if found == name:
                    names[i] = new
