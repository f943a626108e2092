# SPDX-License-Identifier: Apache-2.0
"""Evaluates descriptions of fused chains in fp64 NumPy: the reference of every kernel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from onnx import TensorProto, helper

from stof.errors import ModelError
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.erf import erf
from stof.fusion.description.format import REDUCTIONS
from stof.fusion.description.nodes import AffineIndex, ExpressionNode
from stof.fusion.work_bound import check_run

Array = np.ndarray
_TYPES: dict[str, np.dtype] = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)),
}


def _sigmoid(x: Array) -> Array:
    decayed = np.exp(-np.abs(x))
    return np.asarray(np.where(x >= 0, 1 / (1 + decayed), decayed / (1 + decayed)))


def _gelu_tanh(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


_UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "reciprocal": lambda x: 1 / x,
    "tanh": np.tanh,
    "erf": erf,
    "sigmoid": _sigmoid,
    "softplus": lambda x: np.logaddexp(0.0, x),
    "sin": np.sin,
    "cos": np.cos,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.rint,
    "relu": lambda x: np.where(np.isnan(x), x, np.maximum(x, 0)),
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    "gelu_tanh": _gelu_tanh,
    **{name: lambda x, t=dtype: x.astype(t).astype(np.float64) for name, dtype in _TYPES.items()},  # type: ignore[misc]
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": np.divide,
    "min": np.minimum,
    "max": np.maximum,
    "pow": np.power,
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "==": np.equal,
    "!=": np.not_equal,
}
_REDUCE: dict[str, Callable[..., Array]] = {"sum": np.sum, "mean": np.mean, "max_of": np.max, "min_of": np.min}


def evaluate_chain(description: ChainDescription, inputs: Sequence[Array], *, rounded: bool = False) -> list[Array]:
    """A chain's outputs in fp64, or ``rounded`` to their own types.

    Raises:
        ModelError: when the chain reads outside of an input, or exceeds the library's work bound.
    """
    outputs = []
    evaluation = _Evaluation(description, inputs)
    with np.errstate(all="ignore"):
        for name, expression in description.lets:
            evaluation.lets[name] = evaluation.value(expression, np.ones((), bool))
        for out in description.outs:
            array = evaluation.to_output(out.dims, evaluation.value(out.expression, np.ones((), bool)))
            outputs.append(array.astype(_TYPES[out.dtype]) if rounded else array)
    return outputs


class _Evaluation:
    """Sizes of the axes and values of names for one run; arrays have one dimension an axis."""

    def __init__(self, description: ChainDescription, inputs: Sequence[Array]) -> None:
        self.inputs = [np.asarray(x) for x in inputs]
        self.lets: dict[str, Array] = {}
        self.sizes: dict[str, int] = {}
        for name, size in description.axes:
            if size.input < 0:
                self.sizes[name] = size.number
                continue
            shape = self._input(size.input).shape
            if size.dim >= len(shape) or shape[size.dim] % size.number:
                raise ModelError(f"axis {name} is dimension {size.dim} / {size.number} of an input of shape {shape}")
            self.sizes[name] = shape[size.dim] // size.number
        check_run(description, self.sizes, [x.shape for x in self.inputs])
        rank = len(self.sizes)
        self.coordinates = {
            name: np.arange(n).reshape([-1 if i == a else 1 for i in range(rank)])
            for a, (name, n) in enumerate(self.sizes.items())
        }

    def _input(self, number: int) -> Array:
        if number >= len(self.inputs):
            raise ModelError(f"a chain reads x{number}, but is given {len(self.inputs)} inputs")
        return self.inputs[number]

    def value(self, node: ExpressionNode, active: Array) -> Array:
        """A value at every position of the axes; reads must be in range where ``active`` is true."""
        if node.op == "number":
            return np.full((1,) * len(self.sizes), float(node.value))
        if node.op == "axis":
            return self.coordinates[str(node.value)].astype(np.float64)
        if node.op == "let":
            return self.lets[str(node.value)]
        if node.op == "read":
            return self._read(node, active)
        if node.op == "select":
            condition = self.value(node.arguments[0], active) != 0
            yes = self.value(node.arguments[1], active & condition)
            return np.where(condition, yes, self.value(node.arguments[2], active & ~condition))
        if node.op in REDUCTIONS:
            whole = self.value(node.arguments[0], np.ones((), bool))
            whole = np.broadcast_to(whole, (*whole.shape[:-1], list(self.sizes.values())[-1]))
            return _REDUCE[node.op](whole, axis=-1, keepdims=True)
        operands = [self.value(a, active) for a in node.arguments]
        if len(operands) == 1:
            return _UNARY[node.op](operands[0])
        return np.asarray(_BINARY[node.op](operands[0], operands[1]), np.float64)

    def _read(self, node: ExpressionNode, active: Array) -> Array:
        array = self._input(int(float(node.value)))
        if array.ndim != len(node.indices):
            raise ModelError(f"x{node.value:.0f} is read with {len(node.indices)} indices, but has shape {array.shape}")
        coordinates = []
        for index, size in zip(node.indices, array.shape, strict=True):
            coordinate = self._coordinate(index)
            outside = (coordinate < 0) | (coordinate >= size)
            if np.any(outside & active):
                raise ModelError(f"x{node.value:.0f} of shape {array.shape} is read outside of it")
            coordinates.append(np.where(outside, 0, coordinate))
        return np.asarray(array.astype(np.float64)[tuple(coordinates)])

    def _coordinate(self, index: AffineIndex) -> Array:
        total: Array = np.full((1,) * len(self.sizes), index.constant)
        for name, factor in index.terms:
            total = total + factor * self.coordinates[name]
        return np.asarray(total // index.by if index.op == "//" else total % index.by if index.op == "%" else total)

    def to_output(self, dims: Sequence[Sequence[str]], value: Array) -> Array:
        """A value over the axes as an array with an output's dimensions."""
        used = [a for d in dims for a in d]
        names = list(self.sizes)
        if names[-1] not in used and value.shape[-1] > 1:
            value = value[..., :1]  # the same along the row
        shape = [n if a in used else 1 for a, n in self.sizes.items()]
        whole = np.broadcast_to(value, shape)
        order = [names.index(a) for a in used] + [names.index(a) for a in names if a not in used]
        return np.asarray(whole.transpose(order).reshape([math.prod(self.sizes[a] for a in d) for d in dims]))
