# SPDX-License-Identifier: Apache-2.0
"""Tensors whose bytes lie in files beside the model: found, checked, read, and copied beside a new model."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import onnx
from onnx import AttributeProto, TensorProto

from stof.errors import ArgumentError, ModelError
from stof.files import Temporary, lock, open_regular, remove_leftovers, temporary_file

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
_SMALL_CONSTANT, _LARGEST_TABLE, _MOST_READ = 1 << 10, 1 << 26, 1 << 28  # bytes
_WHOLE = frozenset({int(TensorProto.BOOL), int(TensorProto.INT32), int(TensorProto.INT64)})
# Attributes without tensors are most of a graph's. One without a type, as of old files, may hold any.
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
_DIGITS = 20  # of numbers below 2^63
_BLOCK = 1 << 20  # bytes compared at a time
_LONGEST_SHOWN = 100  # characters of a location in messages
_PATIENCE, _PAUSE = 30.0, 0.02  # seconds to wait for a run that has copied its data but not written its model


def all_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor in a model: of its graph, subgraphs, functions and training graphs, of sparse ones values and indices."""
    yield from _of_graph(model.graph)
    for function in model.functions:
        yield from _of_nodes(function.node)
        for attribute in function.attribute_proto:
            yield from _of_attribute(attribute)
    for training in model.training_info:
        yield from _of_graph(training.initialization)
        yield from _of_graph(training.algorithm)


def _of_graph(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _of_nodes(graph.node)


def _of_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.type not in _PLAIN:
                yield from _of_attribute(attribute)


def _of_attribute(attribute: onnx.AttributeProto) -> Iterator[onnx.TensorProto]:
    if attribute.HasField("t"):
        yield attribute.t
    yield from attribute.tensors
    sparse_tensors = list(attribute.sparse_tensors)
    if attribute.HasField("sparse_tensor"):
        sparse_tensors.append(attribute.sparse_tensor)
    for sparse in sparse_tensors:
        yield from (sparse.values, sparse.indices)
    if attribute.HasField("g"):
        yield from _of_graph(attribute.g)
    for graph in attribute.graphs:
        yield from _of_graph(graph)


def is_external(tensor: onnx.TensorProto) -> bool:
    """Whether a tensor's bytes lie in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


@dataclass(frozen=True)
class Place:
    """Where a tensor's bytes lie: a path relative to the model's folder, and bytes in it; no length: up to the end."""

    location: str
    offset: int
    length: int | None


def place_of(tensor: onnx.TensorProto) -> Place:
    """Where an external tensor lies.

    Raises:
        ValueError: for a location that is no text, and for what is no number.
    """
    entries = {e.key: e.value for e in tensor.external_data}
    location = entries.get("location", "")
    if not isinstance(location, str):  # protobuf gives bytes that are no UTF-8 as they are
        raise ValueError("its location is no UTF-8 text")
    numbers = [entries.get(key, "") or "0" for key in ("offset", "length")]
    if not all(isinstance(n, str) and n.isascii() and n.isdigit() and len(n) < _DIGITS for n in numbers):
        raise ValueError("its offset or length is malformed")
    offset, length = map(int, numbers)
    return Place(location, offset, length or None)


def tensor_bytes(tensor: onnx.TensorProto) -> int | None:
    """The size of a tensor's data; None for types whose elements share bytes."""
    size = ITEM_SIZES.get(tensor.data_type)
    return None if size is None else int(math.prod(tensor.dims) * size)


def external_files(model: onnx.ModelProto) -> set[str]:
    """The locations of a model's external data."""
    return {place_of(tensor).location for tensor in all_tensors(model) if is_external(tensor)}


def check_external(path: Path, model: onnx.ModelProto) -> None:
    """Whether all external data lies in regular files beside a model, or below its folder, as long as tensors need it.

    Args:
        path: of the model, which need not exist.
        model: to be checked.

    Raises:
        ModelError: naming the tensor at fault.
    """
    sizes: dict[str, int] = {}
    for tensor in all_tensors(model):
        if not is_external(tensor):
            continue
        words = f"constant {tensor.name!r}"
        try:
            place = place_of(tensor)
        except ValueError as error:
            raise ModelError(f"{path}: the external data of {words} cannot be found: {error}") from None
        shown = _shown(place.location)
        inner = Path(place.location)
        if not inner.parts or inner.is_absolute() or ".." in inner.parts:
            raise ModelError(f"{path}: {words} has external data at {shown}, outside its folder")
        if place.location not in sizes:
            sizes[place.location] = _size(path, words, shown, path.parent / inner)
        held = sizes[place.location]
        needed = tensor_bytes(tensor) or 0
        if place.length is not None and place.length < needed:
            raise ModelError(
                f"{path}: {words} of shape {list(tensor.dims)} needs {needed} bytes, but its external data has length "
                f"{place.length}; export the model again"
            )
        end = place.offset + (place.length or needed)
        if end > held:
            raise ModelError(
                f"{path}: external data {shown} has {held} bytes, but {words} ends at {end}; the file is truncated"
            )


def _size(path: Path, words: str, shown: str, file: Path) -> int:
    try:
        with open_regular(file) as opened:
            return os.fstat(opened.fileno()).st_size
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError(f"{path}: external data {shown} of {words} is missing; put it beside the model") from None
    except (OSError, ValueError) as error:  # ValueError: a location with a zero byte
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ModelError(f"{path}: external data {shown} of {words} cannot be read: {reason}") from None


def _shown(location: str) -> str:
    text = repr(location)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}... ({len(location)} characters)"


