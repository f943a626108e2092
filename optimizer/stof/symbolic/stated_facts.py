# SPDX-License-Identifier: Apache-2.0
"""Facts that a graph states: declared shapes and initializers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import onnx
from onnx import numpy_helper

from stof.graph.external_data import is_external
from stof.symbolic.algebra.terms import Int, dim, integer
from stof.symbolic.dimension_names import parse_dimension
from stof.symbolic.facts import Fact, dtype_kind
from stof.symbolic.tensor import Shape, constant_tensor, stored_tensor

LARGEST_FOLDED = 1 << 24  # most elements of a constant that are read into memory
_LARGEST_KEPT = 1 << 16  # most bytes of a stored constant whose array is kept beside the model's own


def read_declared_shape(name: str, tensor: onnx.TypeProto.Tensor) -> Shape | None:
    """The shape that the model declares. A dimension without value or name gets a name of its own.

    Some exporters write -1 for a dynamic dimension.
    """
    if not tensor.HasField("shape"):
        return None
    return tuple(
        integer(d.dim_value)
        if d.HasField("dim_value") and d.dim_value >= 0
        else parse_dimension(d.dim_param)
        if d.dim_param
        else dim(f"{name}#{i}")
        for i, d in enumerate(tensor.shape.dim)
    )


def add_declared(fact: Fact, name: str, tensor: onnx.TypeProto.Tensor) -> Fact:
    """A fact in which the sizes that nobody knows are those that the model declares."""
    shape = read_declared_shape(name, tensor)
    if shape is None or (fact.shape is not None and len(fact.shape) != len(shape)):
        return fact
    if fact.shape is None:
        return Fact(fact.dtype or tensor.elem_type, shape)
    unknown = {dim(f"{name}#{i}") for i in range(len(shape))}
    if not unknown & set(fact.shape):
        return fact
    merged = tuple(declared if size in unknown else size for size, declared in zip(fact.shape, shape, strict=True))
    return Fact(fact.dtype, merged, fact.value, fact.reason) if fact.value is None else fact


def replace_sizes(fact: Fact, sizes: Mapping[Int, Int]) -> Fact:
    """A fact in which some sizes are others."""
    assert fact.shape is not None
    shape = tuple(sizes.get(d, d) for d in fact.shape)
    if shape == fact.shape:
        return fact
    return replace(fact, shape=shape, value=None if fact.value is None else replace(fact.value, shape=shape))


def read_initializer(tensor: onnx.TensorProto) -> Fact:
    shape = tuple(integer(d) for d in tensor.dims)
    count = int(np.prod(list(tensor.dims), dtype=np.int64))
    kind = dtype_kind(tensor.data_type)
    if kind is None or is_external(tensor) or count > LARGEST_FOLDED:
        return Fact(tensor.data_type, shape, None, "a weight")
    if len(tensor.raw_data) > _LARGEST_KEPT:
        read = partial(numpy_helper.to_array, tensor)
        return Fact(tensor.data_type, shape, stored_tensor(tensor.name, tensor.dims, kind, read))
    return Fact(tensor.data_type, shape, constant_tensor(tensor.name, numpy_helper.to_array(tensor)))
