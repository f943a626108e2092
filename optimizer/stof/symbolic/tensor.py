# SPDX-License-Identifier: Apache-2.0
"""A tensor as a function from its index space to a scalar."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from stof.symbolic.algebra.conditions import select
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.piecewise import to_cond, to_int
from stof.symbolic.algebra.terms import ANY, FALSE, TRUE, Cond, Int, Real, Scalar, integer, of_atom, real, to_real

Shape = tuple[Int, ...]
Index = tuple[Int, ...]
EQUALS = "\x1f"  # "NAME<EQUALS>NUMBER" names the boolean table of where the constant NAME is NUMBER
_MIN_POSITIONS = 8  # least elements of a constant that may count as positions
SMALL = 64  # most elements of a tensor that are listed one by one


@dataclass(frozen=True, eq=False)
class SymTensor:
    """A tensor as a function of its indices: ``at(index)`` is an element.

    Elements are memoized: shared subgraphs would otherwise be walked once for each path.
    """

    shape: Shape
    kind: str  # "i", "b" or "f"
    function: Callable[[Index], Scalar]
    source: np.ndarray | Callable[[], np.ndarray] | None = None  # the constant, or what reads it
    memo: dict[Index, Scalar] = field(default_factory=dict, repr=False)

    def at(self, index: Index) -> Scalar:
        """The element at an index, of the tensor's kind."""
        element = self.memo.get(index)
        if element is None:
            element = coerce(self.function(index), self.kind)
            self.memo[index] = element
        return element

    @property
    def is_constant(self) -> bool:
        """Whether nothing symbolic is left."""
        return self.source is not None

    @property
    def constant(self) -> np.ndarray | None:
        """The array, where nothing symbolic is left. A large one is read anew each time: ask ``is_constant`` first."""
        return self.source() if callable(self.source) else self.source

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def sizes(self) -> tuple[int, ...] | None:
        """The shape when all of it is constant."""
        constants = [d.constant for d in self.shape]
        return None if any(d is None for d in constants) else tuple(d for d in constants if d is not None)

    def numbers(self, most: int) -> np.ndarray | None:
        """The array, where all elements are known numbers: a constant, or at most so many of a formula over fixed sizes."""
        sizes = self.sizes()
        if self.is_constant or sizes is None or math.prod(sizes) > most:
            return self.constant
        array: np.ndarray = np.empty(sizes, {"b": "?", "i": "i8", "f": "f8"}[self.kind])
        for index in np.ndindex(sizes):
            number = _known_number(self.at(tuple(integer(i) for i in index)))
            if number is None:
                return None
            array[index] = number
        return array

    def elements(self) -> list[Scalar] | None:
        """All elements in row-major order, of a small tensor of constant shape."""
        sizes = self.sizes()
        if sizes is None or int(np.prod(sizes, dtype=np.int64)) > SMALL:
            return None
        return [self.at(tuple(integer(i) for i in index)) for index in itertools.product(*(range(n) for n in sizes))]


def _known_number(value: Scalar) -> float | bool | None:
    if isinstance(value, Int):
        return value.constant
    if value.kind in ("true", "false"):
        return value.kind == "true"
    return float(str(value.args[0])) if value.kind == "const" else None


def coerce(value: Scalar, kind: str) -> Scalar:
    """A scalar as kind "i", "b" or "f"."""
    return to_int(value) if kind == "i" else to_cond(value) if kind == "b" else to_real(value)


def kind_of(dtype: np.dtype) -> str:
    """The scalar kind of a NumPy type."""
    return "b" if dtype.kind == "b" else "i" if dtype.kind in "iu" else "f"


def constant_scalar(value: object, kind: str) -> Scalar:
    """A Python or NumPy number as a constant scalar."""
    if kind == "b":
        return TRUE if bool(value) else FALSE
    if kind == "i":
        return integer(int(value))  # type: ignore[call-overload]
    return real(float(value))  # type: ignore[arg-type]


def constant_tensor(name: str, array: np.ndarray) -> SymTensor:
    """A constant. Elements at constant indices are numbers, others are reads of the table ``name``."""
    kind = kind_of(array.dtype)
    shape = tuple(integer(n) for n in array.shape)
    uniform = array.size > 0 and bool(np.all(array.reshape(-1)[0] == array))
    limits = lru_cache(maxsize=1)(lambda: _limits(array))
    closed = lru_cache(maxsize=1)(lambda: _closed_form(array))
    distinct = lru_cache(maxsize=1)(lambda: _distinct_values(array, 4 if kind == "f" else 2))

    def function(index: Index) -> Scalar:
        if uniform:
            return constant_scalar(array.reshape(-1)[0], kind)
        fixed = tuple(0 if n == 1 else i.constant for i, n in zip(index, array.shape, strict=True))
        if all(i is not None for i in fixed):
            position = tuple(i for i in fixed if i is not None)
            if all(-n <= i < n for i, n in zip(position, array.shape, strict=True)):
                return constant_scalar(array[position], kind)
        where = tuple(integer(0) if n == 1 else i for i, n in zip(index, array.shape, strict=True))
        if kind == "b":
            return Cond("table", (name, where))
        if (form := closed()) is not None:
            return coerce(form(where), kind)
        if (few := distinct()) is not None:
            return _select_value(name, where, few, kind)
        if kind == "i":
            return of_atom("table", name, where)
        ends = limits()
        return Real("table", (name, where) if ends is None else (name, where, ends))

    return SymTensor(shape, kind, function, array)


