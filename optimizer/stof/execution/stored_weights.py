# SPDX-License-Identifier: Apache-2.0
"""A file with the large weights of models for sessions, which are then small and map their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

_LEAST = 1 << 16  # bytes of a weight that is worth a place in the file
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
        self._places: dict[str, tuple[int, int]] = {}  # the last offset and length by the weight's name

    def refer(self, model: onnx.ModelProto) -> onnx.ModelProto:
        """A copy of a model that reads its large weights from the file. Those that differ from earlier ones are added.

        Raises:
            OSError: when the file cannot be written.
        """
        referring = onnx.ModelProto()
        _copy_fields(model, referring, without="graph")
        _copy_fields(model.graph, referring.graph, without="initializer")
        for tensor in model.graph.initializer:
            kept = referring.graph.initializer.add()
            if tensor.ByteSize() < _LEAST or not tensor.HasField("raw_data"):
                kept.CopyFrom(tensor)
                continue
            raw = tensor.raw_data
            if not self._holds(tensor.name, raw):
                self._places[tensor.name] = self._append(raw), len(raw)
            offset, length = self._places[tensor.name]
            _copy_fields(tensor, kept, without="raw_data")
            kept.data_location = TensorProto.EXTERNAL
            for key, value in (("location", self._path.name), ("offset", offset), ("length", length)):
                kept.external_data.add(key=key, value=str(value))
        return referring

    def _holds(self, name: str, raw: bytes) -> bool:
        offset, length = self._places.get(name, (0, -1))
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
