# SPDX-License-Identifier: Apache-2.0
"""Resident memory of a process on Linux: its proportional set size (Pss), in which a page of n processes counts 1/n in each."""

from __future__ import annotations

import os
import re
from pathlib import Path

from stof.errors import StofError

_PSS = re.compile(r"^Pss: +(\d+) kB$", re.MULTILINE)


def resident_bytes(process: int | None = None) -> int:
    """The Pss of a process in bytes.

    Args:
        process: its id; None: this one.

    Raises:
        StofError: where the system does not tell, or not of this process.
    """
    found = _PSS.search(_read(process, "smaps_rollup"))
    if found is None:
        raise StofError("this kernel does not tell the Pss of a process")
    return int(found[1]) << 10


def mapped_resident_bytes(file: Path, process: int | None = None) -> int:
    """The part of a process's Pss that lies in mappings of a file, in bytes.

    Args:
        file: a file that runtimes map, as external data of a model.
        process: its id; None: this one.

    Raises:
        StofError: as :func:`resident_bytes`.
    """
    path, total, is_of_file = str(file.resolve()), 0, False
    for line in _read(process, "smaps").splitlines():
        head = line.split(maxsplit=5)
        if "-" in head[0] and not head[0].endswith(":"):
            is_of_file = len(head) == 6 and head[5].removesuffix(" (deleted)") == path
        elif is_of_file and (found := _PSS.match(line)):
            total += int(found[1]) << 10
    return total


def drop_cached_pages(file: Path) -> None:
    """Asks the system to forget pages of a file that no process maps, so that only what is read next becomes resident."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # pages that wait to be written are not forgotten
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _read(process: int | None, name: str) -> str:
    path = Path("/proc") / ("self" if process is None else str(process)) / name
    try:
        return path.read_text()
    except OSError as error:
        raise StofError(
            f"{path} cannot be read: {error.strerror or error}; resident memory is measured on Linux"
        ) from None
