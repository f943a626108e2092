# SPDX-License-Identifier: Apache-2.0
"""Nodes at which a rounding decides: they make whole numbers, flags or indices of floats, and lengths follow from these."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from stof.graph.index import STANDARD_DOMAINS, GraphIndex, node_tensors
from stof.symbolic import Symbolic

_MOST = 64  # decisions of one output, those nearest to it
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})
# 8-bit numbers are what quantizers write: steps of a value, not lengths and indices.
_WHOLE = frozenset({TensorProto.INT16, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL})
_ROUNDS = frozenset({"Round", "Floor", "Ceil", "Sign"})
_COMPARES = frozenset({"Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"})
_CHOOSES = frozenset({"ArgMax", "ArgMin", "TopK", "NonZero", "NonMaxSuppression"})
# Of whole numbers these make whole numbers, or move them.
_EXACT = frozenset(
    {"Abs", "Add", "Cast", "Clip", "Concat", "Expand", "Flatten", "Gather", "Identity", "Max", "Min", "Mul", "Neg", "Reshape"}
    | {"Slice", "Split", "Squeeze", "Sub", "Tile", "Transpose", "Unsqueeze", "Where"}
)  # fmt: skip


@dataclass(frozen=True)
class Decision:
    """A node that makes whole numbers of floats.

    Attributes:
        node: the node.
        before: the floats that it reads and that are no constants.
        result: what it decides.
    """

    node: onnx.NodeProto
    before: tuple[str, ...]
    result: str

    @property
    def name(self) -> str:
        """The operator, and the node's name or what it writes."""
        return f"{self.node.op_type} {self.node.name or self.result!r}"

    @property
    def is_elementwise(self) -> bool:
        """Whether an element of the result depends on one element of each input, and never falls where the first one rises."""
        return self.node.op_type not in _CHOOSES and self.node.op_type != "Equal"


def find_decisions(graph: onnx.GraphProto, symbolic: Symbolic, outputs: Collection[str]) -> list[Decision]:
    """The decisions of the main graph on which outputs depend, those nearest to the outputs, in the graph's order."""
    finder = _Finder(graph, symbolic)
    needed = set(outputs)
    decisions: dict[str, Decision] = {}
    for node in reversed(graph.node):
        if not needed & set(node.output):
            continue
        needed |= node_tensors(node)
        for decision in finder.decisions_at(node):
            if len(decisions) < _MOST:
                decisions.setdefault(decision.result, decision)
    order = {name: i for i, node in enumerate(graph.node) for name in node.output}
    return sorted(decisions.values(), key=lambda d: order[d.result])


@dataclass(frozen=True)
class Held:
    """What another graph has of a decision's result, and so can be held to the values of one run.

    Attributes:
        tensors: the result, or what exact operators by constants make of it; empty where there is no such tensor.
        nodes: the decision's node and those operators.
    """

    tensors: tuple[str, ...]
    nodes: tuple[onnx.NodeProto, ...]


def find_held(index: GraphIndex, decision: Decision, tensors: Collection[str]) -> Held:
    """What another graph has of a decision's result.

    Args:
        index: of the graph with the decision.
        decision: the decision.
        tensors: those of the other graph.
    """
    held: dict[str, None] = {}
    nodes = [decision.node]
    pending = [decision.result]
    while pending:
        name = pending.pop()
        if name in tensors:
            held[name] = None
            continue
        readers = index.consumers(name)
        if name in index.outputs or name in index.captured or not readers:
            return Held((), ())
        for node in readers:
            if node.op_type not in _EXACT or len(node.output) > 1:
                return Held((), ())
            if not all(n == name or _is_constant(index, n) for n in node.input if n):
                return Held((), ())
            nodes.append(node)
            pending.extend(node.output)
    return Held(tuple(held), tuple(nodes))


def _is_constant(index: GraphIndex, name: str) -> bool:
    producer = index.producer(name)
    if producer is not None:
        return producer.op_type == "Constant"
    return name in index.initializers and name not in index.inputs


class _Finder:
    def __init__(self, graph: onnx.GraphProto, symbolic: Symbolic) -> None:
        self.index = GraphIndex(graph)
        self.symbolic = symbolic

    def decisions_at(self, node: onnx.NodeProto) -> Iterable[Decision]:
        """The decisions whose results a node turns into whole numbers: itself, or the roundings before it."""
        if node.domain not in STANDARD_DOMAINS or node.op_type not in {"Cast", *_COMPARES, *_CHOOSES}:
            return
        result = next((o for o in node.output if o and self.symbolic.dtype(o) in _WHOLE), "")
        if not result:
            return
        floats = []
        for name in self._floats(node):
            for source in self._sources(name):
                if isinstance(source, Decision):
                    yield source
                else:
                    floats.append(name)
        if floats:
            yield Decision(node, tuple(dict.fromkeys(floats)), result)

    def _floats(self, node: onnx.NodeProto) -> list[str]:
        return [n for n in node.input if n and self._is_computed_float(n)]

    def _is_computed_float(self, name: str) -> bool:
        return self.symbolic.dtype(name) in _FLOATS and self.symbolic.constant(name) is None

    def _sources(self, name: str) -> list[Decision | str]:
        """What a float comes from by exact operators: roundings, and floats that are not whole numbers."""
        sources: dict[str, Decision | str] = {}
        pending, seen = [name], {name}
        while pending:
            tensor = pending.pop()
            node = self.index.producer(tensor)
            if node is None or node.domain not in STANDARD_DOMAINS:
                sources[tensor] = tensor
            elif node.op_type in _ROUNDS:
                sources[tensor] = Decision(node, tuple(self._floats(node)), tensor)
            elif node.op_type in _EXACT and len(node.output) == 1:
                further = [n for n in self._floats(node) if n not in seen]
                seen.update(further)
                pending.extend(further)
            else:
                sources[tensor] = tensor
        return [s for s in sources.values() if isinstance(s, str) or s.before]
