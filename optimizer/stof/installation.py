# SPDX-License-Identifier: Apache-2.0
"""The parts that a build of stof may leave out: the reason, and the command that adds each.

``left_out.json`` beside the libraries holds the reasons by part; cmake/LeftOut.cmake writes it.
"""

from __future__ import annotations

import json
from pathlib import Path

LEFT_OUT = "left_out.json"
CUDA = "cuda"
TENSORRT = "tensorrt"
_OPTIONS = {CUDA: "STOF_CUDA", TENSORRT: "STOF_TENSORRT"}


def left_out(folder: Path) -> dict[str, str]:
    """The parts that the libraries in a folder were built without, each with the reason; empty where nothing is known."""
    try:
        found = json.loads((folder / LEFT_OUT).read_text())
    except (OSError, ValueError):
        return {}
    return {str(part): str(reason) for part, reason in found.items()} if isinstance(found, dict) else {}


def how_to_add(part: str) -> str:
    """The command that builds and installs a part, and where to run it."""
    # pip passes the environment on in every version; its option -C came with 23.1.
    return f"in stof's source folder: CMAKE_ARGS=-D{_OPTIONS[part]}=ON pip install ."


def missing(part: str, folder: Path) -> str:
    """That the libraries in a folder lack a part, why as far as it is known, and what adds it."""
    reason = left_out(folder).get(part, "")
    return f"{f'not built ({reason})' if reason else 'not installed'}; {how_to_add(part)}"
