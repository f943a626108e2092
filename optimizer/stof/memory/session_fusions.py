# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime's optimizer makes of a graph, as far as it changes which tensors there are and when they are made.

Equal nodes become one. A matmul takes in what transposes its operands and what scales operands or result. Such a matmul is a
new node, and new nodes come after all others; so it runs before the other operands of the node that reads it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import onnx

from stof.graph.index import is_standard, subgraphs
from stof.graph.node_fields import attributes_of
from stof.memory.session_node import SessionNode

RANDOM = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_SMALL = 32  # elements of a constant of which equal ones are one
_SCALES = ("Mul", "Div")


def merge_equal_nodes(
    nodes: Iterable[SessionNode], constants: Iterable[tuple[str, onnx.TensorProto]], kept: frozenset[str]
) -> list[SessionNode]:
    """The nodes without those that compute what another one does.

    Args:
        nodes: in an order in which they can run.
        constants: of the graph, by the tensors that hold them.
        kept: tensors that have to be there by their names.
    """
    first: dict[object, tuple[str, ...]] = {}
    same: dict[str, str] = {}
    by_value: dict[bytes, str] = {}
    for name, tensor in constants:
        if math.prod(tensor.dims) <= _SMALL:
            unnamed = onnx.TensorProto()
            unnamed.CopyFrom(tensor)
            unnamed.ClearField("name")
            same[name] = by_value.setdefault(unnamed.SerializeToString(deterministic=True), name)
    merged = []
    for node in nodes:
        inputs = tuple(same.get(n, n) for n in node.inputs)
        renamed = replace(node, inputs=inputs, captured=tuple(same.get(n, n) for n in node.captured))
        if subgraphs(node.proto) or node.op in RANDOM or not is_standard(node.proto) or kept & set(node.outputs):
            merged.append(renamed)
            continue
        attributes = tuple(sorted(a.SerializeToString(deterministic=True) for a in node.proto.attribute))
        known = first.setdefault((node.op, inputs, attributes, len(node.outputs)), node.outputs)
        if known is node.outputs:
            merged.append(renamed)
        else:
            same |= dict(zip(node.outputs, known, strict=True))
    return merged


@dataclass
class _Edges:
    """Writers and readers of tensors, and which nodes are gone."""

    nodes: list[SessionNode]
    kept: frozenset[str]

    def __post_init__(self) -> None:
        self.writer = {o: i for i, n in enumerate(self.nodes) for o in n.outputs}
        self.readers: dict[str, list[int]] = {}
        for i, node in enumerate(self.nodes):
            for name in {*node.inputs, *node.captured} - {""}:
                self.readers.setdefault(name, []).append(i)
        self.gone: set[int] = set()

    def only_reader(self, name: str) -> int | None:
        """The node that alone reads a tensor."""
        readers = self.readers.get(name, [])
        return readers[0] if len(readers) == 1 and name not in self.kept else None

    def drop(self, index: int) -> None:
        """Takes a node out that nobody reads any more."""
        node = self.nodes[index]
        if any(self.readers.get(o) for o in node.outputs) or self.kept & set(node.outputs):
            return
        self.gone.add(index)
        for name in {*node.inputs} - {""}:
            self.readers[name].remove(index)

    def read(self, index: int, old: str, new: str) -> None:
        """Has a node read another tensor."""
        node = self.nodes[index]
        self.nodes[index] = replace(node, inputs=tuple(new if n == old else n for n in node.inputs))
        self.readers[old].remove(index)
        self.readers.setdefault(new, []).append(index)


def fuse_matmuls(
    nodes: Sequence[SessionNode],
    kept: frozenset[str],
    is_scalar: Callable[[str], bool],
    is_float: Callable[[str], bool],
) -> list[SessionNode]:
    """The nodes with transposes and scales inside of matmuls.

    Args:
        nodes: in an order in which they can run.
        kept: tensors that have to be there by their names.
        is_scalar: whether a tensor is one constant number.
        is_float: whether a tensor is computed in fp32, for which there are such matmuls.
    """
    edges = _Edges(list(nodes), kept)
    matmuls = [i for i, n in enumerate(nodes) if n.op in ("MatMul", "FusedMatMul") and is_float(n.outputs[0])]
    ranks = Counter[int]()
    for index in matmuls:
        if _take_transposes(edges, index):
            ranks[index] = 1
    for index in matmuls:
        if _take_scales(edges, index, is_scalar):
            ranks[index] = 2
    return [replace(n, rank=ranks[i]) for i, n in enumerate(edges.nodes) if i not in edges.gone]


def _take_transposes(edges: _Edges, index: int) -> bool:
    """Takes transposes of the last two axes into a matmul; says whether there were any."""
    found = False
    for name in dict.fromkeys(edges.nodes[index].inputs):
        writer = edges.writer.get(name)
        if writer is None or edges.nodes[writer].op != "Transpose":
            continue
        perm = list(attributes_of(edges.nodes[writer].proto).get("perm", ()))
        rank = len(perm)
        if rank < 2 or perm != [*range(rank - 2), rank - 1, rank - 2]:
            continue
        edges.read(index, name, edges.nodes[writer].inputs[0])
        edges.drop(writer)
        found = True
    return found


def _take_scales(edges: _Edges, index: int, is_scalar: Callable[[str], bool]) -> bool:
    """Takes factors of operands and of the result into a matmul; says whether there were any."""
    found = False
    for name in dict.fromkeys(edges.nodes[index].inputs):
        writer = edges.writer.get(name)
        data = "" if writer is None else _scaled(edges.nodes[writer], is_scalar)
        if writer is not None and data and edges.only_reader(name) == index:
            edges.read(index, name, data)
            edges.drop(writer)
            found = True
    output = edges.nodes[index].outputs[0]
    reader = edges.only_reader(output)
    if reader is not None and _scaled(edges.nodes[reader], is_scalar) == output:
        result = edges.nodes[reader].outputs
        edges.nodes[index] = replace(edges.nodes[index], outputs=result)
        edges.gone.add(reader)
        edges.writer[result[0]] = index
        found = True
    return found


def _scaled(node: SessionNode, is_scalar: Callable[[str], bool]) -> str:
    """The tensor that a node multiplies by a constant number; empty where it does something else."""
    if node.op not in _SCALES or not is_standard(node.proto):
        return ""
    one, other = node.inputs
    if is_scalar(other):
        return one
    return other if node.op == "Mul" and is_scalar(one) else ""
