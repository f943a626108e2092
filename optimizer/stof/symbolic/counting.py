# SPDX-License-Identifier: Apache-2.0
"""Operators with which older exporters count positions: CumSum of ones, NonZero of ones."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from stof.symbolic.interpreter import Context, Fact, Rule
from stof.symbolic.movement import product
from stof.symbolic.tensor import Index, SymTensor, constant_tensor
from stof.symbolic.terms import Cond, Int, Real, Scalar, integer, to_real, var

ZERO, ONE = integer(0), integer(1)


def _uniform(tensor: SymTensor, axes: set[int]) -> bool:
    """Whether elements do not depend on some of their indices."""
    probe = tuple(var(f"count{a}") for a in range(tensor.rank))
    text = str(_described(tensor.at(probe)))
    return not any(f"var(count{a})" in text for a in axes)


def _described(value: Scalar) -> object:
    return value if isinstance(value, Int | Cond) else _parts(value)


def _parts(value: Real) -> list[object]:
    found: list[object] = [value.kind]
    for arg in value.args:
        found.append(
            _parts(arg) if isinstance(arg, Real) else [str(a) for a in arg] if isinstance(arg, tuple) else str(arg)
        )
    return found


def _cumsum(context: Context) -> list[Fact] | None:
    fact, axis = context.fact(0), context.fixed_ints(1)
    data, value = fact.shape, fact.value
    if data is None or axis is None or value is None or value.kind == "b":
        return [Fact(fact.dtype, data)]
    place = axis[0] % len(data)
    exclusive, reverse = (bool(context.number(n, 0)) for n in ("exclusive", "reverse"))
    if value.constant is not None and not _uniform(value, {place}):
        return [
            Fact(fact.dtype, data, constant_tensor(context.node.output[0], _summed(value, place, exclusive, reverse)))
        ]
    if not _uniform(value, {place}):
        return [Fact(fact.dtype, data)]  # of a mask: positions of what is not padded

    def at(index: Index) -> Scalar:
        count = data[place] - ONE - index[place] if reverse else index[place]
        each = value.at((*index[:place], ZERO, *index[place + 1 :]))
        steps = count if exclusive else count + ONE
        if isinstance(each, Int):
            return each * steps
        from stof.symbolic.rules import mul

        return mul(each, to_real(steps))

    return [Fact(fact.dtype, data, SymTensor(data, value.kind, at))]


def _summed(value: SymTensor, axis: int, exclusive: bool, reverse: bool) -> np.ndarray:
    array = np.asarray(value.constant)
    array = np.flip(array, axis) if reverse else array
    total = np.cumsum(array, axis, dtype=array.dtype)
    total = total - array if exclusive else total
    return np.ascontiguousarray(np.flip(total, axis) if reverse else total)


def _nonzero(context: Context) -> list[Fact] | None:
    data, value = context.shape(0), context.value(0)
    if data is None or not data:
        return None
    rank = integer(len(data))
    if value is None:
        return None
    if value.constant is not None and not _uniform(value, set(range(len(data)))):
        array = np.array(np.nonzero(value.constant), np.int64)
        return [
            Fact(TensorProto.INT64, (rank, integer(array.shape[1])), constant_tensor(context.node.output[0], array))
        ]
    if not _uniform(value, set(range(len(data)))):
        return None
    element = value.at((ZERO,) * len(data))
    if not _is_number(element) or len(data) > 1:
        return None
    shape = (rank, product(data) if _is_true(element) else ZERO)
    return [Fact(TensorProto.INT64, shape, SymTensor(shape, "i", lambda index: index[1]))]


def _is_number(value: Scalar) -> bool:
    if isinstance(value, Int):
        return value.constant is not None
    return value.kind in ("true", "false", "const")


def _is_true(value: Scalar) -> bool:
    if isinstance(value, Int):
        return value.constant != 0
    return value.kind == "true" or (value.kind == "const" and value.args[0] != 0.0)


RULES: dict[str, Rule] = {"CumSum": _cumsum, "NonZero": _nonzero}
