# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime writes to standard error, in a child process or while it is imported, kept rather than printed."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from stof.system.descriptors import CREATE, READ, read_at

_MOST = 1 << 14  # bytes that are read back
_LAST_LINES = 3
_LONGEST = 400  # characters of a summary
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class CapturedMessages:
    """A file without a name that a process gets as its standard error; on Linux it is in memory.

    Attributes:
        descriptor: of the file, for the process.
    """

    def __init__(self) -> None:
        self.descriptor, self._reader = _open_twice()

    def clear(self) -> None:
        """Forgets what was written. The process goes on where it was: what lies before reads as zeros."""
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Frees the file once the process has ended, too."""
        for descriptor in {self.descriptor, self._reader}:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def text(self) -> str:
        """What was written last, without colors; may be empty."""
        size = os.fstat(self._reader).st_size
        data = read_at(self._reader, _MOST, max(0, size - _MOST)).lstrip(b"\0")
        return _COLORS.sub("", data.decode("utf-8", "replace")).strip()

    def summary(self) -> str:
        """The last lines as one, for a message; may be empty."""
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        return "; ".join(lines[-_LAST_LINES:])[-_LONGEST:]


def _open_twice() -> tuple[int, int]:
    """Descriptors of a file that is gone with its last user: to write, and to read without moving where the process writes."""
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("stof-messages", os.MFD_CLOEXEC)
        return descriptor, descriptor
    path = Path(tempfile.gettempdir()) / f".stof-{secrets.token_hex(16)}.messages"
    if sys.platform == "win32":  # O_TEMPORARY: removed when it is closed
        return os.open(path, CREATE | os.O_TEMPORARY), os.open(path, READ | os.O_TEMPORARY)
    descriptor = os.open(path, CREATE, 0o600)
    path.unlink()
    return descriptor, descriptor


def import_onnxruntime() -> ModuleType:
    """Imports ONNX Runtime into this process without the warnings that it prints meanwhile, about devices for instance.

    Raises:
        ImportError: when it cannot be imported.
    """
    if "onnxruntime" in sys.modules:
        return importlib.import_module("onnxruntime")
    with _discard_stderr():
        return importlib.import_module("onnxruntime")


@contextlib.contextmanager
def _discard_stderr() -> Iterator[None]:
    """Sends what libraries write to descriptor 2 nowhere."""
    try:
        before = os.dup(2)
    except OSError:  # closed: nothing is printed anyway
        yield
        return
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
