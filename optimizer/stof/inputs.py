# SPDX-License-Identifier: Apache-2.0
"""Inputs for a model that nobody described: ranges of indices from the tables that they look up, padding for masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import onnx
from onnx import helper

from stof.errors import UnsupportedError
from stof.graph import GraphIndex
from stof.symbolic import Symbolic
from stof.symbolic.terms import Atom, Int

_THROUGH = frozenset({"Cast", "Identity", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Flatten", "Transpose"})


class Padding(Enum):
    """Where a batch's rows are padded."""

    NONE = "none"
    LEFT = "left"
    RIGHT = "right"


@dataclass(frozen=True)
class Case:
    """One set of inputs: batch size, length, padding."""

    batch: int
    length: int
    padding: Padding

    def __str__(self) -> str:
        pad = "" if self.padding is Padding.NONE else f", padded {self.padding.value}"
        return f"batch {self.batch}, length {self.length}{pad}"


def evaluate(size: Int, sizes: Mapping[str, int]) -> int:
    """A symbolic size at concrete ones.

    Raises:
        UnsupportedError: when it depends on something else.
    """
    total = 0
    for monomial, coefficient in size.terms:
        for atom in monomial:
            coefficient *= _atom(atom, sizes)
        total += coefficient
    return total


def _atom(atom: Atom, sizes: Mapping[str, int]) -> int:
    if atom.kind == "size":
        name = str(atom.args[0])
        if name not in sizes:
            raise UnsupportedError(f"a size depends on dimension {name!r}, which no input of the model has")
        return sizes[name]
    values = [evaluate(a, sizes) if isinstance(a, Int) else a for a in atom.args]
    numbers = [v for v in values if isinstance(v, int)]
    if len(numbers) == len(values):
        match atom.kind:
            case "min":
                return min(numbers)
            case "max":
                return max(numbers)
            case "abs":
                return abs(numbers[0])
            case "div":
                return numbers[0] // numbers[1]
            case "mod":
                return numbers[0] % numbers[1]
    raise UnsupportedError(f"a size depends on {atom.kind}, not on sizes of inputs alone")


class InputMaker:
    """Draws inputs of a model.

    Args:
        model: without external data.
        symbolic: its shapes.
        pads: inputs that are padding masks.
        limits: inputs that hold numbers of keys, each with the number that there are.
        segments: inputs that hold numbers of documents: one document without padding, several with.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        symbolic: Symbolic,
        pads: frozenset[str],
        limits: Mapping[str, Int] | None = None,
        segments: frozenset[str] = frozenset(),
    ) -> None:
        self.model = model
        self.symbolic = symbolic
        self.pads = pads
        self.limits = limits or {}
        self.segments = segments
        index = GraphIndex(model.graph)
        initializers = {t.name for t in model.graph.initializer}
        self.inputs = [i for i in model.graph.input if i.name not in initializers]
        self.rows = {i.name: _table_rows(index, symbolic, i.name) for i in self.inputs}
        self.batch_names = {
            str(shape[0].atom.args[0])
            for i in self.inputs
            if (shape := symbolic.shape(i.name)) and shape[0].atom is not None
        }

    def sizes(self, case: Case) -> dict[str, int]:
        """Every dimension name at a case: leading ones are batches, all others lengths."""
        found: dict[str, int] = {}
        for value in self.inputs:
            for dim in self.symbolic.shape(value.name) or ():
                for atom in dim.atoms():
                    name = str(atom.args[0])
                    found[name] = case.batch if name in self.batch_names else case.length
        return found

    def draw(self, case: Case, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """One set of inputs by name."""
        sizes = self.sizes(case)
        feeds = {}
        for value in self.inputs:
            shape = self.symbolic.shape(value.name)
            if shape is None:
                raise ValueError(f"input {value.name!r} is no tensor of known rank")
            dims = [evaluate(d, sizes) for d in shape]
            dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
            if value.name in self.limits:
                most = evaluate(self.limits[value.name], sizes)
                feeds[value.name] = rng.integers(min(1, most), most, dims, endpoint=True).astype(dtype)
                continue
            feeds[value.name] = self._draw_one(value.name, dims, dtype, case, rng)
        return feeds

    def _draw_one(
        self, name: str, dims: list[int], dtype: np.dtype, case: Case, rng: np.random.Generator
    ) -> np.ndarray:
        if name in self.pads:
            return _padding(dims, case, rng).astype(dtype)
        if dtype.kind == "b":
            # Most likely a mask, and a stated one may forget it.
            return _padding(dims, case, rng).astype(dtype)
        if dtype.kind in "iu":
            rows = self.rows[name]
            if name in self.segments:
                starts = rng.random(dims) < (0.0 if case.padding is Padding.NONE else 0.2)
                return (np.cumsum(starts, axis=-1) % (rows or 1 << 30)).astype(dtype)
            if rows is not None:
                return rng.integers(0, rows, dims).astype(dtype)
            # Neither a look-up nor a mask: positions, the common meaning of what is left.
            return np.broadcast_to(np.arange(dims[-1] if dims else 1), dims).astype(dtype)
        return rng.standard_normal(dims).astype(dtype)


def _padding(dims: list[int], case: Case, rng: np.random.Generator) -> np.ndarray:
    mask = np.ones(dims, np.int64)
    if case.padding is Padding.NONE or not dims or dims[-1] < 2:
        return mask
    for row in mask.reshape(-1, dims[-1])[1 if len(mask) > 1 else 0 :]:
        count = int(rng.integers(1, max(2, dims[-1] // 2)))
        if case.padding is Padding.LEFT:
            row[:count] = 0
        else:
            row[-count:] = 0
    return mask


def _table_rows(index: GraphIndex, symbolic: Symbolic, name: str) -> int | None:
    """The rows of the smallest table that an input indexes, None if it indexes none."""
    found: list[int] = []
    pending, seen = [name], {name}
    while pending:
        tensor = pending.pop()
        for node in index.consumers(tensor):
            if node.op_type in ("Gather", "GatherElements") and len(node.input) > 1 and node.input[1] == tensor:
                shape = symbolic.shape(node.input[0])
                axis = next((a.i for a in node.attribute if a.name == "axis"), 0)
                if shape is not None and shape[axis].constant is not None:
                    found.append(shape[axis].constant or 1)
            elif node.op_type in _THROUGH and node.output[0] not in seen:
                seen.add(node.output[0])
                pending.append(node.output[0])
    return min(found) if found else None
