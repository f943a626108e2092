# SPDX-License-Identifier: Apache-2.0
"""Temporary files and folders: locked by their process, and removed at its end or, where it was killed, by a later run.

Each has a random name in its own folder. A process holds a lock on each of its temporaries while it works. The next run in the
folder removes temporaries whose lock it can take: their process was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stof.errors import ArgumentError
from stof.files.locks import try_lock
from stof.files.reading import open_regular
from stof.system.descriptors import CREATE, READ, UPDATE, read_at

_TEMPORARY = re.compile(r"\.stof-[0-9a-f]{32}\.tmp")
_LOCK, _CONTENT = "lock", "files"  # what a temporary folder holds
_ATTEMPTS = 100  # another run may take a temporary between its creation and its lock, but not each time
_BLOCK = 1 << 20  # bytes copied at a time, and read back at both ends of a copy
_AGE = 60.0  # seconds after which Windows takes a file without a lock for a leftover
_temporaries: dict[Path, int] = {}  # with the process that made each: forked children must not remove their parent's


class TemporaryFile:
    """A file under a random name, locked by this process. It becomes an output, under the output's name, once it is complete.

    Attributes:
        path: its random name.
        file: the open file.
        is_locked: False only where the file system has no locks.
    """

    def __init__(self, path: Path, file: BinaryIO, is_locked: bool) -> None:
        self.path = path
        self.file = file
        self.is_locked = is_locked
        self._status = os.fstat(file.fileno())

    def write(self, data: bytes | memoryview) -> None:
        """Writes bytes, as :meth:`write_pieces` does."""
        self.write_pieces([data])

    def write_pieces(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Writes pieces one after the other. An OSError says that the disk has not taken all of them."""
        size = 0
        for piece in pieces:
            self.file.write(piece)
            size += memoryview(piece).nbytes
        self._check_size(size)

    def copy(self, source: Path) -> None:
        """Copies a file, and checks the size of the copy and its ends against the source.

        Raises:
            OSError: when one cannot be read or the other not written.
            ArgumentError: when the source changed meanwhile.
        """
        with open_regular(source) as original:
            before = os.fstat(original.fileno())
            shutil.copyfileobj(original, self.file, _BLOCK)
            after = os.fstat(original.fileno())
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise ArgumentError(f"{source} changed while it was copied; run again when nothing writes to it")
            self._check_size(before.st_size)
            for offset in (0, max(0, before.st_size - _BLOCK)):
                expected, copied = (read_at(f.fileno(), _BLOCK, offset) for f in (original, self.file))
                if expected != copied:
                    raise OSError(f"the copy of {source} reads back as other bytes from {offset} on")

    def _check_size(self, size: int) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        written = os.fstat(self.file.fileno()).st_size
        if written != size:
            raise OSError(f"{written} of {size} bytes were written")

    def replace(self, target: Path) -> None:
        """Renames the file to the output's name, and so replaces a file that has it.

        Raises:
            OSError: when it cannot be renamed. On Windows another program that has the target open hinders that.
        """
        self._rename(target)
        _sync_folder(target.parent)

    def publish(self, target: Path) -> None:
        """Gives the file the output's name, which no file may have yet.

        Raises:
            FileExistsError: when it does.
        """
        try:
            target.hardlink_to(self.path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links: the name is taken first, then replaced
            os.close(os.open(target, CREATE, 0o666))
            try:
                self._rename(target)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
        _sync_folder(target.parent)

    def _rename(self, target: Path) -> None:
        if sys.platform == "win32":  # which renames no open file
            self.close()
        try:
            self.path.replace(target)
        except PermissionError as error:
            if sys.platform == "win32" and target.is_file():
                raise PermissionError(
                    error.errno, f"another program may have it open, close it there ({error.strerror})"
                ) from error
            raise

    def close(self) -> None:
        """Closes the file, and so gives up its lock."""
        self.file.close()

    def is_temporary(self) -> bool:
        """Whether it still has its random name only: then it is removed at the end."""
        return os.path.lexists(self.path)

    def is_at(self, target: Path) -> bool:
        """Whether a path is this file."""
        return _is_at(self._status, target)


def _sync_folder(folder: Path) -> None:
    """The new name outlasts a power failure, where the file system can promise that. Windows opens no folders."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, READ)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def temporary_file(folder: Path) -> Iterator[TemporaryFile]:
    """A new file in a folder, with the mode of any new file, removed at the end unless it was renamed.

    Raises:
        OSError: when none can be made there.
    """
    for _ in range(_ATTEMPTS):
        path = _register_path(folder)
        try:
            created = _create_locked(path)
            if created is not None:
                file, is_locked = created
                with file:
                    yield TemporaryFile(path, file, is_locked)
                return
        finally:
            _remove_registered(path)
    raise OSError(f"other processes remove new files in {folder}")


@contextmanager
def temporary_folder(parent: Path | None = None) -> Iterator[Path]:
    """A new folder, by default where the system keeps temporary files, removed with all that is in it.

    Raises:
        OSError: when none can be made there.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    remove_leftovers(parent)
    for _ in range(_ATTEMPTS):
        path = _register_path(parent)
        try:
            path.mkdir(mode=0o700)
            created = None
            with contextlib.suppress(FileNotFoundError):  # another run took the folder for a leftover
                created = _create_locked(path / _LOCK)
            if created is not None:
                with created[0]:
                    (path / _CONTENT).mkdir()
                    yield path / _CONTENT
                    _remove_registered(path)
                return
        finally:
            _remove_registered(path)
    raise OSError(f"other processes remove new folders in {parent}")


def _register_path(folder: Path) -> Path:
    path = folder.absolute() / f".stof-{secrets.token_hex(16)}.tmp"
    _temporaries[path] = os.getpid()  # before it exists, so that no interrupt comes between
    return path


def _create_locked(path: Path) -> tuple[BinaryIO, bool] | None:
    """Makes a file and locks it; None when another process took it for a leftover meanwhile.

    Returns:
        The file, and whether it is locked: not where the file system has no locks.
    """
    descriptor = os.open(path, CREATE, 0o666)
    try:
        is_locked = try_lock(descriptor)
        if is_locked is not False and _is_at(os.fstat(descriptor), path):
            return os.fdopen(descriptor, "w+b"), is_locked is True
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(status: os.stat_result, path: Path) -> bool:
    try:
        return os.path.samestat(status, path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove_registered(path: Path) -> None:
    with contextlib.suppress(OSError):
        _remove(path)
    if sys.platform != "win32" or not os.path.lexists(path):  # Windows removes no open files: the end tries again
        _temporaries.pop(path, None)


def _remove(path: Path) -> None:
    """Removes a temporary; a folder's lock last, so that one whose removal was cut short is known for a leftover."""
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path / _CONTENT)
        (path / _LOCK).unlink(missing_ok=True)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def remove_temporaries() -> None:
    """Removes what this process has not finished. It may be called at any moment; the end of the process calls it."""
    for path, process in list(_temporaries.items()):
        if process == os.getpid():
            _remove_registered(path)


atexit.register(remove_temporaries)


def remove_leftovers(folder: Path) -> None:
    """Removes temporaries of killed runs from a folder; those of running ones, and of other users, stay."""
    try:
        with os.scandir(folder) as entries:
            leftovers = [Path(e.path) for e in entries if _TEMPORARY.fullmatch(e.name)]
    except OSError:
        return
    for path in leftovers:
        with contextlib.suppress(OSError):
            _remove_leftover(path)


def _remove_leftover(path: Path) -> None:
    status = path.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    if not (is_folder or stat.S_ISREG(status.st_mode)):
        return
    if sys.platform == "win32":
        # A file is closed before it gets its final name, and then has no lock for a moment.
        if time.time() - status.st_mtime < _AGE:
            return
    elif status.st_uid != os.geteuid():
        return
    if is_folder:
        with contextlib.suppress(OSError):
            path.rmdir()  # one that was not locked yet is empty
            return
    held = path / _LOCK if is_folder else path
    descriptor = os.open(held, UPDATE)
    try:
        is_left = bool(try_lock(descriptor)) and _is_at(os.fstat(descriptor), held)
        if is_left and sys.platform != "win32":  # with the lock, so that no other run removes it meanwhile
            _remove(path)
    finally:
        os.close(descriptor)
    if is_left and sys.platform == "win32":
        _remove(path)
