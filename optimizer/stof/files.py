# SPDX-License-Identifier: Apache-2.0
"""Files that are read, and output files that appear whole or not at all (atomic writes).

Every output is written to a temporary of a random name in its own folder, checked, and renamed. A process holds a lock on
each of its temporaries while it works. The next run in the folder removes temporaries whose lock it can take: their
process was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from stof.errors import ArgumentError

_TEMPORARY = re.compile(r"\.stof-[0-9a-f]{32}\.tmp")
_LOCK, _CONTENT = "lock", "files"  # what a temporary folder holds
_ATTEMPTS = 100  # another run may take a temporary between its creation and its lock, but not each time
_BLOCK = 1 << 20  # bytes copied at a time, and read back at both ends of a copy
_MOST_TEXT = 1 << 28  # bytes of a plan
_temporaries: dict[Path, int] = {}  # with the process that made each: forked children must not remove their parent's


def check_outputs(
    read: Mapping[str, Path], written: Mapping[str, Path], copied: Mapping[str, Path] | None = None
) -> None:
    """Refuses outputs that would replace what is read, or each other, and folders that cannot be written.

    Two paths are one file also through symbolic links, hard links and file systems that ignore case. Leftovers of killed
    runs in the folders of the outputs are removed.

    Args:
        read: what the run reads, by its name in messages ("input", "external data 'x'").
        written: what it will write, likewise ("output", "report").
        copied: where it will copy data that the output needs, likewise.

    Raises:
        ArgumentError: naming the file, before anything was written.
    """
    known = {name: _FileIdentity.of(name, path) for name, path in read.items()}
    copies = {name: _FileIdentity.of(name, path) for name, path in (copied or {}).items()}
    seen: dict[str, _FileIdentity] = {}
    for name, path in written.items():
        check_writable(name, path)
        own = _FileIdentity.of(name, path)
        for other, identity in known.items():
            if own.collides_with(identity):
                raise ArgumentError(f"the {name} {path} is the {other}; choose another file")
        for other, identity in copies.items():
            if own.collides_with(identity):
                raise ArgumentError(
                    f"the {name} {path} is where {other} is copied, which the output needs; choose another file"
                )
        for other, identity in seen.items():
            if own.collides_with(identity):
                raise ArgumentError(f"the {name} {path} is the {other} too; choose another file for one of them")
        seen[name] = own


class _FileIdentity:
    """What a path stands for: an existing file, or a name that does not exist below an existing folder."""

    def __init__(self, base: Path, found: os.stat_result, names: tuple[str, ...]) -> None:
        self.base = base
        self.inode = (found.st_dev, found.st_ino)
        self.is_folder = stat.S_ISDIR(found.st_mode) and not names
        self.names = names

    @staticmethod
    def of(name: str, path: Path) -> _FileIdentity:
        """What a path stands for; ``name`` is for messages.

        Raises:
            ArgumentError: for a path that no file can have.
        """
        base, names = path, tuple[str, ...]()
        try:
            base = Path(os.path.realpath(path))  # Path.resolve raises on a cycle of links
            while True:
                try:
                    return _FileIdentity(base, base.stat(), names)
                except (FileNotFoundError, NotADirectoryError):
                    base, names = base.parent, (base.name, *names)
        except (OSError, ValueError) as error:
            raise _path_error(name, path, error) from error

    def collides_with(self, other: _FileIdentity) -> bool:
        """Whether both cannot exist side by side: they are one file, or one would have to be a folder of the other."""
        if self.inode != other.inode or self.is_folder != other.is_folder:
            return False
        shared = min(len(self.names), len(other.names))
        mine, theirs = self.names[:shared], other.names[:shared]
        return mine == theirs or (_fold_case(mine) == _fold_case(theirs) and ignores_case(self.base))


def _fold_case(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(unicodedata.normalize("NFD", unicodedata.normalize("NFD", n).casefold()) for n in names)


def ignores_case(folder: Path) -> bool:
    """Whether names in a folder that differ in case only are one file."""
    with temporary_file(folder) as probe:
        return os.path.lexists(folder / probe.path.name.upper())


def _path_error(name: str, path: Path, error: OSError | ValueError) -> ArgumentError:
    return ArgumentError(f"the {name} {path} cannot be used: {_os_reason(error)}; choose another file")


def _os_reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def stat_file(name: str, path: Path) -> os.stat_result | None:
    """What is at a path, behind links; None where nothing is.

    Raises:
        ArgumentError: where that cannot be told: names that are too long, links in a cycle, folders that cannot be entered.
    """
    try:
        return path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _path_error(name, path, error) from error


def is_utf8(path: Path) -> bool:
    """Whether the name is text: names of files are bytes, and libraries in C++ take those in UTF-8 only."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def check_writable(name: str, path: Path) -> None:
    """Refuses a path at which no file can be written.

    Permission bits say little to root or on network mounts, so that a temporary file is made there.

    Raises:
        ArgumentError: naming the file and what hinders.
    """
    found = stat_file(name, path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise ArgumentError(f"the {name} {path} is a folder; name a file")
    if found is not None and not stat.S_ISREG(found.st_mode):
        raise ArgumentError(f"the {name} {path} is a device or a pipe, which would be replaced; name a file")
    if not path.parent.is_dir():
        raise ArgumentError(f"the folder {path.parent} of the {name} does not exist; make it, or choose another file")
    remove_leftovers(path.parent)
    try:
        with temporary_file(path.parent):
            pass
    except OSError as error:
        raise ArgumentError(
            f"the {name} {path} cannot be written: {_os_reason(error)}; choose a folder that can be"
        ) from error


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Nothing else is opened: a pipe would wait, a device may have no end.

    Raises:
        OSError: when it cannot be opened; IsADirectoryError for folders.
    """
    _check_regular(path.stat())
    # The file may be another one by now, and opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "a device or a pipe, expected a file")


def read_bytes(name: str, path: Path, most: int | None = None) -> bytes:
    """The content of a regular file, of at most so many bytes.

    Raises:
        ArgumentError: naming the file, when it cannot be read or is larger.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if most is not None and size > most:
                raise ArgumentError(f"the {name} {path} has {size} bytes, expected at most {most}")
            return file.read(size)  # files of /proc name no size and may have no end
    except FileNotFoundError:
        raise ArgumentError(f"the {name} {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ArgumentError(f"the {name} {path} cannot be read: {_os_reason(error)}") from error


def read_text(name: str, path: Path, most: int = _MOST_TEXT) -> str:
    """The text of a file of at most so many bytes.

    Raises:
        ArgumentError: naming the file, when it cannot be read, is larger or is no UTF-8 text.
    """
    try:
        return read_bytes(name, path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"the {name} {path} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def write_text(name: str, path: Path, lines: Iterable[str]) -> None:
    """Writes lines of text, whole or not at all. What UTF-8 cannot say is written as the escapes of JSON.

    Raises:
        ArgumentError: naming the file, when it cannot be written; what was there before stays.
    """
    write_bytes(name, path, "".join(f"{line}\n" for line in lines).encode("utf-8", "backslashreplace"))


def write_bytes(name: str, path: Path, data: bytes | memoryview) -> None:
    """Writes bytes, whole or not at all.

    Raises:
        ArgumentError: naming the file, when it cannot be written; what was there before stays.
    """
    try:
        with temporary_file(path.parent) as new:
            new.write(data)
            new.replace(path)
    except OSError as error:
        raise ArgumentError(f"the {name} {path} cannot be written: {_os_reason(error)}") from error


class TemporaryFile:
    """A file under a random name, locked by this process. It becomes an output, under the output's name, once it is complete."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path = path
        self.file = file
        self.is_locked = try_lock(file.fileno()) is True  # False only where the file system has no locks

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
        with open_regular(source) as given:
            before = os.fstat(given.fileno())
            shutil.copyfileobj(given, self.file, _BLOCK)
            after = os.fstat(given.fileno())
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise ArgumentError(f"{source} changed while it was copied; run again when nothing writes to it")
            self._check_size(before.st_size)
            for offset in (0, max(0, before.st_size - _BLOCK)):
                expected, found = (os.pread(f.fileno(), _BLOCK, offset) for f in (given, self.file))
                if expected != found:
                    raise OSError(f"the copy of {source} reads back as other bytes from {offset} on")

    def _check_size(self, size: int) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        found = os.fstat(self.file.fileno()).st_size
        if found != size:
            raise OSError(f"{found} of {size} bytes were written")

    def replace(self, target: Path) -> None:
        """Renames the file to the output's name, and so replaces a file that has it."""
        self.path.replace(target)
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
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
            try:
                self.path.replace(target)
            except BaseException:
                target.unlink(missing_ok=True)
                raise
        _sync_folder(target.parent)

    def is_temporary(self) -> bool:
        """Whether it still has its random name only: then it is removed at the end."""
        return os.path.lexists(self.path)

    def is_at(self, target: Path) -> bool:
        """Whether a path is this file."""
        return _is_at(self.file.fileno(), target)


def _sync_folder(folder: Path) -> None:
    """The new name outlasts a power failure, where the file system can promise that."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
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
            file = _create_locked(path)
            if file is not None:
                with file:
                    yield TemporaryFile(path, file)
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
            file = None
            with contextlib.suppress(FileNotFoundError):  # another run took the folder for a leftover
                file = _create_locked(path / _LOCK)
            if file is not None:
                with file:
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


def _create_locked(path: Path) -> BinaryIO | None:
    """Makes a file and locks it; None when another process took it for a leftover meanwhile."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        if try_lock(descriptor) is not False and _is_at(descriptor, path):
            return os.fdopen(descriptor, "w+b")
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


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


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _remove_registered(path: Path) -> None:
    with contextlib.suppress(OSError):
        _remove(path)
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
            found = [Path(e.path) for e in entries if _TEMPORARY.fullmatch(e.name)]
    except OSError:
        return
    for path in found:
        with contextlib.suppress(OSError):
            _remove_leftover(path)


def _remove_leftover(path: Path) -> None:
    status = path.lstat()
    is_folder = stat.S_ISDIR(status.st_mode)
    if status.st_uid != os.geteuid() or not (is_folder or stat.S_ISREG(status.st_mode)):
        return
    if is_folder:
        with contextlib.suppress(OSError):
            path.rmdir()  # one that was not locked yet is empty
            return
    held = path / _LOCK if is_folder else path
    descriptor = os.open(held, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if try_lock(descriptor) and _is_at(descriptor, held):
            _remove(path)
    finally:
        os.close(descriptor)


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
