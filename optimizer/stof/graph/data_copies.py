# SPDX-License-Identifier: Apache-2.0
"""Copies of external data beside a new model: loaders refuse files in other folders, and links."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import onnx

from stof.errors import ArgumentError
from stof.files import TemporaryFile, open_regular, remove_leftovers, temporary_file, try_lock
from stof.graph.external_data import external_files
from stof.system.descriptors import read_at

_BLOCK = 1 << 20  # bytes compared at a time
_PATIENCE, _PAUSE = 30.0, 0.02  # seconds to wait for another process that has copied its data, not written its model


@dataclass(frozen=True)
class DataCopy:
    """A file of external data to copy beside a new model: loaders refuse files in other folders, and links."""

    location: str
    source: Path
    target: Path


def data_to_copy(model: onnx.ModelProto, path: Path, source: Path) -> list[DataCopy]:
    """The files to copy for a model at ``path`` that is made from the one at ``source``; none within one folder."""
    if _is_one_folder(path.parent, source.parent):
        return []
    names = {Path(location): location for location in sorted(external_files(model))}  # "a" and "./a" are one file
    return [DataCopy(location, source.parent / inner, path.parent / inner) for inner, location in names.items()]


def _is_one_folder(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except OSError:
        return False


def check_output_folder(model: onnx.ModelProto, path: Path, source: Path) -> None:
    """Checks that a new model can use the external data, or that it can be copied without overwriting other data.

    Raises:
        ArgumentError: naming the file that is in the way.
    """
    if _is_one_folder(path.parent, source.parent):
        for location in sorted(external_files(model)):
            data = source.parent / location
            if not data.resolve().is_relative_to(source.parent.resolve()):
                # The Hugging Face cache is like this: its model is a link into the same folder.
                raise ArgumentError(
                    f"external data {data} is a link to another folder, which runtimes follow only from a linked model; "
                    "write the output to another folder with -o"
                )
    for copy in data_to_copy(model, path, source):
        _check_inside(copy, path)
        try:
            with open_regular(copy.target) as there:
                _check_same(copy, there.fileno())
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise _copy_error(copy, error) from error


def _check_inside(copy: DataCopy, path: Path) -> None:
    if not Path(os.path.realpath(copy.target)).is_relative_to(os.path.realpath(path.parent)):
        raise ArgumentError(
            f"{copy.target} leads to another folder by a link, which runtimes do not follow; remove it, or choose another "
            "folder with -o"
        )


def _check_same(copy: DataCopy, descriptor: int) -> None:
    with open_regular(copy.source) as source:
        if not _has_same_bytes(source.fileno(), descriptor):
            raise ArgumentError(
                f"{copy.target} exists and differs from {copy.source}; move it, or choose another folder with -o"
            )


def _has_same_bytes(first: int, second: int) -> bool:
    one, other = os.fstat(first), os.fstat(second)
    if os.path.samestat(one, other):
        return True
    return one.st_size == other.st_size and all(
        read_at(first, _BLOCK, offset) == read_at(second, _BLOCK, offset) for offset in range(0, one.st_size, _BLOCK)
    )


def _copy_error(copy: DataCopy, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"external data {copy.location!r} cannot be copied to {copy.target}: {error.strerror or error}; choose another "
        "folder with -o"
    )


class DataCopier:
    """A context that copies external data beside a new model, and removes the copies if the model is not completed.

    ``stage`` copies a file under a temporary name, ``publish`` gives all copies their final names. If the model still has
    its temporary name at the end of the context, everything that was written is removed.

    Several processes may write into one folder. Each copies under its own temporary name. The first to publish holds a lock
    on its copy until its model is complete or the copy is removed. The others wait for the lock, and use that copy if it has
    the same bytes.

    Args:
        model: the new model under its temporary name.
    """

    def __init__(self, model: TemporaryFile) -> None:
        self._model = model
        self._stack = ExitStack()
        self._staged: list[tuple[DataCopy, TemporaryFile]] = []

    def __enter__(self) -> DataCopier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def stage(self, copy: DataCopy) -> None:
        """Copies a file under a temporary name and checks the copy. Nothing is copied if the target has the same bytes already.

        Raises:
            ArgumentError: when it cannot be copied, or the target has other bytes.
        """
        remove_leftovers(copy.target.parent)
        try:
            if _is_in_place(copy):
                return
            self._make_folder(copy.target.parent)
            new = self._stack.enter_context(temporary_file(copy.target.parent))
            new.copy(copy.source)
        except OSError as error:
            raise _copy_error(copy, error) from error
        self._staged.append((copy, new))

    def stage_new(self, folder: Path, pieces: Iterable[bytes], name: Callable[[str], str]) -> str:
        """Writes a new file of external data under a temporary name.

        Args:
            folder: of the new model.
            pieces: the file's bytes.
            name: gives the file's name for a digest of its bytes, in hexadecimal digits.

        Returns:
            The name.

        Raises:
            OSError: when it cannot be written.
        """
        remove_leftovers(folder)
        new = self._stack.enter_context(temporary_file(folder))
        digest = hashlib.sha256()

        def read() -> Iterator[bytes]:
            for piece in pieces:
                digest.update(piece)
                yield piece

        new.write_pieces(read())
        file_name = name(digest.hexdigest())
        self._staged.append((DataCopy(file_name, new.path, folder / file_name), new))
        return file_name

    def publish(self) -> None:
        """Gives the copies their final names.

        Raises:
            ArgumentError: when a name was taken by other data meanwhile.
        """
        for copy, new in self._staged:
            self._stack.callback(self._withdraw, copy, new)
            try:
                self._publish(copy, new)
            except OSError as error:
                raise _copy_error(copy, error) from error

    def _publish(self, copy: DataCopy, new: TemporaryFile) -> None:
        while True:
            try:
                new.publish(copy.target)
                return
            except FileExistsError:
                if _is_in_place(copy):
                    return

    def _make_folder(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folder(folder.parent)
            self._stack.callback(self._remove_folder, folder)
            folder.mkdir(exist_ok=True)

    def _remove_folder(self, folder: Path) -> None:
        if self._model.is_temporary():
            with contextlib.suppress(OSError):  # other files are in it by now
                folder.rmdir()

    def _withdraw(self, copy: DataCopy, new: TemporaryFile) -> None:
        # Without the lock another process may use the copy already.
        if self._model.is_temporary() and new.is_locked and new.is_at(copy.target):
            if sys.platform == "win32":  # which removes no open file
                new.close()
            with contextlib.suppress(OSError):
                copy.target.unlink()


def _is_in_place(copy: DataCopy) -> bool:
    """Whether the target holds the data for good; waits while the process that copied it may still remove it."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            there = open_regular(copy.target)
        except (FileNotFoundError, NotADirectoryError):
            return False
        with there:
            if try_lock(there.fileno(), shared=True) is not False and _is_same_file(there.fileno(), copy.target):
                _check_same(copy, there.fileno())
                return True
        if time.monotonic() > end:
            raise ArgumentError(
                f"{copy.target} is in use by another process; wait for it, or choose another folder with -o"
            )
        time.sleep(_PAUSE)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False
