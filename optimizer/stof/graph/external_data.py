# SPDX-License-Identifier: Apache-2.0
"""External data: finds, checks and reads tensors in files beside a model."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from stof.errors import ModelError
from stof.files import open_regular
from stof.graph.file_formats import HEAD_BYTES, is_lfs_pointer

ITEM_SIZES = {
    int(TensorProto.BOOL): 1,
    int(TensorProto.UINT8): 1,
    int(TensorProto.INT8): 1,
    int(TensorProto.UINT16): 2,
    int(TensorProto.INT16): 2,
    int(TensorProto.FLOAT16): 2,
    int(TensorProto.BFLOAT16): 2,
    int(TensorProto.FLOAT): 4,
    int(TensorProto.UINT32): 4,
    int(TensorProto.INT32): 4,
    int(TensorProto.UINT64): 8,
    int(TensorProto.INT64): 8,
    int(TensorProto.DOUBLE): 8,
}
_SMALL_CONSTANT, _LARGEST_TABLE, _MAX_READ = 1 << 10, 1 << 26, 1 << 28  # bytes
_INTEGER_TYPES = frozenset({int(TensorProto.BOOL), int(TensorProto.INT32), int(TensorProto.INT64)})
# Types of attributes without tensors, the most frequent ones. In old files attributes have no type and may hold anything.
_PLAIN = frozenset(
    int(kind)
    for kind in (
        AttributeProto.FLOAT,
        AttributeProto.INT,
        AttributeProto.STRING,
        AttributeProto.FLOATS,
        AttributeProto.INTS,
        AttributeProto.STRINGS,
    )
)
_MAX_DIGITS = 20  # of numbers below 2^63
_LONGEST_SHOWN = 100  # characters of a location in messages


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor in a model's graph, subgraphs, functions and training graphs; values and indices of sparse tensors."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)
        for attribute in function.attribute_proto:
            yield from _attribute_tensors(attribute)
    for training in model.training_info:
        yield from _graph_tensors(training.initialization)
        yield from _graph_tensors(training.algorithm)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type not in _PLAIN:
                yield from _attribute_tensors(attribute)


def _attribute_tensors(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse_tensors = list(attribute.sparse_tensors)
    if attribute.HasField("sparse_tensor"):
        sparse_tensors.append(attribute.sparse_tensor)
    for sparse in sparse_tensors:
        yield from (sparse.values, sparse.indices)
    if attribute.HasField("g"):
        yield from _graph_tensors(attribute.g)
    for graph in attribute.graphs:
        yield from _graph_tensors(graph)


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's bytes lie in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


@dataclass(frozen=True)
class DataLocation:
    """Where the bytes of an external tensor lie."""

    location: str  # path relative to the model's folder
    offset: int  # bytes
    length: int | None  # bytes; None: to the end of the file


def location_of(tensor: onnx.TensorProto) -> DataLocation:
    """Where the bytes of an external tensor lie.

    Raises:
        ValueError: for a location that is no text, or an offset or length that is no number.
    """
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if not isinstance(location, str):  # protobuf returns bytes where they are no UTF-8
        raise ValueError("its location is no UTF-8 text")
    numbers = [entries.get(key, "") or "0" for key in ("offset", "length")]
    if not all(isinstance(n, str) and n.isascii() and n.isdigit() and len(n) < _MAX_DIGITS for n in numbers):
        raise ValueError("its offset or length is malformed")
    offset, length = map(int, numbers)
    return DataLocation(location, offset, length or None)


def set_location(tensor: onnx.TensorProto, data: DataLocation) -> None:
    """Makes a tensor without data an external one, in place."""
    del tensor.external_data[:]
    tensor.data_location = TensorProto.EXTERNAL
    length = [] if data.length is None else [("length", data.length)]
    for key, value in (("location", data.location), ("offset", data.offset), *length):
        tensor.external_data.append(onnx.StringStringEntryProto(key=key, value=str(value)))


def tensor_bytes(tensor: onnx.TensorProto) -> int | None:
    """The size of a tensor's data in bytes; None for types smaller than a byte."""
    size = ITEM_SIZES.get(tensor.data_type)
    return None if size is None else int(math.prod(tensor.dims) * size)


def map_array(tensor: onnx.TensorProto, folder: Path) -> np.ndarray:
    """A constant as an array, which is read as it is used where it is external data.

    Args:
        tensor: of a type with a NumPy type of whole bytes; checked when the model was loaded.
        folder: of the model.

    Raises:
        OSError: when the file cannot be read.
    """
    if not is_external(tensor):
        return np.asarray(numpy_helper.to_array(tensor))
    where = location_of(tensor)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.data_type))
    return np.memmap(folder / where.location, dtype, "r", where.offset, tuple(tensor.dims))


