# SPDX-License-Identifier: Apache-2.0
"""The drawn masks: expressions over (b, h, q, k) with an evaluator of their own, which shares nothing with stof's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Expr:
    """A node: ``kind`` and its arguments, which are nodes, integers or names.

    Integers: ``num`` (n), ``q`` (absolute), ``k``, ``h``, ``T``, ``add``, ``sub``, ``mul``, ``abs``, ``mod``, ``div`` (by a
    positive number, floor), ``min``, ``max``, ``itable`` (name, index), ``segq``, ``segk`` (of b and q or k), ``len`` (of b).
    Booleans: ``le``, ``lt``, ``ge``, ``gt``, ``eq``, ``ne``, ``and``, ``or`` (two or more), ``not``, ``padk``, ``padq``,
    ``btable`` (name, indices ...).
    """

    kind: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        text = [str(a) for a in self.args]
        match self.kind:
            case "num":
                return text[0]
            case "q" | "k" | "h" | "T":
                return self.kind
            case "padk" | "padq" | "segk" | "segq":
                return f"{self.kind[:3]}[b, {self.kind[3]}]"
            case "len":
                return "lengths[b]"
            case "itable" | "btable":
                return f"{text[0]}[{', '.join(text[1:])}]"
            case "not":
                return f"not ({text[0]})"
            case "abs" | "min" | "max":
                return f"{self.kind}({', '.join(text)})"
        symbol = _SYMBOLS[self.kind]
        return f" {symbol} ".join(f"({t})" if len(a.args) > 1 else t for a, t in zip(self.args, text, strict=True))

    @property
    def boolean(self) -> bool:
        """Whether it is a condition."""
        return self.kind in _BOOLEAN

    def walk(self) -> Iterator[Expr]:
        """This node and all below it."""
        yield self
        for arg in self.args:
            if isinstance(arg, Expr):
                yield from arg.walk()

    @property
    def reads_input(self) -> bool:
        """Whether it depends on a model input."""
        return any(e.kind in ("padk", "padq", "segk", "segq", "len") for e in self.walk())

    @property
    def axes(self) -> frozenset[str]:
        """The axes of [b, h, q, k] along which it may vary."""
        if self.kind in ("q", "k", "h"):
            return frozenset(self.kind)
        if self.kind in ("padk", "segk", "padq", "segq"):
            return frozenset({"b", self.kind[3]})
        if self.kind == "len":
            return frozenset("b")
        return frozenset(a for arg in self.args if isinstance(arg, Expr) for a in arg.axes)


_SYMBOLS = {
    **{"add": "+", "sub": "-", "mul": "*", "mod": "%", "div": "//"},
    **{"le": "<=", "lt": "<", "ge": ">=", "gt": ">", "eq": "==", "ne": "!=", "and": "and", "or": "or"},
}
_BOOLEAN = frozenset({"le", "lt", "ge", "gt", "eq", "ne", "and", "or", "not", "padk", "padq", "btable"})
COMPARISONS = ("le", "lt", "ge", "gt", "eq", "ne")


def num(value: int) -> Expr:
    """A constant."""
    return Expr("num", (value,))


def make(kind: str, *args: Expr | int | str) -> Expr:
    """A node; plain integers become constants."""
    return Expr(kind, tuple(num(a) if isinstance(a, int) else a for a in args))


Q, K, H, T = Expr("q"), Expr("k"), Expr("h"), Expr("T")
PADK, PADQ = Expr("padk"), Expr("padq")


@dataclass(frozen=True)
class Mask:
    """A drawn mask and the constants that it looks up."""

    expr: Expr
    tables: Mapping[str, np.ndarray] = field(default_factory=dict)
    length: int = 0  # S and T at which it is defined; 0 for any up to ``longest``
    longest: int = 64


@dataclass(frozen=True)
class Values:
    """Sizes and inputs at which a mask is evaluated; ``pad`` and segments are [B, T] and [B, S]."""

    B: int
    H: int
    S: int
    T: int
    P: int
    pad: np.ndarray | None = None
    segq: np.ndarray | None = None
    segk: np.ndarray | None = None
    lengths: np.ndarray | None = None


_INTEGER = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum}
_COMPARE = {
    "le": np.less_equal,
    "lt": np.less,
    "ge": np.greater_equal,
    "gt": np.greater,
    "eq": np.equal,
    "ne": np.not_equal,
}


def evaluate(mask: Mask, values: Values) -> np.ndarray:
    """The mask as booleans [B, H, S, T]."""
    shape = (values.B, values.H, values.S, values.T)
    return np.broadcast_to(value_of(mask.expr, mask.tables, values), shape)


def value_of(e: Expr, tables: Mapping[str, np.ndarray], v: Values) -> np.ndarray:
    """What broadcasts to [B, H, S, T]."""
    match e.kind:
        case "num":
            return np.int64(e.args[0])  # type: ignore[return-value]
        case "q":
            return (np.arange(v.S, dtype=np.int64) + v.P)[:, None]
        case "k":
            return np.arange(v.T, dtype=np.int64)[None, :]
        case "h":
            return np.arange(v.H, dtype=np.int64)[:, None, None]
        case "T":
            return np.int64(v.T)  # type: ignore[return-value]
        case "padk":
            assert v.pad is not None
            return v.pad[:, None, None, :] != 0
        case "padq":
            assert v.pad is not None
            return v.pad[:, None, v.P : v.P + v.S, None] != 0
        case "segq":
            assert v.segq is not None
            return v.segq[:, None, :, None]
        case "segk":
            assert v.segk is not None
            return v.segk[:, None, None, :]
        case "len":
            assert v.lengths is not None
            return v.lengths[:, None, None, None]
    args = [value_of(a, tables, v) for a in e.args if isinstance(a, Expr)]
    match e.kind:
        case "abs":
            return np.abs(args[0])
        case "mod":
            return args[0] % args[1]
        case "div":
            return args[0] // args[1]
        case "itable" | "btable":
            return tables[e.args[0]][tuple(np.broadcast_arrays(*args))]
        case "not":
            return ~args[0]
        case "and" | "or":
            join = np.logical_and if e.kind == "and" else np.logical_or
            result = args[0]
            for arg in args[1:]:
                result = join(result, arg)
            return result
    function = _INTEGER.get(e.kind) or _COMPARE[e.kind]
    found: np.ndarray = function(*args)
    return found


def band(e: Expr) -> tuple[int | None, int | None] | None:
    """(low, high) when a comparison says low <= q - k <= high, None for an open end; None when it says something else."""
    if e.kind not in ("le", "lt", "ge", "gt", "eq"):
        return None
    left, right = e.args
    kind = e.kind
    if kind in ("ge", "gt"):
        left, right, kind = right, left, {"ge": "le", "gt": "lt"}[kind]
    less = 1 if kind == "lt" else 0
    if (
        left.kind == "abs"
        and right.kind == "num"
        and kind != "eq"
        and _linear(left.args[0]) in ((1, -1, 0), (-1, 1, 0))
    ):
        width = right.args[0] - less
        return (-width, width) if width >= 0 else None
    sides = _linear(left), _linear(right)
    if sides[0] is None or sides[1] is None:
        return None
    q, k, c = (a - b for a, b in zip(sides[0], sides[1], strict=True))
    c += less
    if (q, k) == (1, -1):  # q - k <= -c
        return (-c, -c) if kind == "eq" else (None, -c)
    if (q, k) == (-1, 1):
        return (c, c) if kind == "eq" else (c, None)
    return None


def _linear(e: Expr) -> tuple[int, int, int] | None:
    match e.kind:
        case "num":
            return (0, 0, e.args[0])
        case "q":
            return (1, 0, 0)
        case "k":
            return (0, 1, 0)
        case "add" | "sub":
            left, right = (_linear(a) for a in e.args)
            if left is None or right is None:
                return None
            sign = 1 if e.kind == "add" else -1
            return (left[0] + sign * right[0], left[1] + sign * right[1], left[2] + sign * right[2])
    return None
