# SPDX-License-Identifier: Apache-2.0
"""Locks of files and folders between processes; file systems without locks are worked on without them."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def try_lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Locks an open file without waiting: whether it could, None where the file system has no locks.

    The lock goes when the file is closed, at the latest with the process. A shared one excludes none but exclusive ones.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Holds an exclusive lock on a folder; waits for other processes that hold it.

    Raises:
        OSError: when the folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
