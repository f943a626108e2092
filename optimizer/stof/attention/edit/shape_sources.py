# SPDX-License-Identifier: Apache-2.0
"""Finds the sizes of tensors that a rewrite removes in the shapes of tensors that it keeps."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from stof.symbolic import Int, Symbolic, integer

ShapeSource = tuple[str, int, int]  # a tensor, one of its axes, and a factor of that axis's size


class ShapeSources:
    """Finds the elements of Shape nodes as numbers, or as axes of graph inputs or of other tensors that are kept."""

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic) -> None:
        self.symbolic = symbolic
        self._sources: dict[Int, ShapeSource] = {}
        for value in model.graph.input:
            for axis, size in enumerate(symbolic.shape(value.name) or ()):
                self._sources.setdefault(size, (value.name, axis, 1))

    def find(self, output: str, kept: Sequence[str] = ()) -> list[ShapeSource | int] | None:
        """The elements of a Shape node's output; None when one of them is found nowhere.

        Args:
            output: of the Shape node.
            kept: tensors beside the graph's inputs whose axes may be used.
        """
        value = self.symbolic.value(output)
        elements = None if value is None else value.elements()
        if elements is None:
            return None
        sources: list[ShapeSource | int] = []
        for element in elements:
            assert isinstance(element, Int)
            source = self.find_size(element, kept)
            if source is None:
                return None
            sources.append(source)
        return sources

    def find_size(self, size: Int, kept: Sequence[str]) -> ShapeSource | int | None:
        """A size as a number, or as an axis of an input or of a tensor that is kept; None where it is found nowhere."""
        if size.constant is not None:
            return size.constant
        if size in self._sources:
            return self._sources[size]
        for tensor in kept:
            for axis, axis_size in enumerate(self.symbolic.shape(tensor) or ()):
                if axis_size == size:
                    return (tensor, axis, 1)
        factor = size.terms[0][1] if len(size.terms) == 1 else 1
        base = self.find_size(size.divide(integer(factor)) or size, kept) if factor > 1 else None
        return (*base[:2], factor) if isinstance(base, tuple) else None
