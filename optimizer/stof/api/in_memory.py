# SPDX-License-Identifier: Apache-2.0
"""Optimizes models in memory, by way of temporary files: ONNX Runtime reads models above 2 GB from files alone."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import onnx
from google.protobuf.message import EncodeError, Message  # type: ignore[import-untyped]

from stof.errors import ArgumentError, ModelError, StofError
from stof.files import temporary_folder
from stof.graph.external_data import all_tensors, is_external, location_of, tensor_bytes
from stof.options import Options
from stof.pipeline import run
from stof.report import Report

if TYPE_CHECKING:
    import onnx_ir

_LARGEST_WHOLE = 1 << 30  # bytes of weights that are written into the model's own file, which has at most 2 GB
_SMALLEST_EXTERNAL = 1 << 10  # bytes of a tensor that becomes external data
_ALIGNMENT = 1 << 12  # of external data, for memory maps
_SOURCE, _RESULT = "model.onnx", "optimized.onnx"
_NUMBERS = frozenset(  # types whose data in other fields than raw_data `onnx.numpy_helper` turns into the same bytes
    [onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE, onnx.TensorProto.INT32, onnx.TensorProto.INT64]
)


def is_model(model: object) -> bool:
    """Whether it is a model of a kind that :func:`optimize_model` takes."""
    return isinstance(model, onnx.ModelProto) or _is_ir_model(model)


def _is_ir_model(model: object) -> bool:
    loaded = sys.modules.get("onnx_ir")  # whoever has such a model has imported it
    return loaded is not None and isinstance(model, loaded.Model)


def optimize_model(model: Any, output: Path | None, options: Options) -> tuple[Any, Report]:
    """Optimizes a model in memory, which stays as it is.

    Args:
        model: an ``onnx.ModelProto`` or an ``onnx_ir.Model``.
        output: the file to write; None: the result is returned.
        options: the settings.

    Returns:
        The optimized model of the same kind, and the report. The given model where an output is named, nothing is replaced
        or nothing is to be written.

    Raises:
        StofError: as of :func:`stof.optimize`.
    """
    original = _GivenIrModel(model) if _is_ir_model(model) else _GivenProto(model)
    with temporary_folder() as folder:
        source = folder / _SOURCE
        data = _SOURCE if output is None else output.name
        original.write(source, f"{data}.data", is_returned=output is None)
        try:
            report = run(
                source,
                output or folder / _RESULT,
                options,
                original.name,
                copies_unchanged=output is not None,
                is_output=output is not None,
            )
        except StofError as error:
            error.args = (str(error).replace(str(source), original.name),)
            raise
        written = folder / _RESULT
        return (original.read(written) if written.exists() else model), report


class _Given(ABC):
    """A model of the caller's.

    Attributes:
        name: for messages.
    """

    name: str

    @abstractmethod
    def write(self, path: Path, data: str, *, is_returned: bool) -> None:
        """Writes the model to a file.

        Args:
            path: of the file.
            data: the name of external data beside it, where that is needed.
            is_returned: the result will be read back.

        Raises:
            ArgumentError: when a weight is not in memory.
            ModelError: when it does not fit into a file.
        """

    @abstractmethod
    def read(self, path: Path) -> Any:
        """The optimized model, in memory."""


class _GivenProto(_Given):
    def __init__(self, model: onnx.ModelProto) -> None:
        self.name = f"the ModelProto {model.graph.name!r}"
        self._model = model

    def write(self, path: Path, data: str, *, is_returned: bool) -> None:
        for tensor in all_tensors(self._model):
            if is_external(tensor):
                raise ArgumentError(
                    f"{self.name} has external data that is not loaded (tensor {tensor.name!r}), and does not say in which "
                    "folder; load it with onnx.load, or give the path of the file"
                )
        written = self._model
        if sum(tensor_bytes(t) or 0 for t in written.graph.initializer) > _LARGEST_WHOLE:
            with path.with_name(data).open("wb") as file:
                written = _with_external_data(self._model, data, file)
        try:
            path.write_bytes(written.SerializeToString())
        except (EncodeError, ValueError) as error:
            raise ModelError(
                f"{self.name} has more than 2 GB outside of its graph's initializers, which no file holds: make constants "
                "of nodes and subgraphs initializers of the graph"
            ) from error

    def read(self, path: Path) -> onnx.ModelProto:
        return onnx.load(path)


def _with_external_data(model: onnx.ModelProto, location: str, file: BinaryIO) -> onnx.ModelProto:
    """A copy of a model whose large initializers are in a file; their bytes are not copied in memory."""
    copy = onnx.ModelProto()
    _copy_fields(model, copy, without="graph")
    _copy_fields(model.graph, copy.graph, without="initializer")
    for tensor in model.graph.initializer:
        size = tensor_bytes(tensor)
        is_plain = tensor.HasField("raw_data") or tensor.data_type in _NUMBERS
        new = copy.graph.initializer.add()
        if size is None or size < _SMALLEST_EXTERNAL or not is_plain:
            new.CopyFrom(tensor)
            continue
        raw = tensor.raw_data if tensor.HasField("raw_data") else onnx.numpy_helper.to_array(tensor).tobytes()
        offset = file.seek(-file.tell() % _ALIGNMENT, 1)
        file.write(raw)
        new.name, new.data_type, new.doc_string = tensor.name, tensor.data_type, tensor.doc_string
        new.dims.extend(tensor.dims)
        new.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (("location", location), ("offset", offset), ("length", len(raw))):
            new.external_data.add(key=key, value=str(value))
    return copy


def _copy_fields(source: Message, target: Message, without: str) -> None:
    """Copies all fields of a message but one."""
    for field, value in source.ListFields():
        if field.name == without:
            continue
        if isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        elif hasattr(value, "MergeFrom"):  # a repeated field
            getattr(target, field.name).MergeFrom(value)
        else:
            setattr(target, field.name, value)


class _GivenIrModel(_Given):
    def __init__(self, model: onnx_ir.Model) -> None:
        self.name = f"the onnx_ir.Model {model.graph.name!r}"
        self._model = model
        self._tensors: dict[tuple[str, int], Any] = {}  # the model's own, by their places in the external data

    def write(self, path: Path, data: str, *, is_returned: bool) -> None:
        import onnx_ir

        tensors = [value.const_value for value in _initializers(self._model) if value.const_value is not None]
        is_large = sum(t.nbytes for t in tensors) > _LARGEST_WHOLE
        # A result takes tensors that stay as they are from the given model, which needs to know them again.
        is_split = is_large or is_returned or any(isinstance(t, onnx_ir.ExternalTensor) for t in tensors)
        try:
            onnx_ir.save(
                self._model,
                path,
                external_data=data if is_split else None,
                size_threshold_bytes=_SMALLEST_EXTERNAL,
            )
        except FileNotFoundError as error:
            raise ArgumentError(f"the external data {error.filename} of {self.name} does not exist") from error
        except EncodeError as error:
            raise ModelError(
                f"{self.name} has more than 2 GB outside of its initializers, which no file holds"
            ) from error
        values = self._model.graph.initializers
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            if is_external(tensor) and tensor.name in values:
                self._tensors[_place(tensor)] = values[tensor.name].const_value

    def read(self, path: Path) -> Any:
        import onnx_ir

        model = onnx_ir.load(path)
        temporary = []  # values whose data is in files that are removed
        for value in _initializers(model):
            tensor = value.const_value
            if not isinstance(tensor, onnx_ir.ExternalTensor):
                continue
            kept = self._tensors.get((str(tensor.location), tensor.offset or 0))
            if kept is not None and kept.name == tensor.name and kept.shape == tensor.shape:
                value.const_value = kept
            else:
                temporary.append(value)
        loaded = onnx_ir.external_data.convert_tensors_from_external([v.const_value for v in temporary])
        for value, tensor in zip(temporary, loaded, strict=True):
            value.const_value = tensor
        return model


def _initializers(model: onnx_ir.Model) -> Iterator[Any]:
    """The values of all initializers, of subgraphs too."""
    for graph in model.graphs():
        yield from graph.initializers.values()


def _place(tensor: onnx.TensorProto) -> tuple[str, int]:
    where = location_of(tensor)
    return where.location, where.offset
