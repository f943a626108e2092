# SPDX-License-Identifier: Apache-2.0
"""Rules of CumSum and NonZero, with which older exporters make positions from a tensor of ones."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from stof.symbolic.algebra.terms import Int, Scalar, integer, subterms, to_real, var
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules.elementwise import mul
from stof.symbolic.rules.movement_helpers import element_count
from stof.symbolic.tensor import Index, SymTensor, constant_tensor

ZERO, ONE = integer(0), integer(1)
_MOST_COUNTED = 1 << 11  # elements of a formula that are computed one by one


def _is_constant_along(tensor: SymTensor, axes: set[int]) -> bool:
    """Whether elements do not depend on their indices along some axes."""
    probe = tuple(var(f"count{a}") for a in range(tensor.rank))
    names = {f"count{a}" for a in axes}
    return not any(p.kind == "var" and p.args[0] in names for p in subterms(tensor.at(probe)))


def _cumsum(context: RuleContext) -> list[Fact] | None:
    fact, axis = context.fact(0), context.fixed_ints(1)
    data, value = fact.shape, fact.value
    if data is None or axis is None or value is None or value.kind == "b":
        return [Fact(fact.dtype, data)]
    along = axis[0] % len(data)
    exclusive, reverse = (bool(context.number(n, 0)) for n in ("exclusive", "reverse"))
    if not _is_constant_along(value, {along}):
        if not value.is_constant:
            return [Fact(fact.dtype, data)]  # of a mask: the positions of the keys that are not padding
        total = _cumulative_sum(value, along, exclusive, reverse)
        return [Fact(fact.dtype, data, constant_tensor(context.node.output[0], total))]

    def at(index: Index) -> Scalar:
        count = data[along] - ONE - index[along] if reverse else index[along]
        each = value.at((*index[:along], ZERO, *index[along + 1 :]))
        steps = count if exclusive else count + ONE
        if isinstance(each, Int):
            return each * steps
        return mul(each, to_real(steps))

    return [Fact(fact.dtype, data, SymTensor(data, value.kind, at))]


def _cumulative_sum(value: SymTensor, axis: int, exclusive: bool, reverse: bool) -> np.ndarray:
    array = np.asarray(value.constant)
    array = np.flip(array, axis) if reverse else array
    total = np.cumsum(array, axis, dtype=array.dtype)
    total = total - array if exclusive else total
    return np.ascontiguousarray(np.flip(total, axis) if reverse else total)


def _nonzero(context: RuleContext) -> list[Fact] | None:
    data, value = context.shape(0), context.value(0)
    if data is None or not data:
        return None
    rank = integer(len(data))
    if value is None:
        return None
    if len(data) == 1 and _is_constant_along(value, {0}):
        element = value.at((ZERO,))
        if not _is_number(element):
            return None
        shape = (rank, element_count(data) if _is_true(element) else ZERO)
        return [Fact(TensorProto.INT64, shape, SymTensor(shape, "i", lambda index: index[1]))]
    stored = value.numbers(_MOST_COUNTED)
    if stored is None:
        return None
    array = np.array(np.nonzero(stored), np.int64)
    shape = (rank, integer(array.shape[1]))
    return [Fact(TensorProto.INT64, shape, constant_tensor(context.node.output[0], array))]


def _is_number(value: Scalar) -> bool:
    if isinstance(value, Int):
        return value.constant is not None
    return value.kind in ("true", "false", "const")


def _is_true(value: Scalar) -> bool:
    if isinstance(value, Int):
        return value.constant != 0
    return value.kind == "true" or (value.kind == "const" and value.args[0] != 0.0)


RULES: dict[str, Rule] = {"CumSum": _cumsum, "NonZero": _nonzero}
