# SPDX-License-Identifier: Apache-2.0
"""Sizes of tensors that a rewrite removes, told from tensors that stay."""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from stof.symbolic import Int, Symbolic, integer

ShapeSource = tuple[str, int, int]  # a tensor, one of its axes, and the number that its size is multiplied with


class ShapeSources:
    """Finds the elements of a Shape node as numbers or axes of graph inputs (or of other tensors that stay)."""

    def __init__(self, model: onnx.ModelProto, symbolic: Symbolic) -> None:
        self.symbolic = symbolic
        self._places: dict[Int, ShapeSource] = {}
        for value in model.graph.input:
            for axis, size in enumerate(symbolic.shape(value.name) or ()):
                self._places.setdefault(size, (value.name, axis, 1))

    def elements(self, output: str, staying: Sequence[str] = ()) -> list[ShapeSource | int] | None:
        """The elements of a Shape node's output; None when one of them cannot be told."""
        value = self.symbolic.value(output)
        elements = None if value is None else value.elements()
        if elements is None:
            return None
        found: list[ShapeSource | int] = []
        for element in elements:
            assert isinstance(element, Int)
            place = self._place(element, staying)
            if place is None:
                return None
            found.append(place)
        return found

    def _place(self, size: Int, staying: Sequence[str]) -> ShapeSource | int | None:
        if size.constant is not None:
            return size.constant
        if size in self._places:
            return self._places[size]
        for tensor in staying:
            for axis, own in enumerate(self.symbolic.shape(tensor) or ()):
                if own == size:
                    return (tensor, axis, 1)
        factor = size.terms[0][1] if len(size.terms) == 1 else 1
        base = self._place(size.divide(integer(factor)) or size, staying) if factor > 1 else None
        return (*base[:2], factor) if isinstance(base, tuple) else None
