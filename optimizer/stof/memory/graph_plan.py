# SPDX-License-Identifier: Apache-2.0
"""What a session runs and where results lie, of a graph and of the graphs in its If, Loop and Scan nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx

from stof.graph.index import is_standard, subgraphs
from stof.memory.declared_shapes import DeclaredShape, infer_declared_shapes
from stof.memory.session_graph import SessionGraph, read_session_graph
from stof.memory.session_plan import SessionPlan, plan_session
from stof.memory.tensor_sizes import item_bytes
from stof.symbolic import Symbolic

# Operators that run graphs, of which it is known how.
BODY_OPS = frozenset({"If", "Loop", "Scan"})


@dataclass(frozen=True, eq=False)
class GraphPlan:
    """A graph's plan.

    Attributes:
        plan: its nodes and their buffers.
        inputs: its inputs, in order.
        outputs: its outputs, in order.
        bodies: by the index of a step, the plans of its node's graphs.
    """

    plan: SessionPlan
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    bodies: Mapping[int, tuple[GraphPlan, ...]]


class GraphPlanner:
    """Plans the graphs of a model.

    Args:
        model: whose functions are those of fused operators, which the session has kernels for.
        symbolic: facts of its tensors.
        is_optimized: whether the session optimizes graphs.
        is_widened: half-precision tensors are computed as fp32.
    """

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic, *, is_optimized: bool, is_widened: bool) -> None:
        self._graph = model.graph
        self._symbolic = symbolic
        self._is_optimized, self._is_widened = is_optimized, is_widened
        self._declared: Mapping[str, DeclaredShape] = infer_declared_shapes(model)

    def plan(self) -> GraphPlan:
        """The plan of the main graph."""
        return self._plan(self._graph, frozenset())

    def _plan(self, graph: onnx.GraphProto, outer_constants: Collection[str]) -> GraphPlan:
        session = read_session_graph(
            graph, self._symbolic, self._declared, outer_constants, is_optimized=self._is_optimized
        )
        items = {
            o: item_bytes(self._symbolic.dtype(o), is_widened=self._is_widened)
            for n in session.nodes
            for o in n.outputs
        }
        plan = plan_session(session, self._declared, items)
        inputs, outputs = tuple(i.name for i in graph.input), tuple(o.name for o in graph.output)
        return GraphPlan(plan, inputs, outputs, self._plan_bodies(session, plan))

    def _plan_bodies(self, session: SessionGraph, plan: SessionPlan) -> Mapping[int, tuple[GraphPlan, ...]]:
        return {
            index: tuple(self._plan(body, session.constants) for body in subgraphs(step.node.proto))
            for index, step in enumerate(plan.steps)
            if step.node.op in BODY_OPS and is_standard(step.node.proto)
        }
