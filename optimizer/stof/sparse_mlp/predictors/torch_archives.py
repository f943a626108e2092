# SPDX-License-Identifier: Apache-2.0
"""Tensors of files that torch.save wrote, read without PyTorch and without unpickling."""

from __future__ import annotations

import io
import math
import pickletools
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from stof.errors import ArgumentError, shown
from stof.files import read_bytes

_MOST_BYTES = 1 << 31  # of a file
_MOST_STRUCTURE = 1 << 20  # bytes of the member that names the tensors
_MOST_MEMBERS = 1 << 16
_MOST_RANK = 8
_BF16 = np.dtype([("bf16", "<u2")])  # until it is widened to fp32
_DTYPES: dict[str, np.dtype[Any]] = {
    "FloatStorage": np.dtype("<f4"),
    "DoubleStorage": np.dtype("<f8"),
    "HalfStorage": np.dtype("<f2"),
    "BFloat16Storage": _BF16,
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
    "ShortStorage": np.dtype("<i2"),
    "CharStorage": np.dtype("i1"),
    "ByteStorage": np.dtype("u1"),
    "BoolStorage": np.dtype("u1"),
}
Tensor = npt.NDArray[Any]


class _MalformedError(Exception):
    """What is wrong with a member; the caller names the file."""


def read_tensors(what: str, path: Path) -> dict[str, Tensor]:
    """The tensors of a dictionary that torch.save wrote, by their names; that of a single tensor under an empty name.

    Files of PyTorch 1.6 and later are zip archives. One member holds a pickle that names tensors, others hold their values.
    The few operations of a pickle that tensors need are interpreted here; nothing is imported or called. Members must be
    uncompressed, and no tensor is larger than what is stored of it, so memory is bounded by the size of the file.

    Args:
        what: the kind of file, for messages.
        path: the file.

    Returns:
        Arrays of the stored types, which may not be writable; bf16 as fp32.

    Raises:
        ArgumentError: naming file and member, when the file is damaged, or holds anything but tensors.
    """
    data = read_bytes(what, path, _MOST_BYTES)
    member = "the archive"
    try:
        members = _members(data)
        named = [n for n in members if n.endswith("/data.pkl") and n.count("/") == 1]
        if len(named) != 1:
            raise _MalformedError(f"{len(named)} members are named data.pkl, expected one")
        folder, member = named[0].rpartition("/")[0], named[0]
        order = members.get(f"{folder}/byteorder")
        if order is not None and bytes(order) != b"little":
            raise _MalformedError("values are not in little-endian order; save the file on another machine")
        content = _Interpreter(bytes(members[member]), _Storages(members, folder)).run()
        return _name_tensors(content, len(data))
    except _MalformedError as error:
        raise ArgumentError(f"the {what} {path} cannot be read: {member}: {shown(error, 500)}") from None


def _members(data: bytes) -> dict[str, memoryview]:
    """The content of the members of an archive, all of them uncompressed and apart from each other."""
    if not data.startswith(b"PK"):
        raise _MalformedError("it is no zip archive; save it again with torch.save of PyTorch 1.6 or later")
    try:
        archive = zipfile.ZipFile(io.BytesIO(data))
        infos = archive.infolist()
        if len(infos) > _MOST_MEMBERS:
            raise _MalformedError(f"it has {len(infos)} members, expected up to {_MOST_MEMBERS}")
        if any(i.compress_type != zipfile.ZIP_STORED or i.compress_size != i.file_size for i in infos):
            raise _MalformedError("members are compressed, which torch.save does not do")
        total = sum(i.file_size for i in infos)
        if total > len(data):
            raise _MalformedError(f"members have {total} bytes in a file of {len(data)}")
        if len({i.filename for i in infos}) != len(infos):
            raise _MalformedError("two members have one name")
        return {i.filename: memoryview(archive.read(i)) for i in infos}
    except _MalformedError:
        raise
    except Exception as error:  # whatever zipfile raises on damaged files
        raise _MalformedError(f"it is a damaged zip archive: {shown(error, 200)}") from None


@dataclass(frozen=True)
class _Global:
    """A name of a module that the pickle mentions."""

    name: str


@dataclass(frozen=True)
class _Storage:
    """Values of one member."""

    values: Tensor


@dataclass(frozen=True)
class _Mark:
    """Where arguments of a later operation begin on the stack."""