def read_constants(path: Path, model: onnx.ModelProto) -> None:
    """Reads external data that the graph cannot be understood without: axes, sizes, scalars, tables of masks. Weights stay.

    Raises:
        ModelError: when the data cannot be read or ends before.
    """
    budget = _MOST_READ
    for tensor in all_tensors(model):
        size = tensor_bytes(tensor)
        if not is_external(tensor) or size is None or size > budget or not _is_constant(tensor, size):
            continue
        budget -= size
        place = place_of(tensor)
        # onnx's own reader refuses links, which runtimes follow beside a linked model.
        try:
            with open_regular(path.parent / place.location) as file:
                file.seek(place.offset)
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


def _is_constant(tensor: onnx.TensorProto, size: int) -> bool:
    """Whether the graph is read with it: small ones; integers and booleans, which are no weights; masks of all batches."""
    if tensor.data_type in _WHOLE or (len(tensor.dims) >= 3 and tensor.dims[0] == 1):
        return 0 <= size <= _LARGEST_TABLE
    return 0 <= size <= _SMALL_CONSTANT


@dataclass(frozen=True)
class Copied:
    """External data that a model in another folder needs beside itself: loaders refuse other folders and links."""

    location: str
    source: Path
    target: Path


def copied_data(model: onnx.ModelProto, path: Path, source: Path) -> list[Copied]:
    """What has to be copied for a model at ``path`` that was made of the one at ``source``: nothing in one folder."""
    if _is_one_folder(path.parent, source.parent):
        return []
    names = {Path(location): location for location in sorted(external_files(model))}  # "a" and "./a" are one file
    return [Copied(location, source.parent / inner, path.parent / inner) for inner, location in names.items()]


