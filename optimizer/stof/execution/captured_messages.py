# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime writes to standard error, in a child process or while it is imported, kept rather than printed."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType

_MOST = 1 << 14  # bytes that are read back
_LAST_LINES = 3
_LONGEST = 400  # characters of a summary
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class CapturedMessages:
    """A file in memory that a process gets as its standard error.

    Attributes:
        descriptor: of the file, for the process.
    """

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("stof-messages", os.MFD_CLOEXEC)
        # The process goes on writing at the end, wherever that is after `clear`.
        fcntl.fcntl(self.descriptor, fcntl.F_SETFL, fcntl.fcntl(self.descriptor, fcntl.F_GETFL) | os.O_APPEND)

    def clear(self) -> None:
        """Forgets what was written."""
        os.ftruncate(self.descriptor, 0)

    def close(self) -> None:
        """Frees the memory once the process has ended, too."""
        with contextlib.suppress(OSError):
            os.close(self.descriptor)

    def text(self) -> str:
        """What was written last, without colors; may be empty."""
        size = os.fstat(self.descriptor).st_size
        data = os.pread(self.descriptor, _MOST, max(0, size - _MOST))
        return _COLORS.sub("", data.decode("utf-8", "replace")).strip()

    def summary(self) -> str:
        """The last lines as one, for a message; may be empty."""
        lines = [line.strip() for line in self.text().splitlines() if line.strip()]
        return "; ".join(lines[-_LAST_LINES:])[-_LONGEST:]


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
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
