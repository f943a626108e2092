# SPDX-License-Identifier: Apache-2.0
"""Locks of files and folders between processes; file systems without locks are worked on without them.

The package filelock has no locks of a file that is open already, and none that are shared: these have both.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stof.system.descriptors import READ

if sys.platform == "win32":
    from stof.system.windows_api import lock_file

    _LOCK_NAME = ".stof.lock"  # Windows opens no folders
else:
    import fcntl

    def lock_file(descriptor: int, *, shared: bool, waits: bool) -> None:
        """Locks an open file, until it is closed.

        Raises:
            BlockingIOError: when somebody else has the lock, and it is not waited for.
            OSError: when the file system has no locks.
        """
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if waits else fcntl.LOCK_NB))


def try_lock(descriptor: int, *, shared: bool = False) -> bool | None:
    """Locks an open file without waiting: whether it could, None where the file system has no locks.

    The lock goes when the file is closed, at the latest with the process. A shared one excludes none but exclusive ones.
    """
    try:
        lock_file(descriptor, shared=shared, waits=False)
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
    descriptor = _open_for_lock(folder)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            lock_file(descriptor, shared=False, waits=True)
        yield
    finally:
        os.close(descriptor)
        if sys.platform == "win32":
            with contextlib.suppress(OSError):  # others wait for the lock: the last one removes it
                (folder / _LOCK_NAME).unlink()


def _open_for_lock(folder: Path) -> int:
    if sys.platform == "win32":
        return os.open(folder / _LOCK_NAME, os.O_RDWR | os.O_CREAT)
    return os.open(folder, READ)