def _is_one_folder(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def check_room(model: onnx.ModelProto, path: Path, source: Path) -> None:
    """Whether external data can be used by a new model, or copied beside it: other models' data of the same name stays.

    Raises:
        ArgumentError: naming the file that is in the way.
    """
    if _is_one_folder(path.parent, source.parent):
        for location in sorted(external_files(model)):
            data = source.parent / location
            if not data.resolve().is_relative_to(source.parent.resolve()):
                # As in the cache of Hugging Face's hub, where the model is a link into the same folder.
                raise ArgumentError(
                    f"external data {data} is a link to another folder, which runtimes follow only from a linked model; "
                    "write the output to another folder with -o"
                )
    for copy in copied_data(model, path, source):
        _check_inside(copy, path)
        try:
            with open_regular(copy.target) as there:
                _check_same(copy, there.fileno())
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise _in_the_way(copy, error) from error


def _check_inside(copy: Copied, path: Path) -> None:
    if not Path(os.path.realpath(copy.target)).is_relative_to(os.path.realpath(path.parent)):
        raise ArgumentError(
            f"{copy.target} leads to another folder by a link, which runtimes do not follow; remove it, or choose another "
            "folder with -o"
        )


def _check_same(copy: Copied, descriptor: int) -> None:
    with open_regular(copy.source) as given:
        if not _is_same(given.fileno(), descriptor):
            raise ArgumentError(
                f"{copy.target} exists and differs from {copy.source}; move it, or choose another folder with -o"
            )


def _is_same(first: int, second: int) -> bool:
    one, other = os.fstat(first), os.fstat(second)
    if os.path.samestat(one, other):
        return True
    return one.st_size == other.st_size and all(
        os.pread(first, _BLOCK, offset) == os.pread(second, _BLOCK, offset) for offset in range(0, one.st_size, _BLOCK)
    )


def _in_the_way(copy: Copied, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"external data {copy.location!r} cannot be copied to {copy.target}: {error.strerror or error}; choose another "
        "folder with -o"
    )


class Bringing:
    """Copies external data beside a new model, under temporary names until the model is complete.

    Runs that write into one folder at once do not disturb each other. Each copies under a name of its own. The first gives
    its copy the name that models use, and holds a lock on it until its model is there, or the copy is removed again. The
    others wait for that lock, and take the copy if it has the same bytes.

    ``stage`` copies and ``publish`` names the copies. Where the model has not taken its name by the end of the context,
    everything that was written is removed.

    Args:
        model: the new model under its temporary name.
    """

    def __init__(self, model: Temporary) -> None:
        self._model = model
        self._stack = ExitStack()
        self._staged: list[tuple[Copied, Temporary]] = []

    def __enter__(self) -> Bringing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def stage(self, copy: Copied) -> None:
        """Copies a file under a temporary name, and checks the copy. One with the same bytes may lie there already.

        Raises:
            ArgumentError: when it cannot be copied, or other data lies there.
        """
        remove_leftovers(copy.target.parent)
        try:
            if _lies_there(copy):
                return
            self._make_folder(copy.target.parent)
            new = self._stack.enter_context(temporary_file(copy.target.parent))
            new.copy(copy.source)
        except OSError as error:
            raise _in_the_way(copy, error) from error
        self._staged.append((copy, new))

    def publish(self) -> None:
        """Gives the copies their names.

        Raises:
            ArgumentError: when other data has taken one of them meanwhile.
        """
        for copy, new in self._staged:
            self._stack.callback(self._withdraw, copy, new)
            try:
                self._publish(copy, new)
            except OSError as error:
                raise _in_the_way(copy, error) from error

    def _publish(self, copy: Copied, new: Temporary) -> None:
        while True:
            try:
                new.publish(copy.target)
                return
            except FileExistsError:
                if _lies_there(copy):
                    return

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folder(folder.parent)
            self._stack.callback(self._remove_folder, folder)
            folder.mkdir(exist_ok=True)

    def _remove_folder(self, folder: Path) -> None:
        if self._model.is_temporary():
            with contextlib.suppress(OSError):  # somebody else's files are in it by now
                folder.rmdir()

    def _withdraw(self, copy: Copied, new: Temporary) -> None:
        # Without a lock, another run may count on the copy already.
        if self._model.is_temporary() and new.is_locked and new.is_at(copy.target):
            with contextlib.suppress(OSError):
                copy.target.unlink()


def _lies_there(copy: Copied) -> bool:
    """Whether the data is there, to stay: while the run that copied it may still fail, this waits."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            there = open_regular(copy.target)
        except (FileNotFoundError, NotADirectoryError):
            return False
        with there:
            if lock(there.fileno(), shared=True) is not False and _is_still(there.fileno(), copy.target):
                _check_same(copy, there.fileno())
                return True
        if time.monotonic() > end:
            raise ArgumentError(
                f"{copy.target} is in use by another process; wait for it, or choose another folder with -o"
            )
        time.sleep(_PAUSE)


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
