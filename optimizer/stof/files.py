# SPDX-License-Identifier: Apache-2.0
"""Checks on the files that a run writes, before any work, and text files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from stof.errors import ArgumentError


def same(first: Path, second: Path) -> bool:
    """Whether two paths are one file, through links too, or would be one if they existed."""
    if first.exists() and second.exists():
        return first.samefile(second)
    return first.resolve() == second.resolve()


def check_outputs(read: Mapping[str, Path], written: Mapping[str, Path]) -> None:
    """Refuses outputs that would replace what is read, or each other, and folders that cannot be written.

    Args:
        read: what the run reads, by its name in messages ("input", "external data 'x'").
        written: what it will write, likewise ("output", "report").

    Raises:
        ArgumentError: naming the file, before anything was written.
    """
    seen: list[tuple[str, Path]] = []
    for name, path in written.items():
        for other, known in read.items():
            if same(path, known):
                raise ArgumentError(f"the {name} {path} is the {other}; choose another file")
        for other, known in seen:
            if same(path, known):
                raise ArgumentError(f"the {name} {path} is the {other} too; choose another file for one of them")
        seen.append((name, path))
        check_place(name, path)


def check_place(name: str, path: Path) -> None:
    """Whether a file can be made at a path: permission bits say little to root or on network mounts, so one is made.

    Raises:
        ArgumentError: naming the file and what hinders.
    """
    if path.is_dir():
        raise ArgumentError(f"the {name} {path} is a folder; name a file")
    if path.exists() and not path.is_file():
        raise ArgumentError(f"the {name} {path} is a device or a pipe, which would be replaced; name a file")
    if not path.parent.is_dir():
        raise ArgumentError(f"the folder {path.parent} of the {name} does not exist; make it, or choose another file")
    try:
        handle, probe = tempfile.mkstemp(dir=path.parent, prefix=".stof-")
        os.close(handle)
        Path(probe).unlink()
    except OSError as error:
        raise ArgumentError(
            f"the {name} {path} cannot be written: {error.strerror or error}; choose a folder that can be"
        ) from error


def read_text(name: str, path: Path) -> str:
    """The text of a file.

    Raises:
        ArgumentError: naming the file, when it cannot be read or is no UTF-8 text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ArgumentError(f"the {name} {path} does not exist") from None
    except OSError as error:
        raise ArgumentError(f"the {name} {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ArgumentError(f"the {name} {path} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def write_text(name: str, path: Path, lines: Iterable[str]) -> None:
    """Writes lines of text, whole or not at all.

    Raises:
        ArgumentError: naming the file, when it cannot be written; what was there before stays.
    """
    write_bytes(name, path, "".join(f"{line}\n" for line in lines).encode())


def write_bytes(name: str, path: Path, data: bytes | memoryview) -> None:
    """Writes bytes, whole or not at all.

    Raises:
        ArgumentError: naming the file, when it cannot be written; what was there before stays.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".stof-", delete=False) as file:
            temporary = Path(file.name)
            file.write(data)
        # mkstemp makes private files; these get what a plain open() would have given them.
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
        temporary = None
    except OSError as error:
        raise ArgumentError(f"the {name} {path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
