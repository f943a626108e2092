# SPDX-License-Identifier: Apache-2.0
"""The original with attention cores on slices of their query rows: the same nodes, of which fewer scores are alive at once.

Rows of attention do not depend on each other. ONNX Runtime frees the scores of one slice before it computes the next one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.errors import UnsupportedError
from stof.graph.index import is_standard
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate, size_names
from stof.symbolic.algebra.terms import Int

_ELEMENTWISE = frozenset({"Abs", "Add", "Cast", "Clip", "Div", "Dropout", "Exp", "Identity", "IsInf", "IsNaN", "Max"})
_ELEMENTWISE |= {"Min", "Mul", "Neg", "Not", "Or", "Softmax", "Sub", "Tanh", "Where", "And"}
_SCORES = 1 << 23  # elements of the scores of a slice
_MOST_SLICES = 64
_LEAST_OPSET = 13  # Softmax of one axis, Slice with inputs


class _CannotSlice(Exception):
    """The core has nodes of which rows cannot be computed by themselves."""


def slice_attention(
    model: onnx.ModelProto, cores: Collection[Sequence[str]], symbolic: Symbolic
) -> onnx.ModelProto | None:
    """A copy in which large attention cores of a fixed number of queries run slice by slice; None where none can.

    Args:
        model: with the nodes in its main graph.
        cores: for each core, the first outputs of its nodes.
        symbolic: facts of the model.
    """
    if not any(o.domain in ("", "ai.onnx") and o.version >= _LEAST_OPSET for o in model.opset_import):
        return None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    done = [core for core in cores if _Core(result, core, symbolic).replace()]
    return result if done else None


class _Core:
    def __init__(self, model: onnx.ModelProto, core: Sequence[str], symbolic: Symbolic) -> None:
        self.graph = model.graph
        self.symbolic = symbolic
        chosen = set(core)
        self.nodes = {n.output[0]: n for n in model.graph.node if n.output and n.output[0] in chosen}
        self.made: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.slices: dict[tuple[str, int], str] = {}
        self.rows = self.step = 0
        self.output = ""

    def replace(self) -> bool:
        """Replaces the matmul of weights and values, and drops what nothing else reads; whether it could."""
        softmax = next((o for o, n in self.nodes.items() if n.op_type == "Softmax"), None)
        if softmax is None:
            return False
        output = self._weighted_values(softmax)
        shape = self.symbolic.shape(softmax)
        if output is None or shape is None or len(shape) < 2 or shape[-2].constant is None:
            return False
        self.rows = int(shape[-2].constant)
        per_row = math.prod(_at_one(d) for d in (*shape[:-2], shape[-1]))
        count = min(_MOST_SLICES, self.rows, -(-self.rows * per_row // _SCORES))
        if count < 2:
            return False
        self.step, self.output = -(-self.rows // count), output
        try:
            parts = [self._slice(output, i) for i in range(-(-self.rows // self.step))]
        except _CannotSlice:
            return False
        index = next(i for i, n in enumerate(self.graph.node) if n.output and n.output[0] == output)
        joined = helper.make_node("Concat", parts, [output], axis=len(self._shape(output)) - 2)
        nodes = list(self.graph.node)
        kept = [*nodes[:index], *self.made, joined, *nodes[index + 1 :]]
        del self.graph.node[:]
        self.graph.node.extend(self._without_unread(kept))
        self.graph.initializer.extend(self.constants)
        return True

    def _weighted_values(self, softmax: str) -> str | None:
        """The output of the first matmul that reads what follows from the softmax."""
        derived = {softmax}
        for output, node in self.nodes.items():
            if node.op_type == "MatMul" and node.input[0] in derived:
                return str(output)
            if node.op_type in _ELEMENTWISE and derived & set(node.input):
                derived.add(output)
        return None

    def _without_unread(self, nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
        outputs = {o.name for o in self.graph.output}
        while True:
            read = {name for n in nodes for name in n.input} | outputs
            read |= {name for n in nodes for a in n.attribute for g in (a.g, *a.graphs) for name in _reads(g)}
            kept = [n for n in nodes if not (n.output and n.output[0] in self.nodes and not read & set(n.output))]
            if len(kept) == len(nodes):
                return kept
            nodes = kept

    def _shape(self, tensor: str) -> Sequence[int | None]:
        shape = self.symbolic.shape(tensor)
        if shape is None:
            raise _CannotSlice
        return [d.constant for d in shape]

    def _slice(self, tensor: str, i: int) -> str:
        """The rows of slice ``i`` of a tensor [.., S, ..]; the whole of one that has none or one row."""
        shape = self._shape(tensor)
        if len(shape) < 2 or shape[-2] == 1:
            return tensor
        if shape[-2] != self.rows:
            raise _CannotSlice
        if (tensor, i) not in self.slices:
            self.slices[tensor, i] = self._make(tensor, i, len(shape))
        return self.slices[tensor, i]

    def _make(self, tensor: str, i: int, rank: int) -> str:
        node, name = self.nodes.get(tensor), f"{self.output}/{tensor}/stof_rows_{i}"
        if node is None:
            places = [self._constant(x) for x in (self._start(i), self._end(i), rank - 2)]
            self.made.append(helper.make_node("Slice", [tensor, *places], [name]))
            return name
        if not is_standard(node) or len(node.output) != 1:
            raise _CannotSlice
        if node.op_type == "MatMul":
            inputs = [self._slice(node.input[0], i), node.input[1]]
            if len(self._shape(node.input[1])) < 2:
                raise _CannotSlice
        elif node.op_type in _ELEMENTWISE and (node.op_type != "Softmax" or _last_axis(node, rank)):
            inputs = [self._slice(x, i) if x else x for x in node.input]
        else:
            raise _CannotSlice
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        copy.name = f"{self.output}/{node.name}/stof_rows_{i}" if node.name else ""
        copy.input[:], copy.output[:] = inputs, [name]
        self.made.append(copy)
        return name

    def _start(self, i: int) -> int:
        return i * self.step

    def _end(self, i: int) -> int:
        return min((i + 1) * self.step, self.rows)

    def _constant(self, number: int) -> str:
        name = f"stof_rows/{number}"
        if all(t.name != name for t in (*self.graph.initializer, *self.constants)):
            self.constants.append(numpy_helper.from_array(np.array([number], np.int64), name))
        return name


def _at_one(size: Int) -> int:
    """A size where dimensions that have a name are 1, as batches are where memory is short."""
    try:
        return max(1, evaluate(size, dict.fromkeys(size_names(size), 1)))
    except (UnsupportedError, ZeroDivisionError):
        return 1


def _last_axis(node: onnx.NodeProto, rank: int) -> bool:
    return next((a.i for a in node.attribute if a.name == "axis"), -1) in (-1, rank - 1)


def _reads(graph: onnx.GraphProto) -> set[str]:
    names = {name for n in graph.node for name in n.input}
    return names.union(*(_reads(g) for n in graph.node for a in n.attribute for g in (a.g, *a.graphs)))
