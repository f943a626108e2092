# SPDX-License-Identifier: Apache-2.0
"""What stof's operators take besides inputs and outputs: the plugin library says it, by attributes and shapes."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import onnx

from stof.graph.node_fields import plain_attributes_of
from stof.memory.session_node import SessionNode
from stof.memory.tensor_sizes import TensorSizes
from stof.runtime.library import LibraryError, Op, Tensor, shape_of, tensor_of
from stof.system.processor import usable_cores

_MOST_THREADS = 64
_KEY = 1  # of StofAttention's inputs; its value follows
_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
_UNREAD = 1 << 20  # the address of weights, whose values decide nothing


def operator_workspace(node: SessionNode, sizes: TensorSizes) -> list[int]:
    """Bytes of the block that a node of domain stof takes while it runs."""
    arrays: list[np.ndarray] = []
    try:
        inputs = [_describe(name, sizes, arrays) for name in node.inputs]
        found = _operator(node).workspace(inputs, count_threads())
    except (LibraryError, ValueError):
        found = None  # of packed sequences, for instance, only a run knows the lengths
    return [_usual_workspace(node, sizes) if found is None else found]


def _describe(name: str, sizes: TensorSizes, arrays: list[np.ndarray]) -> Tensor:
    """An input as the library takes it, with data where they follow from the sizes; ``arrays`` keeps these alive."""
    if not name:
        return Tensor()
    shape = shape_of(sizes.dtype(name), sizes.shape(name))
    if sizes.dtype(name) in _FLOATS:
        shape.data = _UNREAD if sizes.is_constant(name) else None
        return shape
    known = sizes.constant(name)
    if known is None:
        known = sizes.integers(name)
    if known is None:
        return shape
    arrays.append(np.ascontiguousarray(known))
    return tensor_of(arrays[-1])


def _usual_workspace(node: SessionNode, sizes: TensorSizes) -> int:
    """An fp32 copy of keys and values, which attention packs; of other operators nothing."""
    if node.op != "StofAttention":
        return 0
    return sum(4 * math.prod(sizes.shape(name)) for name in node.inputs[_KEY : _KEY + 2])


@lru_cache(maxsize=64)
def _cached_operator(op: str, attributes: tuple[tuple[str, object], ...]) -> Op:
    return Op(op, dict(attributes))  # type: ignore[arg-type]


def _operator(node: SessionNode) -> Op:
    attributes = plain_attributes_of(node.proto)
    frozen = tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in sorted(attributes.items()))
    return _cached_operator(node.op, frozen)


def count_threads() -> int:
    """Those of a session with default options on this machine."""
    return max(1, min(_MOST_THREADS, usable_cores()))
