# SPDX-License-Identifier: Apache-2.0
"""Casts: integers that do not fit the type wrap, floats become infinite."""

from __future__ import annotations

import math
from collections.abc import Callable

from onnx import TensorProto

from stof.symbolic.algebra.conditions import select
from stof.symbolic.algebra.int_bounds import bound
from stof.symbolic.algebra.overflow import EXACT, round_large_integers
from stof.symbolic.algebra.piecewise import case_as_real, split_cases, to_cond, to_int
from stof.symbolic.algebra.terms import Int, Scalar, integer, of_atom, to_real
from stof.symbolic.facts import Fact, Rule, RuleContext, dtype_kind
from stof.symbolic.rules.broadcasting import elementwise
from stof.symbolic.tensor import Index, SymTensor

# The least number that rounds to infinity: half an ulp beyond the largest finite one.
_INFINITE: dict[int, float] = {
    int(TensorProto.FLOAT16): 65520.0,
    int(TensorProto.BFLOAT16): float.fromhex("0x1.ffp127"),
    int(TensorProto.FLOAT): float.fromhex("0x1.ffffffp127"),
}

_HALF = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
# Lengths and input data may not fit these types; lengths fit 32 bits.
_NARROW_INTEGERS = {
    int(TensorProto.INT8): (-128, 127),
    int(TensorProto.UINT8): (0, 255),
    int(TensorProto.INT16): (-32768, 32767),
    int(TensorProto.UINT16): (0, 65535),
}


def overflow_to_inf(number: float, dtype: int) -> float:
    """The number, or infinity where it is too large for the type.

    fp16 and bf16 overflow as fp32 does: runtimes may compute them in fp32.
    """
    return _overflow(number, int(TensorProto.FLOAT) if dtype in _HALF else dtype)


def _overflow(number: float, dtype: int) -> float:
    return math.copysign(math.inf, number) if abs(number) >= _INFINITE.get(dtype, math.inf) else number


def _narrow(element: Callable[[Index], Scalar], before: int, after: int) -> Callable[[Index], Scalar]:
    """The elements after a cast between float types, where the narrower type may overflow.

    The overflow of a cast to fp16 or bf16 is applied at the cast back: between the two a runtime may keep fp32.
    """
    if after in _HALF or before not in (*_HALF, TensorProto.DOUBLE):
        return element
    narrow = before if before in _HALF else after

    def at(index: Index) -> Scalar:
        value = to_real(element(index))
        cases = split_cases(value)
        numbers = [_overflow(x, narrow) if isinstance(x, float) else x for _, x in cases]
        if numbers == [x for _, x in cases] or any(isinstance(x, float) and math.isnan(x) for x in numbers):
            return value
        result: Scalar = case_as_real(numbers[-1])
        for (cond, _), number in list(zip(cases, numbers, strict=True))[-2::-1]:
            result = select(cond, case_as_real(number), result)
        return result

    return at


def _cast(context: RuleContext) -> list[Fact] | None:
    to = context.number("to", TensorProto.FLOAT) if context.node.op_type == "Cast" else context.fact(1).dtype
    kind = dtype_kind(to)
    table: dict[str, Callable[[Scalar], Scalar]] = {"i": to_int, "b": to_cond, "f": to_real}
    convert = table.get(kind or "")
    source, shape = context.value(0), context.shape(0)
    if kind == "f" and source is not None and shape is not None:
        elements = _narrow(round_large_integers(source, EXACT[to]), context.fact(0).dtype, to)
        return [Fact(to, shape, SymTensor(shape, "f", elements))]
    if convert is None:
        return [Fact(to, context.shape(0))]
    if to in _NARROW_INTEGERS:
        return elementwise(context, lambda x: _wrap(to_int(x), *_NARROW_INTEGERS[to]), to, 1)
    return elementwise(context, convert, to, 1)


def _wrap(value: Int, low: int, high: int) -> Scalar:
    """A cast to 8 or 16 bits: the value itself where it fits for certain, the wrapped one where it is a number."""
    if value.constant is not None:
        return integer((value.constant - low) % (high - low + 1) + low)
    if bound(value, upper=False) >= low and bound(value, upper=True) <= high:
        return value
    return of_atom("opaque", "a cast to 8 or 16 bits", value)


RULES: dict[str, Rule] = {"Cast": _cast, "CastLike": _cast}
