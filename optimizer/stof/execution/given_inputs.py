# SPDX-License-Identifier: Apache-2.0
"""Inputs that a user gives: .npz files, folders of ONNX test data, Python callables; checked against the model."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.errors import ArgumentError, explained

Feed: TypeAlias = Mapping[str, np.ndarray]
# A path or "module:function", a feed, a callable that gives feeds, or several of these.
InputSource: TypeAlias = "str | os.PathLike[str] | Feed | Callable[[], Any] | Iterable[Any]"

_MOST = 32  # sets of inputs that are taken of a callable, which may give them without end
_CALLABLE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class GivenFeed:
    """One set of inputs, by name.

    Attributes:
        label: where it comes from, for messages.
        arrays: the arrays.
    """

    label: str
    arrays: Feed


def read_given_inputs(source: InputSource | None, model: onnx.ModelProto) -> tuple[GivenFeed, ...]:
    """The sets of inputs of a source, each checked against the model's inputs.

    Args:
        source: a .npz file (one set), a folder with ``input_*.pb`` files or with folders of them (one set a folder),
            ``module:function``, a callable that gives a feed or several, a feed, or several of these.
        model: whose inputs they are.

    Raises:
        ArgumentError: when there are none, they cannot be read, or they are no inputs of the model.
    """
    if source is None or (isinstance(source, tuple) and not source):
        return ()
    initializers = {t.name for t in model.graph.initializer}
    declared = {i.name: i for i in model.graph.input}
    needed = [name for name in declared if name not in initializers]
    feeds = []
    for feed in _read(source, needed):
        _check(feed, declared, needed)
        feeds.append(feed)
    if not feeds:
        raise ArgumentError(f"no inputs in {_describe(source)}: expected at least one set")
    return tuple(feeds)


def _read(source: InputSource, names: list[str]) -> Iterator[GivenFeed]:
    if isinstance(source, (str, os.PathLike)):
        yield from _read_named(os.fspath(source), names)
    elif isinstance(source, Mapping):
        yield GivenFeed("given in Python", source)
    elif callable(source):
        yield from _call(source, getattr(source, "__qualname__", type(source).__name__), names)
    elif isinstance(source, Iterable):
        for number, item in enumerate(itertools.islice(source, _MOST)):
            for feed in _read(item, names):
                yield GivenFeed(f"{feed.label} ({number})", feed.arrays) if isinstance(item, Mapping) else feed
    else:
        raise ArgumentError(f"inputs of type {type(source).__name__}: expected a path, arrays by name, or a callable")


def _read_named(text: str, names: list[str]) -> Iterator[GivenFeed]:
    path = Path(text)
    if path.is_dir():
        yield from _read_folder(path, names)
    elif path.is_file():
        yield _read_npz(path)
    elif _CALLABLE.fullmatch(text):
        yield from _call(_find_callable(text), text, names)
    else:
        raise ArgumentError(
            f"--inputs {text}: no such file or folder; expected a .npz file, a folder with input_*.pb, or module:function"
        )


def _read_npz(path: Path) -> GivenFeed:
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ArgumentError(f"--inputs {path}: one array without a name; expected a .npz file (numpy.savez)")
        with archive:
            return GivenFeed(str(path), {name: archive[name] for name in archive.files})
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ArgumentError(f"--inputs {path}: no .npz file that can be read ({explained(error)})") from error


def _read_folder(folder: Path, names: list[str]) -> Iterator[GivenFeed]:
    inner = sorted((p for p in folder.glob("test_data_set_*") if p.is_dir()), key=_number)
    archives = sorted(folder.glob("*.npz"))
    folders = [p for p in [folder, *inner] if any(p.glob("input_*.pb"))]
    if not folders and not archives:
        raise ArgumentError(f"--inputs {folder}: found no input_*.pb, test_data_set_*/input_*.pb or .npz in the folder")
    for path in folders:
        yield GivenFeed(str(path), dict(_read_tensor(p, names) for p in sorted(path.glob("input_*.pb"), key=_number)))
    yield from map(_read_npz, archives)


def _number(path: Path) -> tuple[int, str]:
    digits = re.findall(r"\d+", path.name)
    return (int(digits[-1]) if digits else 0), path.name


def _read_tensor(path: Path, names: list[str]) -> tuple[str, np.ndarray]:
    """The name and the array of a file; without a name of the model's, the file's number says which input it is."""
    tensor = onnx.TensorProto()
    try:
        tensor.ParseFromString(path.read_bytes())
        array = numpy_helper.to_array(tensor)
    except Exception as error:  # protobuf's own errors, types without arrays, sequences
        raise ArgumentError(f"--inputs {path}: no tensor that can be read ({explained(error)})") from error
    number = _number(path)[0]
    name = tensor.name if tensor.name in names or number >= len(names) else names[number]
    return name or path.name, array


@contextmanager
def _current_folder_first() -> Iterator[None]:
    """Modules are looked for in the current folder, too, which a command's Python does not do."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _find_callable(text: str) -> Callable[[], Any]:
    module, _, function = text.partition(":")
    try:
        with _current_folder_first():
            target = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the module raises
        raise ArgumentError(f"--inputs {text}: {type(error).__name__}: {explained(error)}") from error
    if not callable(target):
        raise ArgumentError(f"--inputs {text}: {function} is no function")
    return target  # type: ignore[no-any-return]


