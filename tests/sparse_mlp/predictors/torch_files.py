# SPDX-License-Identifier: Apache-2.0
"""Files as torch.save writes them, made without PyTorch, and with any part of them replaced."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

STORAGES = {"f4": "FloatStorage", "f2": "HalfStorage", "f8": "DoubleStorage", "i8": "LongStorage", "i4": "IntStorage"}
Tensors = Mapping[str, npt.NDArray[np.generic]] | npt.NDArray[np.generic]


def text(value: str) -> bytes:
    """Pushes a text."""
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def number(value: int) -> bytes:
    """Pushes an integer."""
    if 0 <= value < 1 << 31:
        return b"J" + struct.pack("<i", value)
    encoded = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(encoded)]) + encoded


def named(module: str, name: str) -> bytes:
    """Pushes what a module has under a name."""
    return f"c{module}\n{name}\n".encode()


def numbers(values: tuple[int, ...]) -> bytes:
    """Pushes a tuple of integers."""
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    member: str,
    kind: str,
    count: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
    rebuild: tuple[str, str] = ("torch._utils", "_rebuild_tensor_v2"),
) -> bytes:
    """Pushes a tensor; its values lie in a member of the archive."""
    if strides is None:
        strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
    storage = b"(" + text("storage") + named("torch", kind) + text(member) + text("cpu") + number(count) + b"tQ"
    hooks = named("collections", "OrderedDict") + b")R"
    return (
        named(*rebuild) + b"(" + storage + number(offset) + numbers(shape) + numbers(strides) + b"\x89" + hooks + b"tR"
    )


def dictionary(items: Mapping[str, bytes], ordered: bool = True) -> bytes:
    """Pushes a dictionary: that of a module, or a plain one."""
    head = named("collections", "OrderedDict") + b")R" if ordered else b"}"
    # A module's dictionary carries the versions of its parts as an attribute.
    tail = b"}" + text("_metadata") + b"}sb" if ordered else b""
    return head + b"q\x00(" + b"".join(text(k) + v for k, v in items.items()) + b"u" + tail


def pickled(content: bytes) -> bytes:
    """The pickle of what was pushed."""
    return b"\x80\x02" + content + b"."


def archive(members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A zip archive."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return data.getvalue()


def members_of(tensors: Tensors, ordered: bool = True) -> dict[str, bytes]:
    """The members of a file with these tensors."""
    values = {"": tensors} if isinstance(tensors, np.ndarray) else dict(tensors)
    pushed = {n: tensor(str(i), STORAGES[a.dtype.str[1:]], a.size, a.shape) for i, (n, a) in enumerate(values.items())}
    content = pushed[""] if isinstance(tensors, np.ndarray) else dictionary(pushed, ordered)
    data = {f"saved/data/{i}": a.tobytes() for i, a in enumerate(values.values())}
    return {"saved/data.pkl": pickled(content), "saved/byteorder": b"little", **data, "saved/version": b"3\n"}


def save(path: Path, tensors: Tensors, ordered: bool = True) -> Path:
    """Writes a file with these tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(archive(members_of(tensors, ordered)))
    return path
