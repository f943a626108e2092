# SPDX-License-Identifier: Apache-2.0
"""Flags and reads of file descriptors that mean the same on each system. Python makes none of them inheritable."""

from __future__ import annotations

import os
import sys

if sys.platform == "win32":
    # Without O_BINARY the C runtime translates ends of lines, also below a binary file of Python.
    READ = os.O_RDONLY | os.O_BINARY
    READ_REGULAR = READ
    UPDATE = os.O_RDWR | os.O_BINARY
    CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_BINARY

    def read_at(descriptor: int, count: int, offset: int) -> bytes:
        """Bytes from an offset on; the position of the descriptor stays."""
        position = os.lseek(descriptor, 0, os.SEEK_CUR)
        try:
            os.lseek(descriptor, offset, os.SEEK_SET)
            return os.read(descriptor, count)
        finally:
            os.lseek(descriptor, position, os.SEEK_SET)

else:
    READ = os.O_RDONLY
    # To open a pipe, which a path may have become meanwhile, waits for a writer.
    READ_REGULAR = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
    UPDATE = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW
    CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW

    def read_at(descriptor: int, count: int, offset: int) -> bytes:
        """Bytes from an offset on; the position of the descriptor stays."""
        return os.pread(descriptor, count, offset)