class _Storages:
    """Members that hold the values of tensors."""

    def __init__(self, members: Mapping[str, memoryview], folder: str) -> None:
        self.members, self.folder = members, folder

    def find(self, reference: object) -> _Storage:
        """The storage that a persistent id names: (``storage``, type, member, device, number of values)."""
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
            raise _MalformedError("it refers to something that is no storage of a tensor")
        kind, name, count = reference[1], reference[2], reference[4]
        if not isinstance(kind, _Global) or not isinstance(name, str) or not _is_count(count):
            raise _MalformedError("the reference to a storage is damaged")
        dtype = _DTYPES.get(kind.name.removeprefix("torch."))
        if dtype is None:
            raise _MalformedError(f"tensors of type {shown(kind.name, 80)} are not supported, expected numbers")
        content = self.members.get(f"{self.folder}/data/{name}")
        if content is None:
            raise _MalformedError(f"the member data/{shown(name, 80)} is missing")
        if len(content) != count * dtype.itemsize:
            raise _MalformedError(
                f"the member data/{shown(name, 80)} has {len(content)} bytes, expected {count} values of {dtype.itemsize}"
            )
        return _Storage(np.frombuffer(content, dtype))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62


def _rebuild_tensor(arguments: tuple[object, ...]) -> Tensor:
    """A tensor from (storage, offset, shape, strides, ...): ``torch._utils._rebuild_tensor_v2``."""
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], _Storage):
        raise _MalformedError("a tensor without a storage")
    values = arguments[0].values
    offset, shape, strides = cast("tuple[Any, Any, Any]", arguments[1:4])
    if (
        not isinstance(shape, tuple)
        or not isinstance(strides, tuple)
        or len(shape) != len(strides)
        or len(shape) > _MOST_RANK
        or not all(_is_count(v) for v in (offset, *shape, *strides))
    ):
        raise _MalformedError(f"the shape or the strides of a tensor are no lists of up to {_MOST_RANK} sizes")
    # Python's integers do not overflow. The second condition refuses strides of 0, which repeat values.
    last, size = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)), math.prod(shape)
    if size and (last >= len(values) or size > len(values)):
        raise _MalformedError(
            f"a tensor {list(shape)} with strides {list(strides)} does not lie in {len(values)} values"
        )
    if not size:
        return np.zeros(0, values.dtype)
    steps = [s * values.itemsize for s in strides]
    return np.asarray(np.lib.stride_tricks.as_strided(values[offset:], shape, steps, writeable=False))


def _rebuild_parameter(arguments: tuple[object, ...]) -> Tensor:
    """A tensor from (tensor, requires_grad, hooks): ``torch._utils._rebuild_parameter``."""
    if len(arguments) != 3 or not isinstance(arguments[0], np.ndarray):
        raise _MalformedError("a parameter without a tensor")
    return arguments[0]


def _make_ordered_dictionary(arguments: tuple[object, ...]) -> dict[str, object]:
    if arguments:
        raise _MalformedError("an OrderedDict with arguments")
    return {}


