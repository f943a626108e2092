# SPDX-License-Identifier: Apache-2.0
"""Positions, look-ups, triangles and assignments: the leaves of a rendered mask."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto, numpy_helper

from .builder import Builder, Tensor
from .expr import Expr, Mask

if TYPE_CHECKING:
    from .styles import Style


class Indices:
    """Writes the leaves of one mask. ``inputs``: see :class:`stof.tests.generated.styles.Renderer`."""

    def __init__(self, builder: Builder, style: Style, mask: Mask, inputs: dict[str, tuple[str, str]]) -> None:
        self.b = builder
        self.style = style
        self.mask = mask
        self.inputs = inputs
        self.known: dict[str, Tensor] = {}

    # ---- integers ----

    def integer(self, e: Expr) -> Tensor:
        """An integer expression as int64, or as floats that hold integers."""
        b = self.b
        match e.kind:
            case "num":
                return b.scalar(e.args[0], "i")
            case "q" | "k" | "h":
                return b.noise(self.position(e.kind), self.style.noise)
            case "T":
                return Tensor(b.size("T"), "i", 0, frozenset())
            case "itable" | "segq" | "segk":
                return self.read(e)
            case "len":
                name = b.op("Unsqueeze", self.inputs["len"][0], b.constant([1, 2, 3]))
                return Tensor(name, "i", 4, frozenset("b"))
        args = [self.integer(a) for a in e.args if isinstance(a, Expr)]
        kind = "f" if any(a.kind == "f" for a in args) else "i"
        if e.kind in ("mod", "div"):
            return self._divide(e.kind, args[0], e.args[1].args[0])
        args = [b.cast(a, kind) for a in args]
        op = {"add": "Add", "sub": "Sub", "mul": "Mul", "abs": "Abs", "min": "Min", "max": "Max"}[e.kind]
        if op == "Sub" and b.chance(0.1):
            return b.join("Add", kind, args[0], b.join("Neg", kind, args[1]))
        if op == "Abs" and b.chance(0.1):
            return b.join("Max", kind, args[0], b.join("Neg", kind, args[0]))
        return b.join(op, kind, *args)

    def _divide(self, op: str, x: Tensor, divisor: int) -> Tensor:
        b = self.b
        if x.kind == "f":
            if not b.chance(0.5):
                x = b.cast(x, "i")
            else:
                n = b.scalar(divisor, "f")
                floor = b.join("Floor", "f", b.join("Div", "f", x, n))
                return floor if op == "div" else b.join("Sub", "f", x, b.join("Mul", "f", floor, n))
        n = b.scalar(divisor, "i")
        if op == "div":
            return b.join("Div", "i", x, n)
        return b.join("Mod", "i", x, n)

    def position(self, axis: str) -> Tensor:
        """The absolute index of an axis as [S, 1], [T], or [H, 1, 1]; made once or again."""
        if axis in self.known and not self.b.chance(0.3):
            return self.known[axis]
        rank, letter = {"b": (4, "B"), "h": (3, "H"), "q": (2, "S"), "k": (1, "T")}[axis]
        found = self._flat(axis) if self.style.position == "flat" and axis in "qk" else None
        if found is None:
            vector = self._counted(letter)
            if axis == "q" and self.b.sizes["P"] != 0:
                vector = self._shifted(vector)
            found = self._turned(vector, rank, axis)
        if axis in "qk" and self.style.position == "float":
            found = self.b.cast(found, "f")
        self.known[axis] = found
        return found

    def _turned(self, vector: str, rank: int, axis: str) -> Tensor:
        """A vector along its axis."""
        b = self.b
        after = rank - 1
        before = b.choice([0, 0, 4 - rank]) if self.style.reads != "gathernd" else 4 - rank
        if after + before == 0:
            return Tensor(vector, "i", 1, frozenset(axis))
        if b.chance(0.2):
            shape = [1] * before + [-1] + [1] * after
            name = b.op("Reshape", vector, b.constant(shape))
        else:
            axes = [*range(before), *range(before + 1, before + 1 + after)]
            name = b.op("Unsqueeze", vector, b.constant(axes))
        return Tensor(name, "i", before + rank, frozenset(axis))

    def _counted(self, letter: str) -> str:
        """0, 1, 2, ... as an int64 vector."""
        b, way = self.b, self.style.position
        ones = numpy_helper.from_array(np.ones(1, np.int64))
        if way == "cumsum":
            shape = b.dim(letter)
            if b.chance(0.5):
                full = b.op("Expand", b.constant(1), shape)
            else:
                full = b.op("ConstantOfShape", shape, value=ones)
            if b.chance(0.3):
                return b.op("CumSum", full, b.constant(0), exclusive=1)
            return b.op("Sub", b.op("CumSum", full, b.constant(0)), b.constant(1))
        if way == "nonzero":
            found = b.op("NonZero", b.op("ConstantOfShape", b.dim(letter), value=ones))
            if b.chance(0.5):
                return b.op("Squeeze", found, b.constant([0]))
            return b.op("Reshape", b.op("Transpose", found, perm=[1, 0]), b.constant([-1]))
        if self.style.fold == "buffer" and b.chance(0.7) and not self.mask.length:
            arange = b.constant(np.arange(self.mask.longest))
            return b.op("Slice", arange, b.constant([0]), b.dim(letter), b.constant([0]))
        known = b.sizes[letter]
        if self.style.fold == "constant" and isinstance(known, int):
            return b.constant(np.arange(known))
        if way == "float" and b.chance(0.3):
            limit = b.op("Cast", b.size(letter), to=TensorProto.FLOAT)
            floats = b.op("Range", b.constant(0, np.float32), limit, b.constant(1, np.float32))
            return b.op("Cast", floats, to=TensorProto.INT64)
        return b.op("Range", b.constant(0), b.size(letter), b.constant(1))

    def _shifted(self, vector: str) -> str:
        """Plus the past length."""
        b = self.b
        if b.chance(0.4) and self.style.position == "range":
            past = b.size("P")
            return b.op("Range", past, b.op("Add", past, b.size("S")), b.constant(1))
        return b.op("Add", vector, b.size("P"))

    def _flat(self, axis: str) -> Tensor:
        """[S, T] from one Range over all pairs, by Div and Mod."""
        b = self.b
        T = b.size("T")
        flat = b.op("Range", b.constant(0), b.op("Mul", b.size("S"), T), b.constant(1))
        values = b.op("Div" if axis == "q" else "Mod", flat, T)
        if axis == "q" and b.sizes["P"] != 0:
            values = b.op("Add", values, b.size("P"))
        return Tensor(b.op("Reshape", values, b.shape(["S", "T"])), "i", 2, frozenset("qk"))

    # ---- reads of inputs and tables ----

    def read(self, e: Expr) -> Tensor:
        """Padding, segment ids, or a table."""
        if e.kind in ("btable", "itable"):
            return self._table(e)
        b, axis = self.b, e.kind[3]
        role = "pad" if e.kind.startswith("pad") else e.kind
        tensor, kind = self.inputs[role]
        if e.kind == "padq" and b.sizes["P"] != 0:
            start = b.dim("P")
            tensor = b.op("Slice", tensor, start, b.op("Add", start, b.dim("S")), b.constant([1]))
        if role == "pad" and kind != "b" and b.chance(0.5):
            tensor, kind = b.op("Cast", tensor, to=TensorProto.BOOL), "b"
        if self.style.reads == "gathernd" and axis == "k":
            return self._gathered(tensor, kind)
        place = [1, 2] if axis == "k" else [1, 3]
        found = Tensor(b.op("Unsqueeze", tensor, b.constant(place)), kind, 4, frozenset({"b", axis}))
        if b.chance(0.2):
            whole = replace(found, axes=frozenset({"b", "q", "k"}))
            found = replace(whole, name=b.op("Expand", found.name, b.shape(b.letters(whole))))
        return found

    def _gathered(self, tensor: str, kind: str) -> Tensor:
        """vector[b, k] by an index tensor [B, 1, 1 or S, T, 2]."""
        b = self.b
        rows, columns = self.position("b"), b.cast(self.position("k"), "i")
        axes = frozenset({"b", "k"} | ({"q"} if b.chance(0.5) else set()))
        grid = self.grid([rows, columns], Tensor("", "i", 4, axes))
        return Tensor(b.op("GatherND", tensor, grid), kind, 4, axes)

    def grid(self, indices: list[Tensor], like: Tensor) -> str:
        """Index tensors, expanded to one shape and stacked along a new last axis."""
        b = self.b
        shape = b.shape(b.letters(like))
        parts = []
        for index in indices:
            spread = b.op("Expand", index.name, shape)
            parts.append(b.op("Unsqueeze", spread, b.constant([like.rank])))
        return b.op("Concat", *parts, axis=-1)

    def _table(self, e: Expr) -> Tensor:
        b = self.b
        name, *places = e.args
        array = self.mask.tables[name]
        kind = "b" if e.kind == "btable" else "i"
        direct = [p.kind for p in places] == ["q", "k"] and self.mask.length
        if direct and b.sizes["P"] == 0 and b.chance(0.6):
            return Tensor(b.constant(array, array.dtype), kind, 2, frozenset("qk"))
        if [p.kind for p in places] == ["h", "q", "k"] and self.mask.length and b.chance(0.6):
            return Tensor(b.constant(array, array.dtype), kind, 3, frozenset("hqk"))
        if len(places) == 2 and all(p.kind == "div" for p in places) and b.chance(0.3) and not self.mask.length:
            return self._enlarged(array, places[0].args[1].args[0])
        indices = [b.cast(self.integer(p), "i") for p in places]
        table = b.constant(array, array.dtype)
        if len(indices) == 1:
            t = indices[0]
            return Tensor(b.op("Gather", table, t.name, axis=0), kind, t.rank, t.axes)
        vectors = [i.axes for i in indices] == [{"q"}, {"k"}]
        if vectors and b.chance(0.4):
            flat = [b.op("Reshape", i.name, b.constant([-1])) for i in indices]
            rows = b.op("Gather", table, flat[0], axis=0)
            return Tensor(b.op("Gather", rows, flat[1], axis=1), kind, 2, frozenset("qk"))
        rank = max(i.rank for i in indices)
        axes = frozenset(a for i in indices for a in i.axes)
        if b.chance(0.5):
            flat_index = indices[0]
            for i, n in zip(indices[1:], array.shape[1:], strict=True):
                flat_index = b.join("Add", "i", b.join("Mul", "i", flat_index, b.scalar(n, "i")), i)
            vector = b.op("Reshape", table, b.constant([-1]))
            return Tensor(b.op("Gather", vector, flat_index.name), kind, flat_index.rank, flat_index.axes)
        return Tensor(b.op("GatherND", table, self.grid(indices, Tensor("", "i", rank, axes))), kind, rank, axes)

    def _enlarged(self, array: np.ndarray, block: int) -> Tensor:
        """A block table, repeated to elements and cut to [S, T]."""
        b = self.b
        rows, columns = array.shape
        table = b.op("Unsqueeze", b.constant(array, array.dtype), b.constant([1, 3]))
        table = b.op("Expand", table, b.constant([rows, block, columns, block]))
        table = b.op("Reshape", table, b.constant([rows * block, columns * block]))
        start = b.dim("P")
        table = b.op("Slice", table, start, b.op("Add", start, b.dim("S")), b.constant([0]))
        table = b.op("Slice", table, b.constant([0]), b.dim("T"), b.constant([1]))
        return Tensor(table, "b", 2, frozenset("qk"))

    # ---- triangles ----

    def triangle(self, low: int | None, high: int | None) -> Tensor:
        """Low <= q - k <= high by Trilu of ones; rows are q - P."""
        b = self.b
        if low == high == 0 and b.sizes["P"] == 0 and b.chance(0.5):
            eye = b.op("EyeLike", b.op("ConstantOfShape", b.shape(["S", "T"])), dtype=TensorProto.FLOAT)
            return Tensor(eye, "f", 2, frozenset("qk"))
        kind = b.choice(["b", "f", "i"])
        dtype = {"b": np.bool_, "f": np.float32, "i": np.int64}[kind]
        if b.chance(0.5):
            matrix = b.op("Expand", b.constant(np.ones([1, 1]), dtype), b.shape(["S", "T"]))
        else:
            value = numpy_helper.from_array(np.ones(1, dtype))
            matrix = b.op("ConstantOfShape", b.shape(["S", "T"]), value=value)
        if high is not None:  # k >= q - high
            matrix = b.op("Trilu", matrix, self._diagonal(-high), upper=1)
        if low is not None:  # k <= q - low
            matrix = b.op("Trilu", matrix, self._diagonal(-low), upper=0)
        return Tensor(matrix, kind, 2, frozenset("qk"))

    def filled_triangle(self, low: int, fill: float) -> Tensor:
        """0 where q - k >= low, else ``fill``: torch.triu(torch.full(..))."""
        b = self.b
        value = numpy_helper.from_array(np.full(1, fill, np.float32))
        full = b.op("ConstantOfShape", b.shape(["S", "T"]), value=value)
        return Tensor(b.op("Trilu", full, self._diagonal(1 - low), upper=1), "fill", 2, frozenset("qk"))

    def _diagonal(self, k: int) -> str:
        """The offset of a diagonal in rows q - P."""
        b = self.b
        if b.sizes["P"] == 0:
            return b.constant(k)
        return b.op("Add", b.size("P"), b.constant(k))

    # ---- assignments ----

    def can_assign(self, e: Expr) -> bool:
        """Whether a condition is k < n, or q < n without a past."""
        if e.kind != "lt" or e.args[1].kind != "num":
            return False
        return e.args[0].kind == "k" or (e.args[0].kind == "q" and self.b.sizes["P"] == 0)

    def assign(self, e: Expr, base: Tensor | None) -> Tensor:
        """``base`` with ones where the condition holds, written by ScatterND."""
        b = self.b
        if base is None:
            zeros = b.op("ConstantOfShape", b.shape(["S", "T"]), value=numpy_helper.from_array(np.zeros(1, np.int64)))
            base = Tensor(zeros, "i", 2, frozenset("qk"))
        base = b.cast(base, "i" if base.kind == "b" else base.kind)
        if base.rank != 2 or base.axes != {"q", "k"}:
            wide = replace(base, axes=base.axes | {"q", "k"}, rank=max(2, base.rank))
            base = replace(wide, name=b.op("Expand", base.name, b.shape(b.letters(wide))))
        axis = e.args[0].kind
        letter = "T" if axis == "k" else "S"
        limit = b.op("Min", b.constant(e.args[1].args[0]), b.size(letter))
        chosen = b.op("Range", b.constant(0), limit, b.constant(1))
        one = b.constant(1, np.int64 if base.kind == "i" else np.float32)
        lead = base.rank - 2
        if base.rank == 2 and (axis == "q" or b.chance(0.5)):
            other = "T" if axis == "q" else "S"
            data = base.name if axis == "q" else b.op("Transpose", base.name, perm=[1, 0])
            count = b.op("Unsqueeze", limit, b.constant([0]))
            updates = b.op("Expand", one, b.op("Concat", count, b.dim(other), axis=0))
            data = b.op("ScatterND", data, b.op("Unsqueeze", chosen, b.constant([1])), updates)
            return replace(base, name=data if axis == "q" else b.op("Transpose", data, perm=[1, 0]))
        ranges = [b.op("Range", b.constant(0), self._limit(x), b.constant(1)) for x in b.letters(base)]
        ranges[-1 if axis == "k" else -2] = chosen
        rank = lead + 2
        places = [b.op("Unsqueeze", r, b.constant([j for j in range(rank) if j != i])) for i, r in enumerate(ranges)]
        shape = b.op("Shape", self._sum(places))
        parts = [b.op("Unsqueeze", b.op("Expand", p, shape), b.constant([rank])) for p in places]
        updates = b.op("Expand", one, shape)
        return replace(base, name=b.op("ScatterND", base.name, b.op("Concat", *parts, axis=-1), updates))

    def _limit(self, letter: str) -> str:
        return self.b.constant(1) if letter == "1" else self.b.size(letter)

    def _sum(self, tensors: list[str]) -> str:
        total = tensors[0]
        for t in tensors[1:]:
            total = self.b.op("Add", total, t)
        return total

    def write_back(self, data: Tensor, updates: Tensor) -> str:
        """data[:, :, :, :T] = updates, as the TorchScript exporter writes it."""
        b = self.b
        ranges = [b.op("Range", b.constant(0), self._limit(x), b.constant(1)) for x in b.letters(data)]
        places = [b.op("Unsqueeze", r, b.constant([j for j in range(4) if j != i])) for i, r in enumerate(ranges)]
        shape = b.op("Shape", self._sum(places))
        parts = [b.op("Unsqueeze", b.op("Expand", p, shape), b.constant([4])) for p in places]
        return b.op("ScatterND", data.name, b.op("Concat", *parts, axis=-1), b.op("Expand", updates.name, shape))
