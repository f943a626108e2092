# SPDX-License-Identifier: Apache-2.0
"""Tensors that have one known number in all rows of padding, followed along a graph from a key padding mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.graph.index import is_standard
from stof.symbolic import Symbolic

# Results that have elements of their first input alone.
_MOVES = frozenset({"Identity", "Unsqueeze", "Squeeze", "Expand", "Reshape", "Transpose"})
_COMPUTES: dict[str, Callable[..., Any]] = {
    "Abs": np.abs,
    "Add": np.add,
    "And": np.logical_and,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Max": np.maximum,
    "Min": np.minimum,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Relu": lambda x: np.maximum(x, 0),
    "Sign": np.sign,
    "Sub": np.subtract,
    "Xor": np.logical_xor,
}
# A factor that decides a result, whatever the others are.
_DECIDING: dict[str, float] = {"Mul": 0.0, "And": 0.0, "Or": 1.0}
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE})
_INTEGERS = frozenset({TensorProto.INT32, TensorProto.INT64})
_LARGEST = 1 << 24  # integers up to it are exact in fp32


class PaddingValues:
    """The numbers at padding. Conditions are 0 or 1.

    Attributes:
        zero: tensors that are 0 (or false) there.
        true: tensors that are another number (or true).
    """

    def __init__(self, symbolic: Symbolic) -> None:
        self._symbolic = symbolic
        self._numbers: dict[str, float] = {}
        self.zero: set[str] = set()
        self.true: set[str] = set()

    def set(self, name: str, number: float) -> None:
        """States the number of a tensor."""
        self._numbers[name] = number
        (self.true if number else self.zero).add(name)

    def follow(self, node: onnx.NodeProto) -> None:
        """States that of a node's result, where those of its inputs decide it."""
        if is_standard(node) and node.input and (number := self._compute(node)) is not None:
            self.set(node.output[0], number)

    def _number(self, name: str) -> float | None:
        """At padding: of a tensor with a row for each token, or of one that has the same number everywhere."""
        found = self._numbers.get(name)
        return self._symbolic.uniform(name) if found is None else found

    def _compute(self, node: onnx.NodeProto) -> float | None:
        if node.op_type in _MOVES:
            return self._numbers.get(node.input[0])
        if node.op_type in ("Cast", "CastLike"):
            return self._convert(self._numbers.get(node.input[0]), node.output[0])
        if not any(n in self._numbers for n in node.input):
            return None
        numbers = [self._number(n) for n in node.input]
        if node.op_type == "Where":
            return None if numbers[0] is None else numbers[1 if numbers[0] else 2]
        deciding = _DECIDING.get(node.op_type)
        if deciding in numbers and deciding is not None:
            return deciding
        function = _COMPUTES.get(node.op_type)
        known = [x for x in numbers if x is not None]
        if function is None or len(known) < len(numbers) or len(known) > 2:
            return None
        with np.errstate(all="ignore"):
            number = float(function(*known))
        return number if self._is_exact(number, node.output[0]) else None

    def _is_exact(self, number: float, name: str) -> bool:
        """Whether a result is that number in the arithmetic of its type."""
        dtype = self._symbolic.dtype(name)
        return dtype == TensorProto.BOOL or (
            number.is_integer() and abs(number) <= _LARGEST and dtype in _FLOATS | _INTEGERS
        )

    def _convert(self, number: float | None, name: str) -> float | None:
        """A number in the type of a tensor; None where it has no such number."""
        dtype = self._symbolic.dtype(name)
        if number is None or dtype == TensorProto.UNDEFINED:
            return None
        if dtype == TensorProto.BOOL:
            return float(number != 0)
        if number in (0, 1):
            return number
        if not number.is_integer() or dtype not in _FLOATS | _INTEGERS:
            return None
        with np.errstate(all="ignore"):
            kept = float(np.array(number).astype(helper.tensor_dtype_to_np_dtype(dtype)))
        return number if kept == number else None
