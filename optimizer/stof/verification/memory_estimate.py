# SPDX-License-Identifier: Apache-2.0
"""How much memory a run of a model takes, by the sizes of its tensors at a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from stof.errors import UnsupportedError
from stof.execution.upcast import HALF
from stof.graph.index import all_nodes
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate
from stof.symbolic.algebra.terms import Int

# Operators whose output may lie where an input of the same size lay that is read for the last time.
_IN_PLACE = frozenset(
    {"Add", "Cast", "Clip", "Div", "Dropout", "Erf", "Exp", "Mul", "Neg", "Relu", "Sigmoid", "Softmax"}
)
_IN_PLACE |= {"Flatten", "Identity", "Reshape", "Sqrt", "Squeeze", "Sub", "Tanh", "Unsqueeze"}
_SELECTIONS = 2  # ONNX Runtime's Where makes two tensors of the output's size besides
_LARGEST = 1 << 56  # sizes beyond it are nonsense of an expression that does not hold at this case


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
    """Estimates runs of a model without graph optimizations.

    Args:
        model: whose main graph is looked at.
        symbolic: shapes of its tensors; one without a known size counts as nothing.
    """

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic) -> None:
        nodes = list(model.graph.node)
        self.weights = sum(_weight_bytes(t) for t in model.graph.initializer)
        outputs = {o.name for o in model.graph.output}
        last: dict[str, int] = {}
        reads: list[set[str]] = []
        for i, node in enumerate(nodes):
            reads.append({name for part in all_nodes([node]) for name in part.input if name})
            last |= dict.fromkeys(reads[-1], i)
        self._steps = [(n.op_type, [o for o in n.output if o], r) for n, r in zip(nodes, reads, strict=True)]
        self._ends: list[list[str]] = [[] for _ in nodes]
        for name, i in last.items():
            if name not in outputs:
                self._ends[i].append(name)
        self._outputs = outputs
        computed = (o for _, names, _ in self._steps for o in names)
        self._dims = {name: _dims(symbolic, name) for name in (*computed, *outputs)}
        self._itemsize = {name: _itemsize(symbolic.dtype(name)) for name in self._dims}

    def run(self, sizes: Mapping[str, int]) -> RunEstimate:
        """The tensors that a run with these sizes of dimensions makes."""
        size_of_dim: dict[Int, int] = {}
        alive: dict[str, int] = {}
        held = peak = total = 0
        for (op, outputs, _), ends in zip(self._steps, self._ends, strict=True):
            made = {name: self._bytes(name, sizes, size_of_dim) for name in outputs}
            size = sum(made.values())
            total += size
            reused = max((alive.get(n, 0) for n in ends if alive.get(n) == size), default=0) if op in _IN_PLACE else 0
            peak = max(peak, held + size * (1 + _SELECTIONS * (op == "Where")) - reused)
            alive |= made
            held += size - sum(alive.pop(n, 0) for n in ends)
        return RunEstimate(peak, total, sum(self._bytes(n, sizes, size_of_dim) for n in self._outputs))

    def _bytes(self, name: str, sizes: Mapping[str, int], size_of_dim: dict[Int, int]) -> int:
        total = self._itemsize[name]
        for dim in self._dims[name]:
            if dim not in size_of_dim:
                try:
                    size_of_dim[dim] = max(0, evaluate(dim, sizes))
                except (UnsupportedError, ZeroDivisionError):
                    size_of_dim[dim] = 0
            total *= size_of_dim[dim]
        return total if total < _LARGEST else 0


def _dims(symbolic: Symbolic, name: str) -> Sequence[Int]:
    shape = symbolic.shape(name)
    return () if shape is None else tuple(shape)


def _itemsize(dtype: int) -> int:
    if dtype in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return 8
    if dtype in HALF:  # such models run widened
        return 4
    return max(1, int(helper.tensor_dtype_to_np_dtype(dtype).itemsize))


def _weight_bytes(tensor: onnx.TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count * _itemsize(tensor.data_type)
