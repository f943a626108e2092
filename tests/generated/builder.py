# SPDX-License-Identifier: Apache-2.0
"""Collects the nodes of a generated model. Everything that exporters write in several ways is drawn here."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

TYPES = {"b": TensorProto.BOOL, "i": TensorProto.INT64, "f": TensorProto.FLOAT}
AXES = "bhqk"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a mask: it broadcasts to [B, H, S, T], varies along ``axes`` and has size 1 along all others."""

    name: str
    kind: str  # "b", "i" (int64) or "f" (fp32)
    rank: int
    axes: frozenset[str]

    def size_letters(self) -> list[str]:
        """For each axis the letter of its size, or "1"."""
        return [a if a in self.axes else "1" for a in AXES[4 - self.rank :]]


class Builder:
    """Nodes, initializers and the sizes of the model that is being drawn.

    ``sizes`` maps B, H, S, T, P to numbers (what is fixed) or to (tensor, axis) pairs that tell them; ``plain`` builds
    without noise and without spelling choices.
    """

    def __init__(self, rng: random.Random, opset: int, *, plain: bool = False) -> None:
        self.rng = rng
        self.opset = opset
        self.plain = plain
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.sizes: dict[str, int | list[tuple[str, int]]] = {}
        self.count = 0

    def chance(self, share: float) -> bool:
        """True with a probability; never in a plain model."""
        return not self.plain and self.rng.random() < share

    def choice(self, options: Sequence[Any]) -> Any:
        """One of the options; the first in a plain model."""
        return options[0] if self.plain else self.rng.choice(options)

    def name(self) -> str:
        self.count += 1
        return f"t{self.count}"

    def op(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """A node; returns its first output (``name:1`` and so on are not used: see :meth:`ops`)."""
        return self.ops(op_type, *inputs, outputs=outputs, **attributes)[0]

    def ops(self, op_type: str, *inputs: str, outputs: int = 1, **attributes: Any) -> list[str]:
        names = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), names, name=f"n{self.count}", **attributes))
        return names

    def constant(self, value: object, dtype: Any = np.int64) -> str:
        """A Constant node or an initializer."""
        array = np.asarray(value, dtype)
        if self.chance(0.4):
            name = self.name()
            self.initializers.append(numpy_helper.from_array(array, name))
            return name
        if array.dtype == np.int64 and array.ndim == 0 and self.chance(0.3):
            return self.op("Constant", value_int=int(array))
        return self.op("Constant", value=numpy_helper.from_array(array))

    # ---- sizes ----

    def size(self, letter: str) -> str:
        """B, H, S, T or P as an int64 scalar."""
        known = self.sizes[letter]
        if isinstance(known, int):
            return self.constant(known)
        tensor, axis = self.choice(known)
        if self.opset >= 15 and self.chance(0.4):
            return self.op("Squeeze", self.op("Shape", tensor, start=axis, end=axis + 1))
        shape = self.op("Shape", tensor)
        way = self.choice(["gather", "gather", "slice", "reshape"])
        if way == "gather":
            return self.op("Gather", shape, self.constant(axis), axis=0)
        if way == "slice":
            one = self.op("Slice", shape, self.constant([axis]), self.constant([axis + 1]), self.constant([0]))
            return self.op("Squeeze", one, self.constant([0]))
        return self.op("Reshape", self.op("Gather", shape, self.constant([axis])), self.constant([], np.int64))

    def dim(self, letter: str) -> str:
        """The same as a vector of one element; "1" and "-1" are constants."""
        if letter in ("1", "-1"):
            return self.constant([int(letter)])
        known = self.sizes[letter]
        if isinstance(known, int):
            return self.constant([known])
        tensor, axis = self.choice(known)
        if self.opset >= 15 and self.chance(0.4):
            return self.op("Shape", tensor, start=axis, end=axis + 1)
        return self.op("Unsqueeze", self.size(letter), self.constant([0]))

    def shape(self, letters: Sequence[str]) -> str:
        """A shape vector of sizes, such as ["B", "1", "S", "T"]."""
        known = [1 if x == "1" else -1 if x == "-1" else self.sizes[x] for x in letters]
        if all(isinstance(n, int) for n in known):
            return self.constant(known)
        return self.op("Concat", *(self.dim(x) for x in letters), axis=0)

    # ---- mask tensors ----

    def letters(self, tensor: Tensor) -> list[str]:
        """The shape of a mask tensor in size letters."""
        return [{"b": "B", "h": "H", "q": "S", "k": "T", "1": "1"}[a] for a in tensor.size_letters()]

    def cast(self, tensor: Tensor, kind: str) -> Tensor:
        """A cast to another kind; bool, int and float in between where there is noise."""
        if tensor.kind == kind:
            return tensor
        name = tensor.name
        if tensor.kind == "b" and self.chance(0.2):
            name = self.op("Cast", name, to=self.choice([TensorProto.INT32, TensorProto.FLOAT, TensorProto.UINT8]))
        return Tensor(self.op("Cast", name, to=TYPES[kind]), kind, tensor.rank, tensor.axes)

    def join(self, op_type: str, kind: str, *tensors: Tensor, **attributes: Any) -> Tensor:
        """An elementwise node."""
        rank = max(t.rank for t in tensors)
        axes = frozenset(a for t in tensors for a in t.axes)
        return Tensor(self.op(op_type, *(t.name for t in tensors), **attributes), kind, rank, axes)

    def scalar(self, value: float, kind: str) -> Tensor:
        """A constant of a kind, of rank 0 or seldom 1."""
        dtype = {"b": np.bool_, "i": np.int64, "f": np.float32}[kind]
        rank = self.choice([0, 0, 0, 1])
        return Tensor(self.constant(np.full([1] * rank, value), dtype), kind, rank, frozenset())

    def lift_rank(self, tensor: Tensor, rank: int) -> Tensor:
        """With leading axes of size 1, up to a rank."""
        extra = rank - tensor.rank
        if extra <= 0:
            return tensor
        if self.chance(0.3) and len(tensor.axes) <= 1:
            letters = ["1"] * extra + ["-1" if x != "1" else x for x in self.letters(tensor)]
            name = self.op("Reshape", tensor.name, self.shape(letters))
        elif extra > 1 and self.chance(0.3):
            name = tensor.name
            for _ in range(extra):
                name = self.op("Unsqueeze", name, self.constant([0]))
        else:
            name = self.op("Unsqueeze", tensor.name, self.constant(list(range(extra))))
        return Tensor(name, tensor.kind, rank, tensor.axes)

    def bigger(self, tensor: Tensor) -> Tensor:
        """Expanded to more axes, as attention masks are to [B, 1, S, T]."""
        rank = self.choice([r for r in (2, 3, 4) if r >= tensor.rank])
        if rank < 2:
            return tensor
        axes = tensor.axes | {"q", "k"} | ({"b"} if rank == 4 and self.chance(0.5) else frozenset())
        tensor = self.lift_rank(tensor, rank) if self.chance(0.5) else tensor
        grown = Tensor("", tensor.kind, rank, frozenset(axes))
        return Tensor(self.op("Expand", tensor.name, self.shape(self.letters(grown))), tensor.kind, rank, grown.axes)

    def noise(self, tensor: Tensor, share: float) -> Tensor:
        """Movements that change nothing, as exporters leave them."""
        if not self.chance(share):
            return tensor
        way = self.rng.choice(["identity", "expand", "reshape", "transpose", "slice", "squeeze", "cast", "concat"])
        if way == "identity":
            return Tensor(self.op("Identity", tensor.name), tensor.kind, tensor.rank, tensor.axes)
        if way == "expand":
            return self.bigger(tensor)
        if way == "cast":
            other = {"b": "i", "i": "f", "f": "f"}[tensor.kind]
            return self.cast(self.cast(tensor, other), tensor.kind)
        if tensor.rank == 0:
            return tensor
        name = tensor.name
        if way == "reshape":
            name = self.op("Reshape", name, self.shape(self.letters(tensor)))
        elif way == "transpose" and tensor.rank > 1:
            perm = list(range(tensor.rank))
            self.rng.shuffle(perm)
            back = [perm.index(i) for i in range(tensor.rank)]
            name = self.op("Transpose", self.op("Transpose", name, perm=perm), perm=back)
        elif way == "slice":
            end = self.rng.choice([2**31 - 1, 2**63 - 1])
            axis = self.rng.randrange(tensor.rank)
            name = self.op("Slice", name, self.constant([0]), self.constant([end]), self.constant([axis]))
        elif way == "squeeze":
            axis = self.constant([self.rng.randrange(tensor.rank + 1)])
            name = self.op("Squeeze", self.op("Unsqueeze", name, axis), axis)
        elif way == "concat":
            letter = self.letters(tensor)[-1]
            if letter != "1":
                twice = self.op("Concat", name, name, axis=-1)
                name = self.op("Slice", twice, self.constant([0]), self.dim(letter), self.constant([tensor.rank - 1]))
        return Tensor(name, tensor.kind, tensor.rank, tensor.axes)