_CALLS: dict[str, Callable[[tuple[object, ...]], object]] = {
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "collections.OrderedDict": _make_ordered_dictionary,
}
_GLOBALS = {*_CALLS, *(f"torch.{name}" for name in _DTYPES)}
_CONSTANTS: dict[str, object] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = {"PROTO", "FRAME"}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
}
_OPERATIONS = {
    *(*_IGNORED, *_CONSTANTS, *_LITERALS, "STOP", "MARK", "EMPTY_DICT", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2"),
    *("TUPLE3", "BINPUT", "LONG_BINPUT", "MEMOIZE", "BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "BINPERSID"),
    *("REDUCE", "SETITEM", "SETITEMS", "BUILD"),
}
_BY_CODE = {o.code.encode("latin-1"): o for o in pickletools.opcodes}


class _Interpreter:
    """A machine for the operations of a pickle that dictionaries of tensors need. The others are errors."""

    def __init__(self, pickle: bytes, storages: _Storages) -> None:
        if len(pickle) > _MOST_STRUCTURE:
            raise _MalformedError(f"it has {len(pickle)} bytes, expected up to {_MOST_STRUCTURE}")
        self.pickle, self.storages = pickle, storages
        self.stack: list[object] = []
        self.memo: dict[int, object] = {}

    def run(self) -> object:
        """The object that the pickle holds."""
        try:
            stream = io.BytesIO(self.pickle)
            while code := stream.read(1):
                operation = _BY_CODE.get(code)
                if operation is None or operation.name not in _OPERATIONS:
                    name = "unknown" if operation is None else operation.name
                    raise _MalformedError(f"the operation {name} is none that dictionaries of tensors need")
                if operation.name == "STOP":
                    return self._pop(object)
                if operation.name == "GLOBAL":  # the reader of pickletools takes escapes for characters
                    self._push_global(".".join(_line(stream) for _ in range(2)))
                else:
                    self._execute(operation.name, None if operation.arg is None else operation.arg.reader(stream))
        except ValueError as error:  # an argument is cut off, or is no text
            raise _MalformedError(f"a damaged pickle: {error}") from None
        raise _MalformedError("a pickle without an end")

    def _execute(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _IGNORED:
            return
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            stack.append(argument)
        elif name == "MARK":
            stack.append(_Mark())
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            stack.append(tuple(reversed([self._pop(object) for _ in range(int(name[-1]))])))
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if name == "MEMOIZE" else argument] = self._top()
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self.memo:
                raise _MalformedError("a damaged pickle: it names a value that is not there")
            stack.append(self.memo[argument])
        elif name == "STACK_GLOBAL":
            attribute, module = self._pop(str), self._pop(str)
            self._push_global(f"{module}.{attribute}")
        elif name == "BINPERSID":
            stack.append(self.storages.find(self._pop(object)))
        elif name == "REDUCE":
            arguments, called = self._pop(tuple), self._pop(_Global)
            if called.name not in _CALLS:
                raise _MalformedError(f"it calls {called.name}, which makes no tensor")
            stack.append(_CALLS[called.name](arguments))
        elif name == "SETITEMS":
            items = self._pop_to_mark()
            self._set_items(items)
        elif name == "SETITEM":
            value, key = self._pop(object), self._pop(object)
            self._set_items([key, value])
        elif name == "BUILD":  # attributes of a state dictionary: versions of modules
            self._pop(object)
            self._top()

    def _push_global(self, name: str) -> None:
        if name not in _GLOBALS:
            raise _MalformedError(f"it names {shown(name, 120)}; only tensors are read")
        self.stack.append(_Global(name))

    def _set_items(self, items: list[object]) -> None:
        target = self._top()
        if not isinstance(target, dict) or len(items) % 2:
            raise _MalformedError("a damaged pickle: items without a dictionary")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise _MalformedError("a name of a tensor is no text")
            target[key] = value

    def _top(self) -> object:
        if not self.stack:
            raise _MalformedError("a damaged pickle: it takes a value that is not there")
        return self.stack[-1]

    def _pop(self, kind: type[Any]) -> Any:
        value = self._top()
        if isinstance(value, _Mark) or not isinstance(value, kind):
            raise _MalformedError(f"a damaged pickle: {type(value).__name__} where {kind.__name__} is expected")
        return self.stack.pop()

    def _pop_to_mark(self) -> list[object]:
        for i in reversed(range(len(self.stack))):
            if isinstance(self.stack[i], _Mark):
                arguments = self.stack[i + 1 :]
                del self.stack[i:]
                return arguments
        raise _MalformedError("a damaged pickle: arguments without a beginning")


def _line(stream: io.BytesIO) -> str:
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise _MalformedError("a damaged pickle: a name without an end")
    return line[:-1].decode()


def _name_tensors(content: object, size: int) -> dict[str, Tensor]:
    """The tensors of what a pickle holds, with no more bytes than the file has."""
    tensors = {"": content} if isinstance(content, np.ndarray) else content
    if not isinstance(tensors, dict):
        raise _MalformedError("it holds neither a tensor nor a dictionary of tensors")
    for name, tensor in tensors.items():
        if not isinstance(tensor, np.ndarray):
            raise _MalformedError(f"{shown(name, 80)!r} is no tensor")
    held = sum(int(t.size) for t in tensors.values())
    if held > size:
        raise _MalformedError(f"its tensors have {held} values in a file of {size} bytes")
    return {n: _widen_bf16(t) if t.dtype == _BF16 else t for n, t in tensors.items()}


def _widen_bf16(tensor: Tensor) -> Tensor:
    """bf16 as fp32."""
    return np.asarray((tensor["bf16"].astype(np.uint32) << np.uint32(16)).view(np.float32))
