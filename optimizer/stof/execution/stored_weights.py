# SPDX-License-Identifier: Apache-2.0
"""A file of external data for the large weights of models, so that sessions get small models and map their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

_LEAST_BYTES = 1 << 16  # of a weight: smaller ones stay in the model
_ALIGNMENT = 4096  # a page: runtimes map whole ones


class StoredWeights:
    """Weights in a file of external data. Models that share weights hold them there once.

    Args:
        folder: where the file is made, and where models that read it must lie.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "weights.bin"
        while path.exists():  # external data of that name
            path = path.with_name(f"{path.stem}_.bin")
        self._path = path
        self._ranges: dict[str, tuple[int, int]] = {}  # offset and length, by the weight's name

    def externalize(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of a model that reads its large weights from the file, which gets those that it does not hold yet.

        Raises:
            OSError: when the file cannot be written.
        """
        copy = onnx.ModelProto()
        _copy_fields(model, copy, without="graph")
        _copy_fields(model.graph, copy.graph, without="initializer")
        for tensor in model.graph.initializer:
            kept = copy.graph.initializer.add()
            if tensor.ByteSize() < _LEAST_BYTES or not tensor.HasField("raw_data"):
                kept.CopyFrom(tensor)
                continue
            raw = tensor.raw_data
            if not self._holds(tensor.name, raw):
                self._ranges[tensor.name] = self._append(raw), len(raw)
            offset, length = self._ranges[tensor.name]
            _copy_fields(tensor, kept, without="raw_data")
            kept.data_location = TensorProto.EXTERNAL
            for key, value in (("location", self._path.name), ("offset", offset), ("length", length)):
                kept.external_data.add(key=key, value=str(value))
        return copy

    def _holds(self, name: str, raw: bytes) -> bool:
        offset, length = self._ranges.get(name, (0, -1))
        if length != len(raw):
            return False
        held = np.memmap(self._path, np.uint8, "r", offset, (length,))
        return bool(np.array_equal(held, np.frombuffer(raw, np.uint8)))

    def _append(self, raw: bytes) -> int:
        with self._path.open("ab") as file:
            offset = file.tell() + -file.tell() % _ALIGNMENT
            file.write(bytes(offset - file.tell()))
            file.write(raw)
        return offset


def _copy_fields(source: Any, copy: Any, without: str) -> None:
    """Copies all fields but one, which may be too large to copy."""
    for field, value in source.ListFields():
        if field.name == without:
            continue
        target = getattr(copy, field.name)
        if hasattr(target, "extend"):
            target.extend(value)
        elif hasattr(target, "CopyFrom"):
            target.CopyFrom(value)
        else:
            setattr(copy, field.name, value)