def stored_tensor(name: str, shape: Sequence[int], kind: str, read: Callable[[], np.ndarray]) -> SymTensor:
    """A constant of which no copy is kept before an element is asked for: most weights are never looked at.

    Args:
        name: its name.
        shape: its shape.
        kind: the kind of its elements.
        read: gives the array.
    """
    kept = lru_cache(maxsize=1)(lambda: constant_tensor(name, read()))
    return SymTensor(tuple(integer(n) for n in shape), kind, lambda index: kept().function(index), read)


def _limits(array: np.ndarray) -> tuple[float, float] | None:
    """The least and the largest element; None unless all are finite."""
    if not array.size:
        return None
    low, high = float(array.min()), float(array.max())
    return (low, high) if np.isfinite(low) and np.isfinite(high) else None


def _closed_form(array: np.ndarray) -> Callable[[Index], Int] | None:
    """The formula of an array of positions: a * (i // n % m) + c along one axis, or a sum of a * i over several axes."""
    axes = [a for a, n in enumerate(array.shape) if n > 1]
    if array.dtype.kind not in ("iu" if len(axes) > 1 else "iuf") or array.size < _MIN_POSITIONS or not axes:
        return None
    first = array.reshape(-1)[0]
    if array.dtype.kind == "f" and not (np.isfinite(array).all() and (array == np.rint(array)).all()):
        return None
    lines = [np.moveaxis(array, a, 0).reshape(array.shape[a], -1)[:, 0].astype(np.int64) - int(first) for a in axes]
    # Two numbers always lie on a line.
    if len(axes) > 1 and (min(array.shape[a] for a in axes) < 3 or array.size < _MIN_POSITIONS**2):
        return None
    steps = [int(line[1]) for line in lines]
    if len(axes) == 1 and not np.array_equal(lines[0], steps[0] * np.arange(lines[0].size)):
        return _repeating_form(lines[0], int(first), axes[0])
    total = np.full([1] * array.ndim, int(first), np.int64)
    for a, step in zip(axes, steps, strict=True):
        total = total + step * np.arange(array.shape[a]).reshape([-1 if i == a else 1 for i in range(array.ndim)])
    if not np.array_equal(total, array.astype(np.int64)):
        return None

    def function(index: Index) -> Int:
        result = integer(int(first))
        for a, step in zip(axes, steps, strict=True):
            result = result + index[a] * integer(step)
        return result

    return function


def _repeating_form(line: np.ndarray, first: int, axis: int) -> Callable[[Index], Int] | None:
    """The formula a * (i // n % m) of a line that begins with 0: indices of blocks, rows or columns."""
    width = int(np.argmax(line != 0))
    step = int(line[width])
    if not step or line.size < 2 * width:
        return None
    blocks = np.arange(line.size) // width
    period = int(np.argmax(line[width:] == 0)) + width
    count = period // width if line[period] == 0 and period % width == 0 else 0
    if not np.array_equal(line, step * (blocks % count if count else blocks)):
        return None

    def function(index: Index) -> Int:
        block = floor_div(index[axis], width)
        return (floor_mod(block, count) if count else block) * integer(step) + integer(first)

    return function


def _distinct_values(array: np.ndarray, most: int) -> list[float] | None:
    """The distinct values of an array in ascending order; None where there are none or too many, or integers beside 0 and 1."""
    rest, distinct = array.reshape(-1), list[float]()
    while rest.size:
        value = rest[0]
        if len(distinct) == most or value != value or (array.dtype.kind in "iu" and value not in (0, 1)):
            return None
        distinct.append(float(value))
        rest = rest[rest != value]
    return sorted(distinct) or None


def _select_value(name: str, where: Index, values: Sequence[float], kind: str) -> Scalar:
    """An element of a constant with few values, as a selection between them."""
    result: Scalar = integer(int(values[0])) if kind == "i" else real(values[0])
    for value in values[1:]:
        scalar: Scalar = integer(int(value)) if kind == "i" else real(value)
        result = select(Cond("table", (f"{name}{EQUALS}{value!r}", where)), scalar, result)
    return result


def input_tensor(name: str, shape: Shape, kind: str) -> SymTensor:
    """A model input: each element is a read."""

    def function(index: Index) -> Scalar:
        if kind == "b":
            return Cond("read", (name, index))
        return of_atom("read", name, index) if kind == "i" else Real("read", (name, index))

    return SymTensor(shape, kind, function)


def computed_tensor(name: str, shape: Shape, kind: str) -> SymTensor:
    """A tensor that is computed at run time: each element is a read. Integers may have any value, not only 0 and 1."""

    def function(index: Index) -> Scalar:
        if kind == "b":
            return Cond("read", (name, index))
        return of_atom("read", name, index, ANY) if kind == "i" else Real("read", (name, index))

    return SymTensor(shape, kind, function)
