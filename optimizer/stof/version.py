# SPDX-License-Identifier: Apache-2.0
"""The version of the package. It stands in pyproject.toml alone."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

# The CPU distribution, and the one with CUDA kernels (tools/cuda_project.py).
DISTRIBUTIONS = ("stof-onnx", "stof-onnx-cuda13")


def read_version(package: Path) -> str:
    """The version of the package in a folder: that of the source tree around it, else of the installed distribution.

    Args:
        package: the folder ``stof``.

    Raises:
        PackageNotFoundError: the folder is in no source tree, and no distribution is installed.
    """
    project = package.parents[1] / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8")).get("project", {})
        if table.get("name") in DISTRIBUTIONS:
            return str(table["version"])
    for name in DISTRIBUTIONS[:-1]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return importlib.metadata.version(DISTRIBUTIONS[-1])


__version__ = read_version(Path(__file__).resolve().parent)
