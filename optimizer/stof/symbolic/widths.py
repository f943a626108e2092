# SPDX-License-Identifier: Apache-2.0
"""Where integers stay within what their type holds: what is computed with unbounded integers here is not in the graph.

Lengths are at most 2^22, as in the operator (docs/operators.md). A flat index ``q * T + k`` fits 64 bits then, not 32; a
position fits fp32, not fp16. Numbers that a model reads count as positions do, as long as nothing but integers is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto, helper

from stof.symbolic.tensor import Index, Shape, SymTensor
from stof.symbolic.terms import ANY, Atom, Int, Real, Scalar, of_atom, parts, to_real, var

LONGEST = 1 << 22
# Every integer up to here is one of the type.
EXACT: dict[int, int] = {
    int(TensorProto.FLOAT16): 1 << 11,
    int(TensorProto.BFLOAT16): 1 << 8,
    int(TensorProto.FLOAT): 1 << 24,
    int(TensorProto.DOUBLE): 1 << 53,
}
_MOST_ELEMENTS = 1 << 48  # of a tensor: more fit no machine
_PROBE = "place"  # indices of a tensor whose elements are bounded

Limits = Mapping[str, float]  # of index variables: their largest value
Range = tuple[float, float]


@dataclass(frozen=True)
class _Bounds:
    limits: Limits
    read: float  # the largest number that is read, and that an unknown one is taken for

    def integer(self, value: Int) -> Range:
        low = high = 0.0
        for monomial, coefficient in value.terms:
            term: Range = (coefficient, coefficient)
            masks = sum(a.kind == "read" and ANY not in a.args for a in monomial) > 1
            for atom in monomial:
                # What is multiplied with another is a mask of 0 and 1.
                term = _times(term, (0.0, 1.0) if masks and atom.kind == "read" else self.atom(atom))
            low, high = low + term[0], high + term[1]
        return low, high

    def atom(self, atom: Atom) -> Range:
        args = [self.integer(a) for a in atom.args if isinstance(a, Int)]
        match atom.kind:
            case "size":
                return 0.0, LONGEST
            case "var":
                return 0.0, self.limits.get(str(atom.args[0]), LONGEST)
            case "bool":
                return 0.0, 1.0
            case "abs":
                return 0.0, max(map(abs, args[0]))
            case "select":
                return min(a[0] for a in args), max(a[1] for a in args)
            case "min" | "max":
                choose = min if atom.kind == "min" else max
                return choose(a[0] for a in args), choose(a[1] for a in args)
            case "mod" if isinstance(atom.args[1], int):
                return (0.0, atom.args[1] - 1.0) if atom.args[1] > 0 else (atom.args[1] + 1.0, 0.0)
            case "div" if isinstance(atom.args[1], int) and atom.args[1]:
                ends = [math.floor(x / atom.args[1]) if math.isfinite(x) else x for x in args[0]]
                return (min(ends), max(ends)) if atom.args[1] > 0 else (-math.inf, math.inf)
        return -self.read, self.read


def _times(one: Range, other: Range) -> Range:
    products = [x * y if x and y else 0.0 for x in one for y in other]
    return min(products), max(products)


def fits(value: Int, largest: float, limits: Limits | None = None, *, read: float = math.inf) -> bool:
    """Whether an integer is at most so large, whatever is read and whatever is not known."""
    low, high = _Bounds(limits or {}, read).integer(value)
    return -largest <= low and high <= largest


def may_be_negative(value: Int) -> bool:
    """Whether an integer is not known to be 0 or more, whatever is read."""
    return _Bounds({}, math.inf).integer(value)[0] < 0


def extremes(tensor: SymTensor) -> Range:
    """Bounds of the values of an integer tensor, for all sizes; infinite where it holds what is read or not known."""
    index, limits = probe(tensor.shape)
    value = tensor.at(index)
    if not isinstance(value, Int) or any(isinstance(p, Atom) and p.kind == "read" for p in parts(value)):
        return -math.inf, math.inf
    return _Bounds(limits, math.inf).integer(value)


def probe(shape: Shape) -> tuple[Index, dict[str, float]]:
    """Variables for the indices of a tensor, and how large they get."""
    sizes = _Bounds({}, LONGEST)
    most = [min(_MOST_ELEMENTS, sizes.integer(d)[1]) - 1 for d in shape]
    names = [f"{_PROBE}{axis}" for axis in range(len(shape))]
    return tuple(var(n) for n in names), dict(zip(names, most, strict=True))


def guarded(tensor: SymTensor, dtype: int) -> SymTensor:
    """The result of arithmetic, of which no element is known where one does not fit the type."""
    if tensor.constant is not None or tensor.kind == "b":
        return tensor
    fitting: list[bool] = []

    def at(index: Index) -> Scalar:
        value = tensor.at(index)
        if not fitting:
            fitting.append(_holds(tensor, dtype))
        return value if fitting[0] else _unknown(value, dtype)

    return replace(tensor, function=at, memo={})


def _unknown(value: Scalar, dtype: int) -> Scalar:
    words = f"arithmetic in {TensorProto.DataType.Name(dtype).lower()} that does not hold the numbers of long inputs"
    return of_atom("opaque", words, value) if isinstance(value, Int) else Real("opaque", (words, to_real(value)))


def _holds(tensor: SymTensor, dtype: int) -> bool:
    index, limits = probe(tensor.shape)
    value = tensor.at(index)
    if isinstance(value, Int):
        if not any(p.kind == "var" for p in parts(value)):
            return True  # of sizes: that of a tensor, or what a valid run computes of them
        info = np.iinfo(helper.tensor_dtype_to_np_dtype(dtype))
        low, high = _Bounds(limits, LONGEST).integer(value)
        return float(info.min) <= low and high <= float(info.max)
    return all(fits(x, EXACT.get(dtype, LONGEST), limits, read=LONGEST) for x in _integers(value))


def _integers(value: object) -> list[Int]:
    """The integers that a float is made of."""
    if not isinstance(value, Real):
        return []
    if value.kind == "int":
        return [x for x in value.args if isinstance(x, Int)]
    return [x for a in value.args for x in _integers(a)]


def rounding(source: SymTensor, largest: int) -> Callable[[Index], Scalar]:
    """The elements of a tensor cast to a float type: integers that may be larger than that are rounded."""
    fitting: list[bool] = []

    def whole() -> bool:
        if not fitting:
            index, limits = probe(source.shape)
            value = source.at(index)
            found = [value] if isinstance(value, Int) else _integers(value)
            fitting.append(all(fits(x, largest, limits) for x in found))
        return fitting[0]

    def at(index: Index) -> Scalar:
        value = source.at(index)
        return to_real(value) if whole() else rounded(to_real(value), largest)

    return at


def rounded(value: Real, largest: int) -> Real:
    """A float whose integers are rounded where they are not known to be small."""
    if value.kind == "int":
        inner = value.args[0]
        assert isinstance(inner, Int)
        return value if fits(inner, largest) else Real("rounded", (inner, largest))
    if value.kind == "rounded":
        inner, before = value.args
        assert isinstance(before, int)
        return Real("rounded", (inner, min(before, largest)))
    if value.kind in ("select", "add", "mul", "div", "min", "max", "neg"):
        return Real(value.kind, tuple(rounded(a, largest) if isinstance(a, Real) else a for a in value.args))
    return value
