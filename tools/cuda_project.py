# SPDX-License-Identifier: Apache-2.0
"""The ``pyproject.toml`` of the distribution with CUDA kernels, made from that of the CPU one.

Usage: cuda_project.py PYPROJECT > NEW_PYPROJECT. The import package is the same: install one of both distributions.
"""

from __future__ import annotations

import sys
from pathlib import Path

CUDA_MAJOR = 13
NAME = f"stof-onnx-cuda{CUDA_MAJOR}"
# Each stands once in the file.
CHANGES = {
    'name = "stof-onnx"\n': f'name = "{NAME}"\n',
    'sparse attention that skips masked blocks"\n': (
        f'sparse attention that skips masked blocks; with kernels for CUDA {CUDA_MAJOR}"\n'
    ),
    'STOF_CUDA = "OFF"\n': 'STOF_CUDA = "ON"\n',
    'build-dir = "build/wheel"\n': f'build-dir = "build/wheel-cuda{CUDA_MAJOR}"\n',
}


def convert(text: str) -> str:
    """The new file's text.

    Raises:
        ValueError: when the CPU distribution's file is not as expected.
    """
    for before, after in CHANGES.items():
        if text.count(before) != 1:
            raise ValueError(f"pyproject.toml has {text.count(before)} times {before!r}, expected it once")
        text = text.replace(before, after)
    return text


if __name__ == "__main__":
    sys.stdout.write(convert(Path(sys.argv[1]).read_text()))
