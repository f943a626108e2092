# SPDX-License-Identifier: Apache-2.0
"""The inputs of a generated model, and its query, key and value in the layouts of the forms."""

from __future__ import annotations

import random

from onnx import TensorProto

from .builder import Builder
from .expr import Mask
from .forms import Form
from .styles import Style

FP32, FP16 = TensorProto.FLOAT, TensorProto.FLOAT16
D = 4  # head size


class Operands:
    """Collects inputs and outputs of one model."""

    def __init__(
        self, rng: random.Random, mask: Mask, style: Style, form: Form, opset: int, heads: int, sizes: dict[str, int],
        fill: float, pad_kind: str, plain: bool,
    ) -> None:  # fmt: skip
        self.rng, self.mask, self.style, self.form = rng, mask, style, form
        self.heads, self.numbers, self.fill, self.pad_kind = heads, sizes, fill, pad_kind
        self.groups = form.groups or heads
        self.b = Builder(rng, opset, plain=plain)
        self.dtype = FP16 if form.half else FP32
        self.inputs: dict[str, tuple[int, list[str | int]]] = {}
        self.outputs: list[tuple[str, int]] = []
        self.terms: list[tuple[str, str]] = []

    # ---- inputs ----

    def dims(self, *letters: str | int) -> list[str | int]:
        """A shape of the model's interface: numbers where it is fixed, names where it is not."""
        form = self.form
        found: list[str | int] = []
        for x in letters:
            if isinstance(x, int):
                found.append(x)
            elif form.fixed and x != "B":
                found.append(self.numbers[x])
            else:
                total = {"T": "S" if form.lengths == "self" else "P + S" if form.lengths == "past" else "T"}
                found.append(total.get(x, x))
        return found

    def feed(self, name: str, dtype: int, *letters: str | int) -> str:
        self.inputs[name] = (dtype, self.dims(*letters))
        return name

    def place(self, letter: str, tensor: str, axis: int) -> None:
        """Says where a size can be read."""
        known = self.b.sizes.setdefault(letter, [])
        if isinstance(known, list):
            known.append((tensor, axis))

    def mask_inputs(self) -> dict[str, tuple[str, str]]:
        """Padding and segment ids, as far as the mask reads them."""
        kinds = {e.kind for e in self.mask.expr.walk()}
        found = {}
        if kinds & {"padk", "padq"}:
            dtype = {"i": TensorProto.INT64, "b": TensorProto.BOOL, "f": FP32}[self.pad_kind]
            found["pad"] = (self.feed("attention_mask", dtype, "B", "T"), self.pad_kind)
            self.place("B", "attention_mask", 0)
            self.place("T", "attention_mask", 1)
        if kinds & {"segq", "segk"}:
            same = self.form.lengths == "self"
            for role, letter in (("segq", "S"), ("segk", "T")):
                name = "segment_ids" if same else f"segment_{role[3]}"
                found[role] = (self.feed(name, TensorProto.INT64, "B", letter), "i")
        if "len" in kinds:
            found["len"] = (self.feed("lengths", TensorProto.INT64, "B"), "i")
        return found

    def operands(self) -> tuple[str, str, str]:
        """Query [B, H, S, D], key and value [B, G, T, D]."""
        b, form, H, G = self.b, self.form, self.heads, self.groups
        if form.layout == "packed":
            x = self.feed("x", self.dtype, "B", "S", 3 * H * D)
            self.place("B", x, 0)
            self.place("S", x, 1)
            self.place("T", x, 1)
            parts = self._split(x, 3 * H * D)
            return tuple(self._heads(p, H) for p in parts)  # type: ignore[return-value]
        keys = "S" if form.lengths != "cross" else "T"
        q = self._operand("q", "S", H)
        k, v = self._operand("k", keys, G), self._operand("v", keys, G)
        if form.lengths == "past":
            past = [self.feed(n, self.dtype, "B", G, "P", D) for n in ("past_k", "past_v")]
            self.place("P", past[0], 2)
            k, v = (b.op("Concat", p, x, axis=2) for p, x in zip(past, (k, v), strict=True))
            self.place("T", k, 2)
            self.outputs += [(k, self.dtype), (v, self.dtype)]
        return q, k, v

    def _operand(self, name: str, letter: str, heads: int) -> str:
        axis = {"bhsd": 2, "bshd": 1, "bsn": 1}[self.form.layout]
        match self.form.layout:
            case "bhsd":
                self.feed(name, self.dtype, "B", heads, letter, D)
            case "bshd":
                self.feed(name, self.dtype, "B", letter, heads, D)
            case "bsn":
                self.feed(name, self.dtype, "B", letter, heads * D)
        self.place("B", name, 0)
        if name == "q":
            self.place("S", name, axis)
        if self.form.lengths != "past" and letter == ("T" if self.form.lengths == "cross" else "S"):
            self.place("T", name, axis)
        if self.form.layout == "bhsd" or self.form.node == "multi":
            return name
        if self.form.layout == "bshd":
            return self.b.op("Transpose", name, perm=[0, 2, 1, 3])
        return self._heads(name, heads)

    def _heads(self, x: str, heads: int) -> str:
        """[B, S, H*D] -> [B, H, S, D]."""
        b = self.b
        way = b.choice(["zeros", "minus", "sizes"])
        if way == "zeros":
            shape = b.constant([0, 0, heads, D])
        elif way == "minus":
            shape = b.constant([0, -1, heads, D])
        else:
            dims = b.op("Shape", x)
            lead = b.op("Slice", dims, b.constant([0]), b.constant([2]), b.constant([0]))
            shape = b.op("Concat", lead, b.constant([heads, D]), axis=0)
        return b.op("Transpose", b.op("Reshape", x, shape), perm=[0, 2, 1, 3])

    def _split(self, x: str, width: int) -> list[str]:
        b, third = self.b, width // 3
        if b.chance(0.5):
            ends = [(i * third, (i + 1) * third) for i in range(3)]
            return [b.op("Slice", x, b.constant([s]), b.constant([e]), b.constant([2])) for s, e in ends]
        return b.ops("Split", x, b.constant([third] * 3), outputs=3, axis=2)
