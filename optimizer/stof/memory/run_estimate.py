# SPDX-License-Identifier: Apache-2.0
"""How much memory a run of a model takes, by the sizes of its tensors at a case."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx

from stof.memory.arena import Arena, ArenaChunk
from stof.memory.declared_shapes import infer_declared_shapes
from stof.memory.session_graph import read_session_graph
from stof.memory.session_node import SessionNode
from stof.memory.session_plan import plan_session
from stof.memory.tensor_sizes import TensorSizes, UnknownSizeError, item_bytes
from stof.memory.working_memory import WorkingMemory, working_memory
from stof.symbolic import Symbolic

_FOUR_BITS = frozenset({onnx.TensorProto.INT4, onnx.TensorProto.UINT4, onnx.TensorProto.FLOAT4E2M1})


@dataclass(frozen=True)
class RunEstimate:
    """Bytes of the tensors of one run.

    Attributes:
        peak: at most alive at once, weights left out.
        total: of all that are computed, which is about in proportion to the time that a run takes.
        outputs: of the model's outputs.
    """

    peak: int
    total: int
    outputs: int


@dataclass(frozen=True)
class Moment:
    """What is alive while a node runs.

    Attributes:
        node: the node.
        buffers: bytes by the tensor that lies there.
        working: bytes that its kernel takes besides.
    """

    node: SessionNode
    buffers: Mapping[str, int]
    working: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(self.buffers.values()) + self.working


class MemoryEstimate:
    """Estimates runs of a model in ONNX Runtime's CPU provider.

    Args:
        model: whose main graph is looked at.
        symbolic: shapes of its tensors.
        is_optimized: whether the session optimizes graphs.
        is_strict: a tensor without a known size is an error; else it counts as nothing.
        is_widened: half-precision tensors are computed as fp32.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        symbolic: Symbolic,
        *,
        is_optimized: bool = False,
        is_strict: bool = False,
        is_widened: bool = True,
    ) -> None:
        self._symbolic, self._is_strict, self._is_widened = symbolic, is_strict, is_widened
        self._nodes = list(model.graph.node)
        self.weights = sum(weight_bytes(t, is_widened=is_widened) for t in model.graph.initializer)
        self._weight_names = {t.name for t in model.graph.initializer} - {i.name for i in model.graph.input}
        declared = infer_declared_shapes(model)
        graph = read_session_graph(model, symbolic, declared, is_optimized=is_optimized)
        items = {o: item_bytes(symbolic.dtype(o), is_widened=is_widened) for n in graph.nodes for o in n.outputs}
        self._plan = plan_session(graph, declared, items)
        self._outputs = graph.outputs

    def tensor_sizes(self, sizes: Mapping[str, int]) -> TensorSizes:
        """Sizes of the model's tensors."""
        return TensorSizes(self._symbolic, sizes, self._nodes, self._weight_names, is_widened=self._is_widened)

    def run(self, sizes: Mapping[str, int]) -> RunEstimate:
        """The tensors that a run with these sizes of dimensions makes.

        Raises:
            UnknownSizeError: of a strict estimate.
        """
        tensors = self.tensor_sizes(sizes)
        peak = max((m.bytes for m in self.moments(tensors)), default=0)
        total = sum(self._bytes(o, tensors) for s in self._plan.steps for o in s.node.outputs)
        return RunEstimate(peak, total, sum(self._bytes(o, tensors) for o in self._outputs))

    def moments(self, tensors: TensorSizes) -> Iterator[Moment]:
        """What is alive at each node.

        Raises:
            UnknownSizeError: of a strict estimate.
        """
        held: dict[str, int] = {}
        content: dict[str, str] = {}  # which tensor lies in a buffer
        for step in self._plan.steps:
            held |= {buffer: self._bytes(buffer, tensors) for buffer in step.made}
            content |= {self._plan.buffer_of[o]: o for o in step.node.outputs}
            working = self._working(step.node, tensors)
            yield Moment(step.node, {content[b]: size for b, size in held.items()}, working.bytes)
            for buffer in step.ended:
                held.pop(buffer, None)

    def touched(self, tensors: TensorSizes) -> int:
        """Bytes of the arena that a run touches, which its process holds more at the end.

        Raises:
            UnknownSizeError: of a strict estimate.
        """
        arena, chunks = Arena(), dict[str, ArenaChunk | None]()
        for step in self._plan.steps:
            working = self._working(step.node, tensors)
            taken = [arena.allocate(size) for size in working.before]
            chunks |= {buffer: arena.allocate(self._bytes(buffer, tensors)) for buffer in step.made}
            taken += [arena.allocate(size) for size in working.after]
            for chunk in taken:
                arena.free(chunk)
            for buffer in step.ended:
                arena.free(chunks.pop(buffer, None))
        return arena.touched

    def _bytes(self, name: str, tensors: TensorSizes) -> int:
        try:
            return tensors.bytes(name)
        except UnknownSizeError:
            if self._is_strict:
                raise
            return 0

    def _working(self, node: SessionNode, tensors: TensorSizes) -> WorkingMemory:
        try:
            return working_memory(node, tensors)
        except UnknownSizeError:
            if self._is_strict:
                raise
            return WorkingMemory()


def weight_bytes(tensor: onnx.TensorProto, *, is_widened: bool) -> int:
    """Bytes of a stored tensor in a session."""
    count = int(math.prod(tensor.dims))
    if tensor.data_type in _FOUR_BITS:
        return (count + 1) // 2
    return count * item_bytes(tensor.data_type, is_widened=is_widened)