def _call(function: Callable[[], Any], label: str, names: list[str]) -> Iterator[GivenFeed]:
    try:
        with _current_folder_first():
            answer = function()
            feeds = [answer] if isinstance(answer, Mapping) else list(itertools.islice(answer, _MOST))
    except Exception as error:  # whatever the function raises
        raise ArgumentError(f"--inputs {label}: {type(error).__name__}: {explained(error)}") from error
    for number, feed in enumerate(feeds):
        if not isinstance(feed, Mapping):
            raise ArgumentError(
                f"--inputs {label}: it gave {type(feed).__name__}; expected dictionaries of arrays by name "
                f"({', '.join(names)})"
            )
        yield GivenFeed(f"{label} ({number})", {name: np.asarray(array) for name, array in feed.items()})


def _check(feed: GivenFeed, declared: Mapping[str, onnx.ValueInfoProto], needed: list[str]) -> None:
    """Names, types and shapes."""
    where = f"inputs {feed.label}"
    for name in feed.arrays:
        if name not in declared:
            raise ArgumentError(f"{where}: the model has no input {name!r}; expected {', '.join(map(repr, needed))}")
    missing = [name for name in needed if name not in feed.arrays]
    if missing:
        listed = ", ".join(map(repr, feed.arrays)) or "nothing"
        raise ArgumentError(f"{where}: input {missing[0]!r} is missing; found {listed}")
    for name, array in feed.arrays.items():
        kind = declared[name].type.tensor_type
        if not isinstance(array, np.ndarray):
            raise ArgumentError(f"{where}: input {name!r} is of type {type(array).__name__}; expected a NumPy array")
        expected = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type)) if kind.elem_type else array.dtype
        if array.dtype != expected:
            raise ArgumentError(f"{where}: input {name!r} has dtype {array.dtype}; expected {expected}")
        if kind.HasField("shape"):
            dims = [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]
            fits = len(dims) == array.ndim and all(
                not isinstance(d, int) or d == n for d, n in zip(dims, array.shape, strict=True)
            )
            if not fits:
                shape = ", ".join(map(str, dims))
                raise ArgumentError(f"{where}: input {name!r} has shape {list(array.shape)}; expected [{shape}]")


def _describe(source: InputSource) -> str:
    if isinstance(source, (str, os.PathLike)):
        return os.fspath(source)
    if isinstance(source, (tuple, list)):
        return ", ".join(map(_describe, source)) or "an empty list"
    return f"what {getattr(source, '__qualname__', type(source).__name__)} gives"
