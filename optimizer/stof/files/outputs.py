# SPDX-License-Identifier: Apache-2.0
"""Output files: checked before long steps, and written whole or not at all (atomic writes).

Every output is written to a temporary of a random name in its own folder, checked, and renamed.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterable, Mapping
from pathlib import Path

from stof.errors import ArgumentError
from stof.files.reading import os_reason, path_error, stat_file
from stof.files.temporary import remove_leftovers, temporary_file


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
    sources = {name: _FileIdentity.of(name, path) for name, path in read.items()}
    copies = {name: _FileIdentity.of(name, path) for name, path in (copied or {}).items()}
    seen: dict[str, _FileIdentity] = {}
    for name, path in written.items():
        check_writable(name, path)
        output = _FileIdentity.of(name, path)
        for other, identity in sources.items():
            if output.collides_with(identity):
                raise ArgumentError(f"the {name} {path} is the {other}; choose another file")
        for other, identity in copies.items():
            if output.collides_with(identity):
                raise ArgumentError(
                    f"the {name} {path} is where {other} is copied, which the output needs; choose another file"
                )
        for other, identity in seen.items():
            if output.collides_with(identity):
                raise ArgumentError(f"the {name} {path} is the {other} too; choose another file for one of them")
        seen[name] = output


class _FileIdentity:
    """What a path stands for: an existing file, or a name that does not exist below an existing folder."""

    def __init__(self, base: Path, status: os.stat_result, names: tuple[str, ...]) -> None:
        self.base = base
        self.inode = (status.st_dev, status.st_ino)
        self.is_folder = stat.S_ISDIR(status.st_mode) and not names
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
            raise path_error(name, path, error) from error

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


def check_writable(name: str, path: Path) -> None:
    """Refuses a path at which no file can be written.

    Permission bits say little to root or on network mounts, so that a temporary file is made there.

    Raises:
        ArgumentError: naming the file and what hinders.
    """
    status = stat_file(name, path)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise ArgumentError(f"the {name} {path} is a folder; name a file")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise ArgumentError(f"the {name} {path} is a device or a pipe, which would be replaced; name a file")
    if not path.parent.is_dir():
        raise ArgumentError(f"the folder {path.parent} of the {name} does not exist; make it, or choose another file")
    remove_leftovers(path.parent)
    try:
        with temporary_file(path.parent):
            pass
    except OSError as error:
        raise ArgumentError(
            f"the {name} {path} cannot be written: {os_reason(error)}; choose a folder that can be"
        ) from error


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
        raise ArgumentError(f"the {name} {path} cannot be written: {os_reason(error)}") from error