def external_files(model: onnx.ModelProto) -> set[str]:
    """The locations of a model's external data."""
    return {location_of(tensor).location for tensor in all_tensors(model) if is_external(tensor)}


def use_forward_slashes(model: onnx.ModelProto) -> None:
    """Writes locations of external data as ONNX wants them, in place: some exporters on Windows write backslashes.

    Elsewhere a backslash is a character of a name.
    """
    for tensor in all_tensors(model):
        for entry in tensor.external_data if is_external(tensor) else ():
            if entry.key == "location" and isinstance(entry.value, str):
                entry.value = entry.value.replace("\\", "/")


def check_external(path: Path, model: onnx.ModelProto) -> None:
    """Checks that all external data lies in regular files in the model's folder or below, and that they are long enough.

    Args:
        path: of the model; the file need not exist.
        model: the model.

    Raises:
        ModelError: naming the tensor at fault.
    """
    sizes: dict[str, int] = {}
    for tensor in all_tensors(model):
        if not is_external(tensor):
            continue
        words = f"constant {tensor.name!r}"
        try:
            data = location_of(tensor)
        except ValueError as error:
            raise ModelError(f"{path}: the external data of {words} cannot be found: {error}") from None
        shown = _shorten(data.location)
        inner = Path(data.location)
        if not inner.parts or inner.anchor or ".." in inner.parts:  # an anchor is a root, or a drive
            raise ModelError(f"{path}: {words} has external data at {shown}, outside its folder")
        if data.location not in sizes:
            sizes[data.location] = _file_size(path, words, shown, path.parent / inner)
        held = sizes[data.location]
        needed = tensor_bytes(tensor) or 0
        if data.length is not None and data.length < needed:
            raise ModelError(
                f"{path}: {words} of shape {list(tensor.dims)} needs {needed} bytes, but its external data has length "
                f"{data.length}; export the model again"
            )
        end = data.offset + (data.length or needed)
        if end > held and _is_lfs_pointer(path.parent / inner):
            raise ModelError(
                f"{path}: external data {shown} of {words} is a pointer of Git LFS, not the data; download the file itself: "
                "git lfs pull"
            )
        if end > held:
            raise ModelError(
                f"{path}: external data {shown} has {held} bytes, but {words} ends at {end}; the file is truncated"
            )


def _is_lfs_pointer(file: Path) -> bool:
    try:
        with open_regular(file) as data:
            return is_lfs_pointer(data.read(HEAD_BYTES))
    except OSError:
        return False


def _file_size(path: Path, words: str, shown: str, file: Path) -> int:
    try:
        with open_regular(file) as opened:
            return os.fstat(opened.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        hint = "put it beside the model"
        if "\\" in file.name:
            hint = "its location has backslashes, as some exporters on Windows write it: ONNX wants slashes"
        raise ModelError(f"{path}: external data {shown} of {words} is missing; {hint}") from None
    except (OSError, ValueError) as error:  # ValueError: a location with a zero byte
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ModelError(f"{path}: external data {shown} of {words} cannot be read: {reason}") from None


def _shorten(location: str) -> str:
    text = repr(location)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(location)} characters)"


def read_constants(path: Path, model: onnx.ModelProto) -> None:
    """Reads the external tensors that analysis needs (axes, sizes, scalars, mask tables) into the model, but no weights.

    Raises:
        ModelError: when the data cannot be read, or the file is too short.
    """
    budget = _MAX_READ
    for tensor in all_tensors(model):
        size = tensor_bytes(tensor)
        if not is_external(tensor) or size is None or size > budget or not _is_needed(tensor, size):
            continue
        budget -= size
        where = location_of(tensor)
        # Not onnx's reader: it refuses links, which runtimes follow for a linked model.
        try:
            with open_regular(path.parent / where.location) as file:
                file.seek(where.offset)
                data = file.read(size)
        except OSError as error:
            raise ModelError(
                f"{path}: the external data of constant {tensor.name!r} cannot be read: {error.strerror or error}"
            ) from error
        if len(data) != size:
            raise ModelError(
                f"{path}: constant {tensor.name!r} of {size} bytes ends beyond its external data; truncated?"
            )
        tensor.raw_data = data
        del tensor.external_data[:]
        tensor.data_location = TensorProto.DEFAULT


def _is_needed(tensor: onnx.TensorProto, size: int) -> bool:
    """Whether analysis needs a tensor: small ones, integers and booleans, and masks [1, ..] that all batches share."""
    if tensor.data_type in _INTEGER_TYPES or (len(tensor.dims) >= 3 and tensor.dims[0] == 1):
        return 0 <= size <= _LARGEST_TABLE
    return 0 <= size <= _SMALL_CONSTANT
