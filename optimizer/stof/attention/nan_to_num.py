# SPDX-License-Identifier: Apache-2.0
"""Recognizes elementwise nodes that keep attention weights as they are, such as an exported ``nan_to_num``.

Nodes that read only the weights and constants are a function of one number. The function is evaluated where it can change:
at and around its constants, at 0, 1 and NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from stof.graph.index import GraphIndex, is_standard
from stof.symbolic import Symbolic

_MAX_NODES = 32
_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "And": np.logical_and,
    "Equal": np.equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Identity": lambda x: x,
    "IsNaN": np.isnan,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Max": np.maximum,
    "Min": np.minimum,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Where": np.where,
}
_TYPES = {int(onnx.TensorProto.BOOL): np.bool_, int(onnx.TensorProto.FLOAT): np.float32}
_TYPES[int(onnx.TensorProto.DOUBLE)] = np.float64


@dataclass(frozen=True)
class IdentityRegion:
    """Elementwise nodes that map every weight from 0 to 1 to itself."""

    tensor: str  # the region's only output
    clears_nan: bool  # NaN becomes 0
    nodes: tuple[str, ...]


def find_identity_region(index: GraphIndex, symbolic: Symbolic, weights: str) -> IdentityRegion | None:
    """The region that follows fp32 weights; None where there is none."""
    if symbolic.dtype(weights) != onnx.TensorProto.FLOAT:
        return None
    region, constants = _collect_region(index, symbolic, weights)
    inside = {o for n in region for o in n.output if o}
    leaving = [
        t
        for t in (weights, *(o for n in region for o in n.output if o))
        if t in index.outputs or t in index.captured or any(n.output[0] not in inside for n in index.consumers(t))
    ]
    if len(leaving) != 1 or leaving[0] == weights:
        return None
    points = np.array([0.0, 1e-30, 0.1, 0.5, 0.9, 1.0, *_sample_around(constants), np.nan], np.float32)
    values = _evaluate(region, symbolic, weights, constants, points).get(leaving[0])
    if values is None or values.dtype != np.float32 or not np.array_equal(values[:-1], points[:-1]):
        return None
    if not np.isnan(values[-1]) and values[-1] != 0.0:
        return None
    return IdentityRegion(leaving[0], not np.isnan(values[-1]), tuple(n.output[0] for n in region))


def _collect_region(
    index: GraphIndex, symbolic: Symbolic, weights: str
) -> tuple[list[onnx.NodeProto], dict[str, float]]:
    """The nodes that read only the weights, each other and constants of one number, in order of execution; the constants."""
    computed, constants = {weights}, dict[str, float]()
    region: list[onnx.NodeProto] = []
    pending = list(index.consumers(weights))
    while pending and len(region) < _MAX_NODES:
        node = next((n for n in pending if _can_evaluate(n, symbolic, computed, constants)), None)
        if node is None:
            break
        pending.remove(node)
        if node.output[0] in computed:
            continue
        region.append(node)
        computed.add(node.output[0])
        pending.extend(index.consumers(node.output[0]))
    return region, constants


def _can_evaluate(node: onnx.NodeProto, symbolic: Symbolic, computed: set[str], constants: dict[str, float]) -> bool:
    if not is_standard(node) or len(node.output) != 1:
        return False
    if node.op_type == "Cast":
        return symbolic.dtype(node.output[0]) in _TYPES
    if node.op_type not in {*_FUNCTIONS, "IsInf"} or (node.op_type == "IsInf" and node.attribute):
        return False
    for name in node.input:
        if name in computed or name in constants:
            continue
        value, shape = symbolic.uniform(name), symbolic.shape(name)
        if value is None or shape is None or any(d.constant != 1 for d in shape):
            return False
        constants[name] = value
    return True


def _sample_around(constants: dict[str, float]) -> list[float]:
    inner = [np.float32(c) for c in constants.values() if 0 <= c <= 1]
    near = [np.nextafter(c, np.float32(side)) for c in inner for side in (0, 1)]
    return [float(x) for x in (*inner, *near)]


def _evaluate(
    region: Sequence[onnx.NodeProto], symbolic: Symbolic, weights: str, constants: dict[str, float], points: np.ndarray
) -> dict[str, np.ndarray]:
    values = {weights: points}
    with np.errstate(all="ignore"):
        for name, number in constants.items():
            dtype = onnx.helper.tensor_dtype_to_np_dtype(symbolic.dtype(name))
            values[name] = np.array(number).astype(dtype)
        for node in region:
            inputs = [values[n] for n in node.input]
            result: np.ndarray
            if node.op_type == "Cast":
                result = inputs[0].astype(_TYPES[symbolic.dtype(node.output[0])])
            elif node.op_type == "IsInf":
                result = np.isinf(inputs[0])
            else:
                result = inputs[0]
                if node.op_type in ("Where", "Not", "Identity", "IsNaN"):
                    result = _FUNCTIONS[node.op_type](*inputs)
                else:
                    for other in inputs[1:]:
                        result = _FUNCTIONS[node.op_type](result, other)
            values[node.output[0]] = np.asarray(result)
    return values
