# SPDX-License-Identifier: Apache-2.0
"""Shapes and bytes of a model's tensors at sizes of its dimensions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import onnx
from onnx import helper

from stof.errors import UnsupportedError
from stof.execution.upcast import HALF
from stof.graph.index import producers
from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate, evaluate_or_none, size_names
from stof.symbolic.algebra.terms import Atom, Int

_BROADCASTING = frozenset({"Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Where"})
_LARGEST = 1 << 56  # bytes; more are nonsense of an expression that does not hold at these sizes


class UnknownSizeError(UnsupportedError):
    """The size of a tensor does not follow from the sizes of the inputs."""


class TensorSizes:
    """Tensors at sizes of the model's dimensions.

    A size that depends on data is the largest one that it can be: of a NonZero one for each element, of a Slice all, of two
    sizes that are broadcast the larger one.

    Args:
        symbolic: shapes of the model's tensors.
        sizes: of its dimensions, by name.
        nodes: those that write the tensors.
        weights: names of stored tensors.
        is_widened: half-precision tensors count as fp32, as ONNX Runtime's CPU provider computes them.
    """

    def __init__(
        self,
        symbolic: Symbolic,
        sizes: Mapping[str, int],
        nodes: Iterable[onnx.NodeProto] = (),
        weights: Collection[str] = frozenset(),
        *,
        is_widened: bool = True,
    ) -> None:
        self._symbolic = symbolic
        self._sizes = dict(sizes)
        self._writer = producers(nodes)
        self._weights = weights
        self._is_widened = is_widened
        self._by_dim: dict[Int, int] = {}
        self._by_name: dict[str, int] = {}

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape.

        Raises:
            UnknownSizeError: where it is not known.
        """
        shape = self._symbolic.shape(name)
        if shape is None:
            raise UnknownSizeError(f"the shape of {name!r} is not known")
        return tuple(self._size(name, dim) for dim in shape)

    def bytes(self, name: str) -> int:
        """Bytes of a tensor.

        Raises:
            UnknownSizeError: where its shape is not known.
        """
        if name not in self._by_name:
            total = math.prod(self.shape(name)) * self.item_bytes(name)
            if total >= _LARGEST:
                raise UnknownSizeError(f"the size of {name!r} is not known: {self.text(name)} is too large")
            self._by_name[name] = total
        return self._by_name[name]

    def dtype(self, name: str) -> int:
        """The ONNX element type."""
        return self._symbolic.dtype(name)

    def is_constant(self, name: str) -> bool:
        """Whether a tensor is the same in every run, whether its value is known or not."""
        return name in self._weights or self._symbolic.is_constant(name)

    def constant(self, name: str) -> np.ndarray | None:
        """The value of a constant; None where it is none, or not known."""
        return self._symbolic.constant(name)

    def integers(self, name: str) -> np.ndarray | None:
        """The value of a small integer tensor that follows from the sizes; None where it is another one, or not known."""
        value = self._symbolic.value(name)
        elements = value.elements() if value is not None and value.kind == "i" else None
        numbers = [evaluate_or_none(e, self._sizes) for e in elements or () if isinstance(e, Int)]
        if elements is None or None in numbers or len(numbers) != len(elements):
            return None
        return np.array(numbers, helper.tensor_dtype_to_np_dtype(self.dtype(name))).reshape(self.shape(name))

    def item_bytes(self, name: str) -> int:
        """Bytes of one element."""
        return item_bytes(self._symbolic.dtype(name), is_widened=self._is_widened)

    def text(self, name: str) -> str:
        """A tensor's shape for people, by the names of dimensions: ``[batch, 12, sequence, sequence]``."""
        return f"[{', '.join(map(show_size, self._symbolic.shape(name) or ()))}]"

    def _size(self, name: str, dim: Int) -> int:
        if dim not in self._by_dim:
            self._add_bounds(dim)
            try:
                self._by_dim[dim] = max(0, evaluate(dim, self._sizes))
            except (UnsupportedError, ZeroDivisionError) as error:
                raise UnknownSizeError(f"the size of {name!r} is not known: {error}") from None
        return self._by_dim[dim]

    def _add_bounds(self, dim: Int) -> None:
        """Adds the largest sizes of axes that depend on data, which are called ``tensor#axis``."""
        for size in size_names(dim) - self._sizes.keys():
            tensor, _, axis = size.rpartition("#")
            node = self._writer.get(tensor)
            if node is None or not node.input or not node.input[0]:
                continue
            self._sizes[size] = 0  # of a size that depends on itself
            bound = None
            try:
                bound = self._bound(node, int(axis))
            finally:
                if bound is None:
                    del self._sizes[size]
                else:
                    self._sizes[size] = bound

    def _bound(self, node: onnx.NodeProto, axis: int) -> int | None:
        """The largest size of an axis of a node's result; None where it is not known."""
        if node.op_type in _BROADCASTING:
            rank = len(self._symbolic.shape(node.output[0]) or ())
            shapes = [self.shape(name) for name in node.input if name]
            return max((s[axis - rank] for s in shapes if len(s) >= rank - axis), default=None)
        shape = self.shape(node.input[0])
        if node.op_type == "NonZero":
            return math.prod(shape)
        if node.op_type == "Slice" and axis < len(shape):
            return shape[axis]
        rank = len(self._symbolic.shape(node.output[0]) or ())
        if node.op_type == "Expand" and len(shape) >= rank - axis and shape[axis - rank] > 1:
            return shape[axis - rank]
        return None


def show_size(size: Int) -> str:
    """A symbolic size for people."""
    if size.constant is not None:
        return str(size.constant)
    words = []
    for monomial, coefficient in sorted(size.terms, key=lambda t: t[1] < 0):
        factors = [str(abs(coefficient))] if abs(coefficient) != 1 or not monomial else []
        factors += map(_show_atom, monomial)
        words += [" - " if coefficient < 0 else " + ", "·".join(factors)]
    return "".join(words[1:] if words[0] == " + " else ["-", *words[1:]])


def _show_atom(atom: Atom) -> str:
    args = [show_size(a) if isinstance(a, Int) else str(a) for a in atom.args]
    match atom.kind:
        case "size":
            return args[0]
        case "div" | "quotient" | "mod":
            sign = "%" if atom.kind == "mod" else "//"
            return f"(({args[0]}) {sign} {args[1]})" if " " in args[0] else f"({args[0]} {sign} {args[1]})"
        case "min" | "max":
            return f"{atom.kind}({', '.join(args)})"
    return f"{atom.kind}(...)"


def item_bytes(dtype: int, *, is_widened: bool = True) -> int:
    """Bytes of one element of an ONNX type; 8 where it is not known."""
    if dtype in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING):
        return 8
    if dtype in HALF:
        return 4 if is_widened else 2
    return max(1, int(helper.tensor_dtype_to_np_dtype(dtype).itemsize))
