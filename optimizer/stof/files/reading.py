# SPDX-License-Identifier: Apache-2.0
"""Regular files that are read, with messages that name them."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import stat
import sys
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from stof.errors import ArgumentError
from stof.files.hub_ids import is_hub_id
from stof.system.descriptors import READ_REGULAR

_MOST_NAMES = 1000  # of a folder, among which a misspelt one is looked for
_MOST_TEXT = 1 << 28  # bytes of a plan
_LONGEST_PATH = 259  # characters that Windows takes by default


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
        raise path_error(name, path, error) from error


def check_input(path: Path) -> None:
    """Refuses a model that is not there, before an output beside it is looked at.

    Raises:
        ArgumentError: with what the name may stand for: an address, a model of a hub, a misspelt file.
    """
    if stat_file("input", path) is not None:
        return
    if re.match(r"[a-z][a-z0-9+.-]+:/", path.as_posix(), re.IGNORECASE):  # one letter is a drive
        raise ArgumentError(f"the input {path} is an address, expected a file or folder; download the model first")
    hint = ""
    if not path.parent.is_dir():
        hint = f", nor does its folder {path.parent}"
        if is_hub_id(path):
            hint += f"; if it is a model of the hub, name a new folder: stof-optimize {path.as_posix()} -o FOLDER"
    else:
        with contextlib.suppress(OSError):  # a folder that cannot be read gives no hint
            names = [p.name for p in islice(path.parent.iterdir(), _MOST_NAMES)]
            close = difflib.get_close_matches(path.name, names, 1)
            hint = f"; did you mean {path.parent / close[0]}?" if close else ""
    raise ArgumentError(f"the input {path} does not exist{hint}")


def is_utf8(path: Path) -> bool:
    """Whether the name is text: names of files are bytes, and libraries in C++ take those in UTF-8 only."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def open_regular(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Nothing else is opened: a pipe would wait, a device may have no end.

    Raises:
        OSError: when it cannot be opened; IsADirectoryError for folders.
    """
    _check_regular(path.stat())
    descriptor = os.open(path, READ_REGULAR)  # the file may be another one by now
    try:
        _check_regular(os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
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
        raise ArgumentError(f"the {name} {path} cannot be read: {os_reason(error)}") from error


def read_text(name: str, path: Path, most: int = _MOST_TEXT) -> str:
    """The text of a file of at most so many bytes.

    Raises:
        ArgumentError: naming the file, when it cannot be read, is larger or is no UTF-8 text.
    """
    try:
        return read_bytes(name, path, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ArgumentError(f"the {name} {path} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def path_error(name: str, path: Path, error: OSError | ValueError) -> ArgumentError:
    """The error of a path that no file can have; ``name`` says what it is for."""
    return ArgumentError(f"the {name} {path} cannot be used: {os_reason(error)}; choose another file")


def os_reason(error: OSError | ValueError) -> str:
    """What the system says of a file, without its path."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if sys.platform == "win32" and isinstance(error, OSError) and isinstance(error.filename, str):
        length = len(str(Path(error.filename).absolute()))
        if length > _LONGEST_PATH:
            reason += (
                f" (the path has {length} characters; Windows takes {_LONGEST_PATH} unless long paths are enabled)"
            )
    return reason
