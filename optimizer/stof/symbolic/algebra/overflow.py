# SPDX-License-Identifier: Apache-2.0
"""Overflow and rounding: the algebra computes with unbounded integers, a graph with the ranges of its types.

Lengths are at most 2^22, the operator's limit (docs/reference/operators.md). Then a flat index ``q * T + k`` fits 64 bits
but not 32, and a position fits fp32 but not fp16. Input data is assumed to be as small as positions in integer arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from onnx import TensorProto, helper

from stof.symbolic.algebra.float_arithmetic import round_integers
from stof.symbolic.algebra.int_bounds import LONGEST, Bounds, Range, is_within
from stof.symbolic.algebra.terms import Atom, Int, Real, Scalar, integer, of_atom, subterms, to_real, var
from stof.symbolic.tensor import Index, Shape, SymTensor

# Largest n such that the type holds all integers from -n to n.
EXACT: dict[int, int] = {
    int(TensorProto.FLOAT16): 1 << 11,
    int(TensorProto.BFLOAT16): 1 << 8,
    int(TensorProto.FLOAT): 1 << 24,
    int(TensorProto.DOUBLE): 1 << 53,
}
_MAX_ELEMENTS = 1 << 48  # of a tensor: no machine holds more
_PROBE = "place"  # indices of a tensor whose elements are bounded


def value_range(tensor: SymTensor) -> Range:
    """Bounds of an integer tensor's elements for all sizes; infinite where they are input data or unknown."""
    index, limits = probe(tensor.shape)
    value = tensor.at(index)
    if not isinstance(value, Int) or any(isinstance(p, Atom) and p.kind == "read" for p in subterms(value)):
        return -math.inf, math.inf
    return Bounds(limits, math.inf).integer(value)


def probe(shape: Shape) -> tuple[Index, dict[str, float]]:
    """Variables for the indices of a tensor, and their largest values."""
    sizes = Bounds({}, LONGEST)
    most = [min(_MAX_ELEMENTS, sizes.integer(d)[1]) - 1 for d in shape]
    names = [f"{_PROBE}{axis}" for axis in range(len(shape))]
    return tuple(var(n) for n in names), dict(zip(names, most, strict=True))


def guard_overflow(tensor: SymTensor, dtype: int) -> SymTensor:
    """The tensor, with unknown elements if one of them may not fit the type."""
    if tensor.is_constant or tensor.kind == "b":
        return tensor
    fits: list[bool] = []  # the answer, computed at the first use

    def at(index: Index) -> Scalar:
        value = tensor.at(index)
        if not fits:
            fits.append(_holds(tensor, dtype))
        return value if fits[0] else _make_unknown(value, dtype)

    return replace(tensor, function=at, memo={})


def strip_guards(value: Int) -> Int:
    """An integer in which :func:`guard_overflow` found numbers that int64 may not hold, as it is without the guards.

    For an index of a flattened tensor: a tensor that exists has fewer elements than 2^63, and so has each sum that counts them.
    """
    total = integer(0)
    for monomial, coefficient in value.terms:
        product = integer(coefficient)
        for atom in monomial:
            product = product * _strip_guard(atom)
        total = total + product
    return total


def _strip_guard(atom: Atom) -> Int:
    if atom.kind == "opaque" and atom.args[0] == _words(TensorProto.INT64):
        inner = atom.args[1]
        assert isinstance(inner, Int)
        return strip_guards(inner)
    if atom.kind in ("var", "size"):
        return Int((((atom,), 1),))
    return of_atom(atom.kind, *(strip_guards(a) if isinstance(a, Int) else a for a in atom.args))


def _words(dtype: int) -> str:
    return f"arithmetic in {TensorProto.DataType.Name(dtype).lower()} that does not hold the numbers of long inputs"


def _make_unknown(value: Scalar, dtype: int) -> Scalar:
    words = _words(dtype)
    return of_atom("opaque", words, value) if isinstance(value, Int) else Real("opaque", (words, to_real(value)))


def _holds(tensor: SymTensor, dtype: int) -> bool:
    index, limits = probe(tensor.shape)
    value = tensor.at(index)
    if isinstance(value, Int):
        if not any(p.kind == "var" for p in subterms(value)):
            return True  # a function of sizes, which fits in every valid run
        info = np.iinfo(helper.tensor_dtype_to_np_dtype(dtype))
        low, high = Bounds(limits, LONGEST).integer(value)
        return float(info.min) <= low and high <= float(info.max)
    return all(is_within(x, EXACT.get(dtype, LONGEST), limits, read=LONGEST) for x in _integers(value))


def _integers(value: object) -> list[Int]:
    """The integers inside a float."""
    if not isinstance(value, Real):
        return []
    if value.kind == "int":
        return [x for x in value.args if isinstance(x, Int)]
    return [x for a in value.args for x in _integers(a)]


def round_large_integers(source: SymTensor, largest: int) -> Callable[[Index], Scalar]:
    """The elements of a tensor cast to a float type; integers that may be larger than ``largest`` are rounded."""
    exact: list[bool] = []  # the answer, computed at the first use

    def is_exact() -> bool:
        if not exact:
            index, limits = probe(source.shape)
            value = source.at(index)
            integers = [value] if isinstance(value, Int) else _integers(value)
            exact.append(all(is_within(x, largest, limits) for x in integers))
        return exact[0]

    def at(index: Index) -> Scalar:
        value = source.at(index)
        return to_real(value) if is_exact() else round_integers(to_real(value), largest)

    return at
