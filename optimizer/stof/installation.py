# SPDX-License-Identifier: Apache-2.0
"""The version and libraries of this installation, and parts that its build may have left out: why, and what adds each.

``left_out.json`` beside the libraries holds the reasons by part; cmake/LeftOut.cmake writes it.
"""

from __future__ import annotations

import importlib.resources
import json
import sys
from pathlib import Path

from stof.arguments.environment import Variable
from stof.errors import StofError

LEFT_OUT = "left_out.json"
CUDA = "cuda"
TENSORRT = "tensorrt"
# The CPU distribution, and the one with CUDA kernels (tools/cuda_project.py).
DISTRIBUTIONS = ("stof-onnx", "stof-onnx-cuda13")
_OPTIONS = {CUDA: "STOF_CUDA", TENSORRT: "STOF_TENSORRT"}


def library_file(name: str) -> str:
    """The file name of a library on this system: ``libstof_ort.so``, ``libstof_ort.dylib``, ``stof_ort.dll``."""
    if sys.platform == "win32":
        return f"{name}.dll"
    return f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"


def locate_library(name: str, variable: Variable, error: type[StofError]) -> tuple[Path, bool]:
    """The path of a library, and whether it is there.

    An environment variable wins, for development; otherwise it is the one installed with the package.

    Args:
        name: the library's file name.
        variable: the environment variable.
        error: what is raised.

    Raises:
        StofError: an ``error`` when the variable names no file.
    """
    if (named := variable.file(error)) is not None:
        return named, True
    with importlib.resources.as_file(importlib.resources.files("stof") / "lib" / name) as path:
        return path, path.is_file()


def read_left_out(folder: Path) -> dict[str, str]:
    """The parts that the libraries in a folder were built without, each with the reason; empty where nothing is known."""
    try:
        parts = json.loads((folder / LEFT_OUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(part): str(reason) for part, reason in parts.items()} if isinstance(parts, dict) else {}


def how_to_add(part: str) -> str:
    """The command that builds and installs a part, and where to run it."""
    # pip passes the environment on in every version; its option -C came with 23.1.
    return f"in stof's source folder: CMAKE_ARGS=-D{_OPTIONS[part]}=ON pip install ."


def missing(part: str, folder: Path) -> str:
    """That the libraries in a folder lack a part, why as far as it is known, and what adds it."""
    reason = read_left_out(folder).get(part, "")
    return f"{f'not built ({reason})' if reason else 'not installed'}; {how_to_add(part)}"


def read_version(package: Path) -> str:
    """The version of the package in a folder: that of the source tree around it, else of the installed distribution.

    pyproject.toml alone states it.

    Args:
        package: the folder ``stof``.

    Raises:
        PackageNotFoundError: the folder is in no source tree, and no distribution is installed.
    """
    # Here, since `import stof` alone needs neither.
    import tomllib
    from importlib import metadata

    project = package.parents[1] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if table.get("name") in DISTRIBUTIONS:
            return str(table["version"])
    for name in DISTRIBUTIONS[:-1]:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return metadata.version(DISTRIBUTIONS[-1])
