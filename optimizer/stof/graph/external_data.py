# SPDX-License-Identifier: Apache-2.0
"""External data: finds, checks and reads tensors in files beside a model, and copies these files beside a new model."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import onnx
from onnx import AttributeProto, TensorProto, helper, numpy_helper

from stof.errors import ArgumentError, ModelError
from stof.files import TemporaryFile, open_regular, remove_leftovers, temporary_file, try_lock
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
_BLOCK = 1 << 20  # bytes compared at a time
_LONGEST_SHOWN = 100  # characters of a location in messages
_PATIENCE, _PAUSE = 30.0, 0.02  # seconds to wait for another process that has copied its data, not written its model


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
        if not inner.parts or inner.is_absolute() or ".." in inner.parts:
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
        raise ModelError(f"{path}: external data {shown} of {words} is missing; put it beside the model") from None
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


@dataclass(frozen=True)
class DataCopy:
    """A file of external data to copy beside a new model: loaders refuse files in other folders, and links."""

    location: str
    source: Path
    target: Path


def data_to_copy(model: onnx.ModelProto, path: Path, source: Path) -> list[DataCopy]:
    """The files to copy for a model at ``path`` that is made from the one at ``source``; none within one folder."""
    if _is_one_folder(path.parent, source.parent):
        return []
    names = {Path(location): location for location in sorted(external_files(model))}  # "a" and "./a" are one file
    return [DataCopy(location, source.parent / inner, path.parent / inner) for inner, location in names.items()]


def _is_one_folder(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def check_output_folder(model: onnx.ModelProto, path: Path, source: Path) -> None:
    """Checks that a new model can use the external data, or that it can be copied without overwriting other data.

    Raises:
        ArgumentError: naming the file that is in the way.
    """
    if _is_one_folder(path.parent, source.parent):
        for location in sorted(external_files(model)):
            data = source.parent / location
            if not data.resolve().is_relative_to(source.parent.resolve()):
                # The Hugging Face cache is like this: its model is a link into the same folder.
                raise ArgumentError(
                    f"external data {data} is a link to another folder, which runtimes follow only from a linked model; "
                    "write the output to another folder with -o"
                )
    for copy in data_to_copy(model, path, source):
        _check_inside(copy, path)
        try:
            with open_regular(copy.target) as there:
                _check_same(copy, there.fileno())
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise _copy_error(copy, error) from error


def _check_inside(copy: DataCopy, path: Path) -> None:
    if not Path(os.path.realpath(copy.target)).is_relative_to(os.path.realpath(path.parent)):
        raise ArgumentError(
            f"{copy.target} leads to another folder by a link, which runtimes do not follow; remove it, or choose another "
            "folder with -o"
        )


def _check_same(copy: DataCopy, descriptor: int) -> None:
    with open_regular(copy.source) as source:
        if not _has_same_bytes(source.fileno(), descriptor):
            raise ArgumentError(
                f"{copy.target} exists and differs from {copy.source}; move it, or choose another folder with -o"
            )


def _has_same_bytes(first: int, second: int) -> bool:
    one, other = os.fstat(first), os.fstat(second)
    if os.path.samestat(one, other):
        return True
    return one.st_size == other.st_size and all(
        os.pread(first, _BLOCK, offset) == os.pread(second, _BLOCK, offset) for offset in range(0, one.st_size, _BLOCK)
    )


def _copy_error(copy: DataCopy, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"external data {copy.location!r} cannot be copied to {copy.target}: {error.strerror or error}; choose another "
        "folder with -o"
    )


class DataCopier:
    """A context that copies external data beside a new model, and removes the copies if the model is not completed.

    ``stage`` copies a file under a temporary name, ``publish`` gives all copies their final names. If the model still has
    its temporary name at the end of the context, everything that was written is removed.

    Several processes may write into one folder. Each copies under its own temporary name. The first to publish holds a lock
    on its copy until its model is complete or the copy is removed. The others wait for the lock, and use that copy if it has
    the same bytes.

    Args:
        model: the new model under its temporary name.
    """

    def __init__(self, model: TemporaryFile) -> None:
        self._model = model
        self._stack = ExitStack()
        self._staged: list[tuple[DataCopy, TemporaryFile]] = []

    def __enter__(self) -> DataCopier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def stage(self, copy: DataCopy) -> None:
        """Copies a file under a temporary name and checks the copy. Nothing is copied if the target has the same bytes already.

        Raises:
            ArgumentError: when it cannot be copied, or the target has other bytes.
        """
        remove_leftovers(copy.target.parent)
        try:
            if _is_in_place(copy):
                return
            self._make_folder(copy.target.parent)
            new = self._stack.enter_context(temporary_file(copy.target.parent))
            new.copy(copy.source)
        except OSError as error:
            raise _copy_error(copy, error) from error
        self._staged.append((copy, new))

    def stage_new(self, folder: Path, pieces: Iterable[bytes], name: Callable[[str], str]) -> str:
        """Writes a new file of external data under a temporary name.

        Args:
            folder: of the new model.
            pieces: the file's bytes.
            name: gives the file's name for a digest of its bytes, in hexadecimal digits.

        Returns:
            The name.

        Raises:
            OSError: when it cannot be written.
        """
        remove_leftovers(folder)
        new = self._stack.enter_context(temporary_file(folder))
        digest = hashlib.sha256()

        def read() -> Iterator[bytes]:
            for piece in pieces:
                digest.update(piece)
                yield piece

        new.write_pieces(read())
        file_name = name(digest.hexdigest())
        self._staged.append((DataCopy(file_name, new.path, folder / file_name), new))
        return file_name

    def publish(self) -> None:
        """Gives the copies their final names.

        Raises:
            ArgumentError: when a name was taken by other data meanwhile.
        """
        for copy, new in self._staged:
            self._stack.callback(self._withdraw, copy, new)
            try:
                self._publish(copy, new)
            except OSError as error:
                raise _copy_error(copy, error) from error

    def _publish(self, copy: DataCopy, new: TemporaryFile) -> None:
        while True:
            try:
                new.publish(copy.target)
                return
            except FileExistsError:
                if _is_in_place(copy):
                    return

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folder(folder.parent)
            self._stack.callback(self._remove_folder, folder)
            folder.mkdir(exist_ok=True)

    def _remove_folder(self, folder: Path) -> None:
        if self._model.is_temporary():
            with contextlib.suppress(OSError):  # other files are in it by now
                folder.rmdir()

    def _withdraw(self, copy: DataCopy, new: TemporaryFile) -> None:
        # Without the lock another process may use the copy already.
        if self._model.is_temporary() and new.is_locked and new.is_at(copy.target):
            with contextlib.suppress(OSError):
                copy.target.unlink()


def _is_in_place(copy: DataCopy) -> bool:
    """Whether the target holds the data for good; waits while the process that copied it may still remove it."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            there = open_regular(copy.target)
        except (FileNotFoundError, NotADirectoryError):
            return False
        with there:
            if try_lock(there.fileno(), shared=True) is not False and _is_same_file(there.fileno(), copy.target):
                _check_same(copy, there.fileno())
                return True
        if time.monotonic() > end:
            raise ArgumentError(
                f"{copy.target} is in use by another process; wait for it, or choose another folder with -o"
            )
        time.sleep(_PAUSE)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
