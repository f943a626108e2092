# SPDX-License-Identifier: Apache-2.0
"""TensorRT's Python module, whichever is installed, and the plugin library in it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stof.arguments.environment import TRT_LIBRARY
from stof.errors import StofError
from stof.installation import CUDA, TENSORRT, how_to_add, library_file, locate_library, missing, read_left_out
from stof.terminal import complain

LIBRARY = library_file("stof_trt")
PLUGIN = ("StofAttention", "1", "stof")  # name, version, namespace
# In this order. TensorRT for RTX's wheels come as tensorrt_rtx, or as bindings alone, whose libraries are a package apart.
MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")
_RTX_LIBRARIES = "tensorrt_rtx_libs"


class TensorrtError(StofError):
    """TensorRT or its plugin library is missing, or refuses what is asked of it."""

    exit_code = 1


def plugin_path() -> Path:
    """The path of the plugin library.

    The environment variable ``STOF_TRT_LIBRARY`` wins, for development; otherwise it is the one installed with the package.

    Raises:
        TensorrtError: when there is none.
    """
    path, exists = locate_library(LIBRARY, TRT_LIBRARY, TensorrtError)
    if exists:
        return path
    raise TensorrtError(f"{LIBRARY} is {missing(TENSORRT, path.parent)} (or set STOF_TRT_LIBRARY to a built library)")


def find_library() -> Path | None:
    """The path of the plugin library, None where there is none."""
    try:
        return plugin_path()
    except TensorrtError:
        return None


def plugin_lacks_cuda(path: Path) -> str:
    """What a plugin library without CUDA kernels cannot do, and what adds them; empty where it has them or nothing is known."""
    if CUDA not in read_left_out(path.parent):
        return ""
    return f"without CUDA kernels it builds engines and cannot run them; {how_to_add(CUDA)}"


def find(name: str | None = None) -> Any:
    """TensorRT's Python module.

    Args:
        name: one of ``MODULES``; by default the first one that is installed.

    Raises:
        TensorrtError: when none is installed, or when what is installed does not load.
    """
    names = MODULES if name is None else (name,)
    for candidate in names:
        if not _is_installed(candidate):
            continue
        if candidate == "tensorrt_rtx_bindings":
            _check_rtx_libraries()
        try:
            return importlib.import_module(candidate)
        except (ImportError, OSError, RuntimeError) as error:
            raise TensorrtError(f"the Python module {candidate} is installed but does not load: {error}") from error
    wanted = name or "neither tensorrt nor tensorrt_rtx"
    raise TensorrtError(
        f"{wanted} {'is installed' if name is None else 'is not installed'}: pip install tensorrt (for any GPU), or "
        "tensorrt_rtx (for RTX GPUs), in this Python; stof-optimize, --plugin-path and triton-repo work without"
    )


def _is_installed(name: str) -> bool:
    """Whether there is such a module; a mere folder of that name, in the working directory for instance, is none."""
    if name in sys.modules:
        loaded = sys.modules[name]
        return getattr(loaded, "__file__", None) is not None or not hasattr(loaded, "__path__")
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None


def _check_rtx_libraries() -> None:
    """The wheel lacks a name of its library that the parser loads at the first plugin; without it the process ends."""
    if importlib.util.find_spec(_RTX_LIBRARIES) is None:
        return
    libraries = importlib.import_module(_RTX_LIBRARIES)
    for folder in (Path(p) for p in libraries.__path__):
        versioned = sorted(folder.glob("libtensorrt_rtx.so.*"))
        if versioned and not (folder / "libtensorrt_rtx.so").exists():
            raise TensorrtError(
                f"{folder} has {versioned[0].name} but no libtensorrt_rtx.so, by which TensorRT's parser loads it: "
                f"ln -s {versioned[0].name} {folder / 'libtensorrt_rtx.so'}"
            )


def is_rtx(trt: Any) -> bool:
    """Whether a module is TensorRT for RTX, whose engines are for compute capabilities that are named."""
    return str(trt.__name__).startswith("tensorrt_rtx")


@dataclass
class Messages:
    """What TensorRT said: kept for error messages, and shown as far as asked for."""

    verbose: bool = False
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, severity: int, text: str) -> None:
        """Keeps a message; severities are TensorRT's, 0 internal error to 4 verbose."""
        if severity <= 1:
            self.errors.append(text)
        elif severity == 2:
            self.warnings.append(text)
        if self.verbose and severity <= 3:
            for line in text.split("\n"):
                complain(line)

    def last(self, count: int = 2) -> str:
        """The last errors in one line."""
        lines = [" ".join(e.split()) for e in self.errors[-count:]]
        return "; ".join(line if len(line) <= 400 else f"{line[:397]}..." for line in lines)


def logger(trt: Any, messages: Messages) -> Any:
    """An ILogger that passes everything to ``messages``."""

    class _Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            messages.add(int(severity), text)

    return _Logger()


# Registries refuse a library that they hold already; handles are kept, since dropping one may deregister it.
@functools.cache
def _load_library(name: str, path: Path) -> Any:
    trt = importlib.import_module(name)
    registry = trt.get_plugin_registry()
    handle = registry.load_library(str(path))
    if registry.get_creator(*PLUGIN) is None:
        raise TensorrtError(
            f"{path} was loaded by {name} {trt.__version__}, but registers no plugin {PLUGIN[0]} version {PLUGIN[1]}: it is "
            "no plugin library of stof, or one of another version"
        )
    return handle


def load_plugins(trt: Any = None) -> Path | None:
    """Makes stof's plugins known to TensorRT in this process; again does nothing.

    Args:
        trt: TensorRT's Python module, by default the first one that is installed.

    Returns:
        The library; None where the plugins were registered by other means.

    Raises:
        TensorrtError: when TensorRT or the library is missing, or does not load.
    """
    trt = find() if trt is None else trt
    registry = trt.get_plugin_registry()
    if registry is None:
        raise TensorrtError(f"{trt.__name__} has no plugin registry")
    is_registered = registry.get_creator(*PLUGIN) is not None
    path = find_library() if is_registered else plugin_path()
    if is_registered:
        return path
    try:
        _load_library(trt.__name__, path)
    except TensorrtError:
        raise
    except Exception as error:  # TensorRT's bindings raise types of their own, which differ by version
        raise TensorrtError(f"{trt.__name__} {trt.__version__} does not load {path}: {error}") from error
    return path
