# SPDX-License-Identifier: Apache-2.0
"""A file of external data for the large weights of models, so that sessions get small models and map their weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

_LEAST_BYTES = 1 << 16  # of a weight: smaller ones stay in the model
_ALIGNMENT = 4096  # a page: runtimes map whole ones
_COMPARED = 1 << 22  # bytes that are compared at a time, so that comparing needs little memory


class StoredWeights:
    """Weights in a file of external data. Models that share weights hold them there once.

    Args:
        folder: where the file is made, and where models that read it must lie.
    """

    def __init__(self, folder: Path) -> None:
        self._path = _free_path(folder / "weights.bin", ())
        self._ranges: dict[str, list[tuple[int, int]]] = {}  # offsets and lengths by the weight's name

    def keep_apart_from(self, files: Collection[str]) -> None:
        """Gives the file another name where it has that of external data, which models would read in its place.

        Sessions that read it map it, so that they keep it.

        Args:
            files: locations of external data, from ``folder`` on.

        Raises:
            OSError: when it cannot be renamed.
        """
        if self._path.name in files:
            path = _free_path(self._path, files)
            if self._ranges:
                self._path.rename(path)
            self._path = path

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
            offset, length = self._range_of(tensor.name, tensor.raw_data)
            _copy_fields(tensor, kept, without="raw_data")
            kept.data_location = TensorProto.EXTERNAL
            for key, value in (("location", self._path.name), ("offset", offset), ("length", length)):
                kept.external_data.add(key=key, value=str(value))
        return copy

    def _range_of(self, name: str, raw: bytes) -> tuple[int, int]:
        """The offset and the length of a weight in the file."""
        for span in self._ranges.get(name, ()):
            if self._holds(span, raw):
                return span
        span = self._append(raw), len(raw)
        self._ranges.setdefault(name, []).append(span)
        return span

    def _holds(self, span: tuple[int, int], raw: bytes) -> bool:
        offset, length = span
        if length != len(raw):
            return False
        held = np.memmap(self._path, np.uint8, "r", offset, (length,))
        expected = np.frombuffer(raw, np.uint8)
        return all(
            np.array_equal(held[i : i + _COMPARED], expected[i : i + _COMPARED]) for i in range(0, length, _COMPARED)
        )

    def _append(self, raw: bytes) -> int:
        with self._path.open("ab") as file:
            offset = file.tell() + -file.tell() % _ALIGNMENT
            file.write(bytes(offset - file.tell()))
            file.write(raw)
        return offset


def _free_path(path: Path, taken: Collection[str]) -> Path:
    """The path, or a similar one of the folder that no file has and that is not taken."""
    while path.exists() or path.name in taken:
        path = path.with_name(f"{path.stem}_{path.suffix}")
    return path


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
