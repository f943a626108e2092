# SPDX-License-Identifier: Apache-2.0
"""How much memory a run of a model takes, by the sizes of its tensors at a case."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx

from stof.memory.arena import Arena
from stof.memory.graph_plan import GraphPlanner
from stof.memory.graph_run import GraphRun, Moment
from stof.memory.tensor_sizes import TensorSizes, item_bytes
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


class MemoryEstimate:
    """Estimates runs of a model in ONNX Runtime's CPU provider.

    Args:
        model: the model; graphs in its nodes count, too.
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
        planner = GraphPlanner(model, symbolic, is_optimized=is_optimized, is_widened=is_widened)
        self._graph = planner.plan()

    def tensor_sizes(self, sizes: Mapping[str, int]) -> TensorSizes:
        """Sizes of the model's tensors."""
        return TensorSizes(self._symbolic, sizes, self._nodes, self._weight_names, is_widened=self._is_widened)

    def run(self, sizes: Mapping[str, int]) -> RunEstimate:
        """The tensors that a run with these sizes of dimensions makes.

        Raises:
            UnknownSizeError: of a strict estimate.
        """
        tensors = self.tensor_sizes(sizes)
        run = self._run(tensors)
        peak = max((m.bytes for m in self.moments(tensors)), default=0)
        total = sum(run.bytes(o) for s in self._graph.plan.steps for o in s.node.outputs)
        return RunEstimate(peak, total, sum(run.bytes(o) for o in set(self._graph.outputs)))

    def moments(self, tensors: TensorSizes) -> Iterator[Moment]:
        """What is alive at each node.

        Raises:
            UnknownSizeError: of a strict estimate.
        """
        return self._run(tensors).moments(self._graph)

    def touched(self, tensors: TensorSizes) -> int:
        """Bytes of the arena that a run touches, which its process holds more at the end.

        Raises:
            UnknownSizeError: of a strict estimate.
        """
        arena = Arena()
        self._run(tensors).allocate(self._graph, arena)
        return arena.touched

    def _run(self, tensors: TensorSizes) -> GraphRun:
        return GraphRun(tensors, is_strict=self._is_strict)


def weight_bytes(tensor: onnx.TensorProto, *, is_widened: bool) -> int:
    """Bytes of a stored tensor in a session."""
    count = int(math.prod(tensor.dims))
    if tensor.data_type in _FOUR_BITS:
        return (count + 1) // 2
    return count * item_bytes(tensor.data_type, is_widened=is_widened)
