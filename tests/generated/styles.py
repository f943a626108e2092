# SPDX-License-Identifier: Apache-2.0
"""Exporters' styles: how a drawn mask is written as nodes. A style is a choice at each of a few forks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from onnx import TensorProto, numpy_helper

from .builder import Builder, Tensor
from .expr import COMPARISONS, Expr, Mask, Values, band, make, value_of
from .indices import Indices

FLAT: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Style:
    """What is written how.

    ``position``: where q and k come from; ``band``: a condition on q - k; ``logic``: and, or, not; ``low``: k < n; ``fold``:
    what does not read inputs is stored; ``reads``: how inputs and tables are read; ``final``: how the mask becomes a float;
    ``noise``: the share of tensors that are moved about for nothing.
    """

    position: str = "range"
    band: str = "compare"
    logic: str = "bool"
    low: str = "compare"
    fold: str = ""
    reads: str = "plain"
    final: str = "where"
    noise: float = 0.05


STYLES = {
    "index arithmetic": Style(),
    "Trilu": Style(band="trilu"),
    "CumSum of ones": Style(position="cumsum"),
    "NonZero": Style(position="nonzero"),
    "float positions": Style(position="float", logic="arithmetic", final="mul"),
    "ScatterND": Style(low="scatter", band="trilu", final="scatter"),
    "constant": Style(fold="constant"),
    "buffer, sliced": Style(fold="buffer", final="mul"),
    "nested Where": Style(logic="where"),
    "casts and 1 - m": Style(logic="arithmetic", final="mul"),
    "Min, Max, Clip": Style(logic="minmax", band="clip", final="mul"),
    "flat Div and Mod": Style(position="flat"),
    "GatherND": Style(reads="gathernd"),
    "sum of floats": Style(final="sum", band="trilu"),
    "masked_fill": Style(final="masked_fill"),
    "moved about": Style(noise=0.5),
}
PLAIN = "index arithmetic"


class Renderer:
    """Writes one mask. ``inputs`` maps ``pad``, ``segq`` and ``segk`` to tensors [B, length] and their kinds."""

    def __init__(self, builder: Builder, style: Style, mask: Mask, inputs: dict[str, tuple[str, str]]) -> None:
        self.b = builder
        self.style = replace(style, noise=0.0) if builder.plain else style
        self.mask = mask
        self.inputs = inputs
        self.indices = Indices(builder, self.style, mask, inputs)

    # ---- conditions ----

    def allowed(self) -> Tensor:
        """The mask as a bool tensor."""
        return self.truth(self.condition(self.mask.expr))

    def truth(self, t: Tensor) -> Tensor:
        """A 0/1 tensor as bool."""
        if t.kind == "b":
            return t
        way = self.b.choice(["cast", "greater", "equal", "unequal"])
        zero, one = self.b.scalar(0, t.kind), self.b.scalar(1, t.kind)
        if way == "greater":
            return self.b.join("Greater", "b", t, zero)
        if way == "equal":
            return self.b.join("Equal", "b", t, one)
        if way == "unequal":
            return self.b.join("Not", "b", self.b.join("Equal", "b", t, zero))
        return self.b.cast(t, "b")

    def condition(self, e: Expr) -> Tensor:
        """A condition as a tensor of 0/1 of any kind."""
        return self.b.noise(self._condition(e), self.style.noise)

    def _condition(self, e: Expr) -> Tensor:
        folded = self._folded(e)
        if folded is not None:
            return folded
        if e.kind in ("and", "or"):
            return self._junction(e)
        if e.kind == "not":
            return self._not(self.condition(e.args[0]))
        if e.kind in COMPARISONS:
            return self._comparison(e)
        return self.indices.read(e)

    def _folded(self, e: Expr) -> Tensor | None:
        """A stored array, where the condition reads no input."""
        b, way = self.b, self.style.fold
        if not way or e.reads_input or not e.axes & {"q", "k"}:
            return None
        H, S, T, P = (b.sizes[x] for x in "HSTP")
        assert isinstance(H, int)
        heads = H if "h" in e.axes else 1
        if way == "constant" and isinstance(S, int) and isinstance(T, int) and isinstance(P, int):
            array = self._stored(e, heads, S, T, P)
            name, axes = "", frozenset(a for a in "hqk" if array.shape["hqk".index(a) - 3] != 1 or a in "qk")
            array = array if heads > 1 else array[0]
            kind = b.choice(["b", "b", "i", "f"])
            name = b.constant(array, {"b": np.bool_, "i": np.int64, "f": np.float32}[kind])
            return Tensor(name, kind, array.ndim, axes)
        if way == "buffer" and not self.mask.length:
            longest = self.mask.longest
            array = self._stored(e, heads, longest, longest, 0)
            lead = b.choice([0, 1]) if heads > 1 else b.choice([2, 0])  # often [1, 1, L, L], as GPT-2 keeps it
            array = (
                array[None]
                if heads > 1 and lead
                else array
                if heads > 1
                else array.reshape((1,) * lead + array.shape[1:])
            )
            name = b.constant(array, np.bool_)
            end = b.op("Add", b.dim("P"), b.dim("S")) if P != 0 else b.dim("S")
            rank = array.ndim
            name = b.op("Slice", name, b.dim("P") if P != 0 else b.constant([0]), end, b.constant([rank - 2]))
            name = b.op("Slice", name, b.constant([0]), b.dim("T"), b.constant([rank - 1]))
            return Tensor(name, "b", rank, frozenset("hqk" if heads > 1 else "qk"))
        return None

    def _stored(self, e: Expr, heads: int, S: int, T: int, P: int) -> np.ndarray:
        found = value_of(e, self.mask.tables, Values(1, heads, S, T, P))
        return np.ascontiguousarray(np.broadcast_to(found, (heads, S, T)))

    def _junction(self, e: Expr) -> Tensor:
        parts = list(e.args)
        if self.style.low == "scatter" and e.kind == "or":
            plain = [p for p in parts if not self.indices.can_assign(p)]
            if plain and len(plain) < len(parts):
                result = self.condition(make("or", *plain) if len(plain) > 1 else plain[0])
                for part in parts:
                    if self.indices.can_assign(part):
                        result = self.indices.assign(part, result)
                return result
        tensors = [self.condition(p) for p in parts]
        result = tensors[0]
        for other in tensors[1:]:
            result = self._and(result, other) if e.kind == "and" else self._or(result, other)
        return result

    def _pair(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Both as integers or floats."""
        kind = x.kind if x.kind != "b" else y.kind if y.kind != "b" else self.b.choice(["i", "f"])
        return self.b.cast(x, kind), self.b.cast(y, kind)

    def _and(self, x: Tensor, y: Tensor) -> Tensor:
        b = self.b
        match self.style.logic:
            case "where":
                value = b.cast(y, "i" if y.kind == "b" else y.kind)
                return b.join("Where", value.kind, self.truth(x), value, b.scalar(0, value.kind))
            case "arithmetic":
                return self._arithmetic("Mul", x, y)
            case "minmax":
                return self._arithmetic("Min", x, y)
        x, y = self.truth(x), self.truth(y)
        if b.chance(0.1):
            return b.join("Not", "b", b.join("Or", "b", b.join("Not", "b", x), b.join("Not", "b", y)))
        return b.join("And", "b", x, y)

    def _arithmetic(self, op: str, x: Tensor, y: Tensor) -> Tensor:
        x, y = self._pair(x, y)
        return self.b.join(op, x.kind, x, y)

    def _or(self, x: Tensor, y: Tensor) -> Tensor:
        b = self.b
        match self.style.logic:
            case "where":
                value = b.cast(y, "i" if y.kind == "b" else y.kind)
                return b.join("Where", value.kind, self.truth(x), b.scalar(1, value.kind), value)
            case "arithmetic":
                total = self._arithmetic("Add", x, y)
                zero = b.scalar(0, total.kind)
                way = b.choice(["greater", "clip", "product"])
                if way == "greater":
                    return b.join("Greater", "b", total, zero)
                if way == "clip":
                    low, high = Tensor(b.constant(0, _dtype(total)), total.kind, 0, FLAT), b.constant(1, _dtype(total))
                    return b.join("Clip", total.kind, total, low, Tensor(high, total.kind, 0, FLAT))
                return b.join("Sub", total.kind, total, self._arithmetic("Mul", *self._pair_like(x, y, total.kind)))
            case "minmax":
                return self._arithmetic("Max", x, y)
        return b.join("Or", "b", self.truth(x), self.truth(y))

    def _pair_like(self, x: Tensor, y: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        return self.b.cast(x, kind), self.b.cast(y, kind)

    def _not(self, x: Tensor) -> Tensor:
        b = self.b
        match self.style.logic:
            case "where":
                return b.join("Where", "i", self.truth(x), b.scalar(0, "i"), b.scalar(1, "i"))
            case "arithmetic" | "minmax":
                value = b.cast(x, "i" if x.kind == "b" else x.kind)
                return b.join("Sub", value.kind, b.scalar(1, value.kind), value)
        x = self.truth(x)
        if b.chance(0.15):
            return b.join("Equal", "b", b.cast(x, "i"), b.scalar(0, "i"))
        if b.chance(0.1):
            return b.join("Xor", "b", x, b.scalar(1, "b"))
        return b.join("Not", "b", x)

    # ---- comparisons ----

    def _comparison(self, e: Expr) -> Tensor:
        if self.style.low == "scatter" and self.indices.can_assign(e):
            return self.indices.assign(e, None)
        ends = band(e)
        if ends is not None and self.style.band == "trilu":
            return self.indices.triangle(*ends)
        if ends is not None and self.style.band == "clip":
            return self._clip(*ends)
        x, y = (self.indices.integer(a) for a in e.args)
        if "f" in (x.kind, y.kind):
            x, y = self.b.cast(x, "f"), self.b.cast(y, "f")
        return self._compare(e.kind, x, y)

    def _compare(self, kind: str, x: Tensor, y: Tensor) -> Tensor:
        b = self.b
        if kind in ("eq", "ne"):
            if b.chance(0.15):
                x, y = b.join("Sub", x.kind, x, y), b.scalar(0, x.kind)
            same = b.join("Equal", "b", x, y)
            return same if kind == "eq" else b.join("Not", "b", same)
        if kind in ("ge", "gt"):
            x, y, kind = y, x, {"ge": "le", "gt": "lt"}[kind]
        way = b.choice(["plain", "plain", "swapped", "negated", "moved", "zero"])
        direct, other, strict = (
            ("LessOrEqual", "GreaterOrEqual", "Greater") if kind == "le" else ("Less", "Greater", "GreaterOrEqual")
        )
        if way == "swapped":
            return b.join(other, "b", y, x)
        if way == "negated":
            return b.join("Not", "b", b.join(strict, "b", x, y))
        if way == "moved":  # x <= y is x < y + 1, x < y is x <= y - 1
            step, other_op = ("Add", "Less") if kind == "le" else ("Sub", "LessOrEqual")
            return b.join(other_op, "b", x, b.join(step, y.kind, y, b.scalar(1, y.kind)))
        if way == "zero":
            return b.join(direct, "b", b.join("Sub", x.kind, x, y), b.scalar(0, x.kind))
        return b.join(direct, "b", x, y)

    def _clip(self, low: int | None, high: int | None) -> Tensor:
        """Low <= q - k <= high by Min and Max."""
        b = self.b
        d = self.indices.integer(make("sub", Expr("q"), Expr("k")))
        if low is not None and high is not None:
            if b.chance(0.5):
                inside = b.join(
                    "Clip", d.kind, d, *(Tensor(b.constant(n, _dtype(d)), d.kind, 0, FLAT) for n in (low, high))
                )
                return b.join("Equal", "b", inside, d)
            below = b.join("Sub", d.kind, b.scalar(low, d.kind), d)
            above = b.join("Sub", d.kind, d, b.scalar(high, d.kind))
            return b.join("LessOrEqual", "b", b.join("Max", d.kind, below, above), b.scalar(0, d.kind))
        limit, op = (low, "Max") if low is not None else (high, "Min")
        assert limit is not None
        return b.join("Equal", "b", b.join(op, d.kind, d, b.scalar(limit, d.kind)), d)

    # ---- floats ----

    def additive(self, fill: float) -> list[Tensor]:
        """The mask as fp32 tensors that are to be added to the scores: 0 or ``fill``."""
        e = self.mask.expr
        if self.style.final == "sum" and e.kind == "and":
            parts = [self._float(self._additive_part(p, fill), p, fill) for p in e.args]
            if self.b.chance(0.5):
                return parts
            total = parts[0]
            for part in parts[1:]:
                total = self.b.join("Add", "f", total, part)
            return [total]
        if self.style.final == "masked_fill" and e.kind == "and" and any(p.kind == "padk" for p in e.args):
            return [self._masked_fill(e, fill)]
        return [self._float(self._additive_part(e, fill), e, fill)]

    def _additive_part(self, e: Expr, fill: float) -> Tensor:
        ends = band(e)
        if self.style.band == "trilu" and ends is not None and ends[0] is not None and ends[1] is None:
            return self.indices.filled_triangle(ends[0], fill)
        return self.condition(e)

    def _float(self, t: Tensor, e: Expr, fill: float) -> Tensor:
        b = self.b
        if t.kind == "fill":
            return replace(t, kind="f")
        way = self.style.final if self.style.final in ("mul", "scatter") else "where"
        if b.chance(0.25):
            way = b.rng.choice(["where", "mul", "log", "not"])
        if way == "mul" and not np.isinf(fill):
            if b.chance(0.5):
                off = b.cast(b.join("Not", "b", self.truth(t)), "f")
            else:
                off = b.join("Sub", "f", b.scalar(1, "f"), b.cast(t, "f"))
            return b.noise(b.join("Mul", "f", off, b.scalar(fill, "f")), self.style.noise)
        if way == "log" and np.isinf(fill):
            return b.join("Log", "f", b.cast(self.truth(t), "f"))
        nothing, full = b.scalar(0, "f"), b.scalar(fill, "f")
        if b.chance(0.2) and t.rank:
            shape = b.shape(b.letters(t))
            value = numpy_helper.from_array(np.zeros(1, np.float32))
            nothing = Tensor(b.op("ConstantOfShape", shape, value=value), "f", t.rank, t.axes)
        if way == "not":
            return b.join("Where", "f", b.join("Not", "b", self.truth(t)), full, nothing)
        return b.noise(b.join("Where", "f", self.truth(t), nothing, full), self.style.noise)

    def _masked_fill(self, e: Expr, fill: float) -> Tensor:
        """What transformers 4 writes: the padding is merged into a float mask where mask + padding is 0."""
        b = self.b
        rest = [p for p in e.args if p.kind != "padk"]
        static = self._float(self._additive_part(make("and", *rest) if len(rest) > 1 else rest[0], fill), e, fill)
        static = b.lift_rank(static, 4)
        whole = Tensor("", "f", 4, static.axes | {"b", "q", "k"})
        spread = replace(whole, name=b.op("Expand", static.name, b.shape(b.letters(whole))))
        pad = b.cast(self.truth(self.indices.read(Expr("padk"))), "f")
        open_ = b.join("Equal", "b", b.join("Add", "f", spread, pad), b.scalar(0, "f"))
        filled = b.join("Where", "f", open_, b.scalar(fill, "f"), spread)
        if b.chance(0.5):
            return replace(whole, name=self.indices.write_back(spread, filled))
        return filled


def _dtype(t: Tensor) -> type:
    return np.int64 if t.kind == "i" else np.float32


__all__ = ["PLAIN", "STYLES", "Renderer", "Style", "TensorProto"]
