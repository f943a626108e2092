# SPDX-License-Identifier: Apache-2.0
"""The path from the first matmul of an MLP to its activated neurons."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, is_standard
from stof.sparse_mlp.matmuls import MatmulReader, Projection
from stof.symbolic import Symbolic

_MOST = 64  # nodes of a path
# What these give for a neuron depends on that neuron alone, and on operands that all neurons share.
_ELEMENTWISE = frozenset(
    {
        "Abs",
        "Add",
        "Cast",
        "Clip",
        "Div",
        "Erf",
        "Exp",
        "FastGelu",
        "Gelu",
        "Identity",
        "LeakyRelu",
        "Max",
        "Min",
        "Mul",
    }
    | {"Neg", "Pow", "QuickGelu", "Relu", "Sigmoid", "Softplus", "Sqrt", "Sub", "Swish", "Tanh"}
)
_REDUCTIONS = frozenset({"ReduceMax", "ReduceMean", "ReduceMin", "ReduceSum", "ReduceL2", "ReduceSumSquare"})
_CONTRIB = frozenset({"FastGelu", "Gelu", "QuickGelu"})


@dataclass(frozen=True)
class GatePath:
    """How the activated neurons follow from one matmul.

    Attributes:
        projection: the matmul.
        is_movable: whether the neurons may get another order without a change but that of sums.
    """

    projection: Projection
    is_movable: bool


class GatePaths:
    """Reads the paths of a graph.

    Args:
        index: of the graph.
        symbolic: facts of its model.
        matmuls: its matmuls.
    """

    def __init__(self, index: GraphIndex, symbolic: Symbolic, matmuls: MatmulReader) -> None:
        self._index, self._symbolic, self._matmuls = index, symbolic, matmuls

    def read(self, activated: str, neurons: int) -> GatePath | None:
        """The path to a tensor of activated neurons; None where it begins at no matmul, or at several."""
        visited, pending = {activated}, [activated]
        nodes: list[onnx.NodeProto] = []
        sources: dict[str, Projection] = {}
        is_movable = True
        while pending:
            tensor = pending.pop()
            if tensor != activated and self._is_wide(tensor, neurons) and self._matmuls.behind(tensor) is not None:
                try:
                    sources[tensor] = self._matmuls.read_projection(tensor)
                except UnsupportedError:
                    return None
                if sources[tensor].weight.outer != neurons:
                    return None
                continue
            node = self._index.producer(tensor)
            if node is None or len(nodes) >= _MOST:
                if tensor in self._index.initializers and self._is_shared(tensor):
                    continue
                return None
            nodes.append(node)
            before = self._inputs(node)
            is_movable &= before is not None
            for name in node.input if before is None else before:
                if name and name not in visited:
                    visited.add(name)
                    pending.append(name)
        if len(sources) != 1:
            return None
        (projection,) = sources.values()
        return GatePath(projection, is_movable and self._has_no_other_readers(visited - {activated}, nodes, neurons))

    def _inputs(self, node: onnx.NodeProto) -> list[str] | None:
        """The inputs that a node's result depends on neuron by neuron, or through all neurons; None: otherwise."""
        if node.op_type in _ELEMENTWISE and (is_standard(node) or node.op_type in _CONTRIB):
            return [t for t in node.input if t and not self._is_shared(t)]
        if node.op_type == "Reshape" and is_standard(node):
            shape, output_shape = self._symbolic.shape(node.input[0]), self._symbolic.shape(node.output[0])
            # Neurons stay the last axis.
            if shape and output_shape and output_shape[-1].constant == shape[-1].constant is not None:
                return [node.input[0]]
            return None
        if node.op_type in _REDUCTIONS and is_standard(node):
            shape, output_shape = self._symbolic.shape(node.input[0]), self._symbolic.shape(node.output[0])
            # Only the last axis is reduced, and stays.
            if (
                shape
                and output_shape
                and len(output_shape) == len(shape)
                and output_shape[-1].constant == 1
                and output_shape[:-1] == shape[:-1]
            ):
                return [node.input[0]]
        return None

    def _is_shared(self, tensor: str) -> bool:
        """Whether a tensor is a constant that all neurons share."""
        if not self._symbolic.is_constant(tensor):
            return False
        shape = self._symbolic.shape(tensor)
        return shape is not None and (not shape or shape[-1].constant == 1)

    def _is_wide(self, tensor: str, neurons: int) -> bool:
        shape = self._symbolic.shape(tensor)
        return bool(shape) and shape is not None and shape[-1].constant == neurons

    def _has_no_other_readers(self, tensors: set[str], nodes: list[onnx.NodeProto], neurons: int) -> bool:
        outputs = {o for n in nodes for o in n.output}
        for tensor in tensors:
            if not self._is_wide(tensor, neurons):
                continue
            readers = self._index.consumers(tensor)
            if self._matmuls.is_visible(tensor) or any(not outputs.intersection(r.output) for r in readers):
                return False
        return True
