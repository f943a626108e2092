# SPDX-License-Identifier: Apache-2.0
"""Bounds on the absolute values of a graph's tensors, computed from its constants: a bounded tensor is finite.

A finite bias leaves no row fully masked. Bounds show whether a sum, a product or a cast on the way may overflow in its type.
Graph inputs have no bound, nor have initializers that a caller may override.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from stof.graph.external_data import ITEM_SIZES, location_of
from stof.graph.index import GraphIndex, is_standard
from stof.mask.strength import LOWEST
from stof.symbolic import Symbolic
from stof.symbolic.algebra.overflow import value_range
from stof.symbolic.facts import dtype_kind

_CHUNK = 1 << 20  # elements of a constant that are looked at together
# Half a unit in the last place of bfloat16, the coarsest type, and the least number of fp16, below which units are all alike.
_RELATIVE, _ABSOLUTE = 2.0**-8, 2.0**-24

Bound = Callable[[list[float]], float]

# Operators whose results are elements of their first input, or zeros.
_MOVING = frozenset(
    {
        "DepthToSpace",
        "Expand",
        "Flatten",
        "Gather",
        "GatherElements",
        "GatherND",
        "Identity",
        "Reshape",
        "Slice",
        "SpaceToDepth",
        "Split",
        "Squeeze",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
    }
)
_COMPUTING: dict[str, Bound] = {
    "Abs": max,
    "Add": sum,
    "Max": max,
    "Min": max,
    "Mul": math.prod,
    "Neg": max,
    "Sub": sum,
    "Sum": sum,
}


class ValueBounds:
    """Bounds of the tensors of one graph.

    Args:
        index: of the graph.
        symbolic: types of its tensors, and integers as functions of sizes.
        folder: where external data lies; None: such constants have no bound.
    """

    def __init__(self, index: GraphIndex, symbolic: Symbolic, folder: Path | None = None) -> None:
        self.index = index
        self.symbolic = symbolic
        self.folder = folder
        overridable = {i.name for i in index.graph.input}
        self.constants = {t.name: t for t in index.graph.initializer if t.name not in overridable}
        self.bounds: dict[str, float] = {}

    def of(self, tensor: str) -> float:
        """A number that no element of a tensor exceeds in absolute value, none being NaN; inf where there is no proof."""
        if tensor not in self.bounds:
            self.bounds[tensor] = self._bound(tensor)
        return self.bounds[tensor]

    def _bound(self, tensor: str) -> float:
        dtype = self.symbolic.dtype(tensor)
        kind = dtype_kind(dtype)
        if kind == "b":
            return 1.0
        if kind is None or (kind == "f" and dtype not in LOWEST):
            return math.inf
        node = self.index.producer(tensor)
        if node is None:
            largest = self._constant(tensor)
        elif not is_standard(node):
            largest = math.inf
        else:
            largest = self._bound_computed(node, kind, -LOWEST[dtype] if kind == "f" else -math.inf)
        return min(largest, self._integer_bound(tensor, dtype)) if kind == "i" else largest

    def _constant(self, name: str) -> float:
        tensor = self.constants.get(name)
        return math.inf if tensor is None else self._bound_stored(tensor)

    def _bound_stored(self, tensor: onnx.TensorProto) -> float:
        if tensor.data_location != TensorProto.EXTERNAL:
            return _largest(numpy_helper.to_array(tensor))
        return math.inf if self.folder is None else _largest_of_external(tensor, self.folder)

    def _integer_bound(self, tensor: str, dtype: int) -> float:
        """A bound of an integer tensor: by its type, or by its value as a function of sizes. Integers are never infinite."""
        info = np.iinfo(helper.tensor_dtype_to_np_dtype(dtype))
        value = self.symbolic.value(tensor)
        # Values are whole numbers without a type. Unsigned ones leave theirs at 0, wherever something is taken away.
        low, high = (-math.inf, math.inf) if value is None or info.min == 0 else value_range(value)
        if info.min <= low and high <= info.max:
            return max(-low, high)
        return max(float(info.max), -float(info.min))

    def _bound_computed(self, node: onnx.NodeProto, kind: str, lowest: float) -> float:
        operator, inputs = node.op_type, list(node.input)
        if operator in _MOVING:
            return self.of(inputs[0])
        match operator:
            case "Concat":
                return max(self.of(n) for n in inputs)
            case "Where":
                return max(self.of(n) for n in inputs[1:3])
            case "Pad":
                filled = self.of(inputs[2]) if len(inputs) > 2 and inputs[2] else 0.0
                return max(self.of(inputs[0]), filled)
            case "Constant":
                array = self.symbolic.constant(node.output[0])
                return math.inf if array is None else _largest(array)
            case "ConstantOfShape":
                value = next((a.t for a in node.attribute if a.name == "value"), None)
                return 0.0 if value is None else self._bound_stored(value)
        if kind != "f":  # integers wrap around: a small one may become a large one
            return math.inf
        if operator in ("Cast", "CastLike"):
            return _round_bound(self.of(inputs[0]), -lowest)
        rule = _COMPUTING.get(operator)
        if rule is None:
            return math.inf
        bounds = [self.of(n) for n in inputs]
        return _round_bound(rule(bounds), -lowest) if all(map(math.isfinite, bounds)) else math.inf


def _round_bound(bound: float, most: float) -> float:
    """A bound of what is rounded to a type whose largest finite number is ``most``; inf where that may overflow."""
    return min(bound * (1 + _RELATIVE) + _ABSOLUTE, most) if bound <= most else math.inf


def _largest(array: np.ndarray) -> float:
    """The largest absolute value of an array; inf where an element is infinite or NaN, or where there are no numbers."""
    if array.dtype.kind in "OSUc":
        return math.inf
    most, flat = 0.0, array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        part = np.abs(flat[start : start + _CHUNK].astype(np.float64))
        if not np.isfinite(part).all():
            return math.inf
        most = max(most, float(part.max()))
    return most


def _largest_of_external(tensor: onnx.TensorProto, folder: Path) -> float:
    """The largest absolute value of external data, read in chunks; inf where it cannot be read."""
    count = math.prod(tensor.dims)
    if count == 0:
        return 0.0
    try:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
        location = location_of(tensor)
        path = folder / location.location
        # onnx once had numbers of another size for types that NumPy lacks.
        has_numpy_size = dtype.itemsize == ITEM_SIZES.get(tensor.data_type)
        if (
            not has_numpy_size
            or min(tensor.dims, default=0) < 0
            or location.offset + count * dtype.itemsize > path.stat().st_size
        ):
            return math.inf
        mapped = np.memmap(path, dtype, "r", location.offset, (count,))
    except (KeyError, OSError, TypeError, ValueError):
        return math.inf
    return _largest(mapped)
