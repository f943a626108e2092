# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a session lie in one buffer, and when each buffer is taken and given back.

A session decides that once, before sizes are known. A result takes the place of an input that is read for the last time,
where the kernel allows that and both have the same declared shape. Else it takes a buffer of the same declared shape
that is free by then; such a buffer stays allocated in between. Else it gets one of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from stof.graph.index import is_standard
from stof.memory.declared_shapes import DeclaredShape
from stof.memory.session_graph import SessionGraph
from stof.memory.session_node import SessionNode

# Operators whose result is their first input under another shape.
_ALIASES = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze"})
# Operators that may write to the place of their first input; tests/memory measures each.
_IN_PLACE = frozenset(
    {"Cast", "Clip", "Elu", "HardSigmoid", "LeakyRelu", "LogSoftmax", "Relu", "ScatterElements", "Selu", "Sigmoid"}
)
_IN_PLACE |= {"Softmax", "Softplus", "Softsign", "Tanh", "ThresholdedRelu", "Trilu"}


@dataclass(frozen=True, eq=False)
class PlanStep:
    """One node, and its buffers.

    Attributes:
        node: the node.
        made: buffers that are allocated for it, each named by its first tensor.
        ended: buffers that are given back behind it.
    """

    node: SessionNode
    made: tuple[str, ...]
    ended: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class SessionPlan:
    """A run's allocations.

    Attributes:
        steps: one for each node, in order.
        buffer_of: where each tensor lies.
    """

    steps: tuple[PlanStep, ...]
    buffer_of: Mapping[str, str]


def plan_session(
    graph: SessionGraph, declared: Mapping[str, DeclaredShape], item_bytes: Mapping[str, int]
) -> SessionPlan:
    """Plans buffers as a session does.

    Args:
        graph: what it runs.
        declared: shapes that follow from the model's declarations and ONNX's shape inference, without computed sizes.
        item_bytes: of an element of each tensor.
    """
    return _Planner(graph, declared, item_bytes).plan()


class _Planner:
    def __init__(
        self, graph: SessionGraph, declared: Mapping[str, DeclaredShape], item_bytes: Mapping[str, int]
    ) -> None:
        self._graph = graph
        self._declared = declared
        self._item_bytes = item_bytes
        self._uses: Counter[str] = Counter(graph.given)  # those that are given are never reused
        for node in graph.nodes:
            self._uses.update(n for n in (*node.inputs, *node.captured) if n)
            self._uses.update(node.outputs)
        self._uses.update(graph.outputs)
        self._buffer = {name: name for name in self._uses}
        # Buffers that nobody reads any more by their size, the last one at the end.
        self._free: defaultdict[tuple[DeclaredShape, int], list[str]] = defaultdict(list)

    def plan(self) -> SessionPlan:
        made: list[tuple[str, ...]] = []
        last: dict[str, int] = {}
        for index, node in enumerate(self._graph.nodes):
            made.append(tuple(name for name in node.outputs if self._place(node, name)))
            for name in (*node.inputs, *node.captured, *node.outputs):
                if name:
                    self._release(name)
                    last[self._buffer[name]] = index
        kept = self._graph.given | {self._buffer[o] for o in self._graph.outputs if o in self._buffer}
        ends: list[list[str]] = [[] for _ in made]
        for buffer, index in last.items():
            if buffer not in kept:
                ends[index].append(buffer)
        steps = zip(self._graph.nodes, made, ends, strict=True)
        return SessionPlan(tuple(PlanStep(node, new, tuple(ended)) for node, new, ended in steps), self._buffer)

    def _place(self, node: SessionNode, name: str) -> bool:
        """Chooses the buffer of a result; says whether it is a new one."""
        if name in self._graph.outputs:
            return True
        reused = self._find_input(node, name) or self._take_free(name)
        if not reused:
            return True
        buffer = self._buffer[reused]
        self._buffer[name] = buffer
        self._uses[buffer] += self._uses[name]
        return False

    def _find_input(self, node: SessionNode, name: str) -> str:
        """The input that a result takes the place of; empty where it takes none."""
        if not is_standard(node.proto) or name != node.outputs[0] or not node.inputs or not node.inputs[0]:
            return ""
        first = node.inputs[0]
        if node.op in _ALIASES:
            return first
        is_last = node.op in _IN_PLACE and self._uses[self._buffer[first]] == 1
        return first if is_last and self._is_same_size(first, name) else ""

    def _take_free(self, name: str) -> str:
        """The buffer that became free last among those of a result's size; empty where there is none."""
        size = self._size(name)
        free = self._free[size] if size is not None and size[0] else []  # scalars have buffers of their own
        return free.pop() if free else ""

    def _is_same_size(self, one: str, other: str) -> bool:
        size = self._size(one)
        return size is not None and size == self._size(other)

    def _size(self, name: str) -> tuple[DeclaredShape, int] | None:
        """The declared shape of a tensor and the bytes of an element; None where a size is not declared."""
        shape = self._declared.get(name)
        return None if shape is None or None in shape else (shape, self._item_bytes.get(name, 0))

    def _release(self, name: str) -> None:
        buffer = self._buffer[name]
        self._uses[buffer] -= 1
        if not self._uses[buffer] and (size := self._size(buffer)) is not None:
            self._free[size].append(buffer)
