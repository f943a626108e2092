# SPDX-License-Identifier: Apache-2.0
"""docs/reference/environment.md is what its generator writes, and readers of variables go through the tables."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from stof.arguments.environment import VARIABLES

ROOT = Path(__file__).resolve().parents[2]
TABLE = "plugins/core/host/environment.cc"
# Variables of the system, and what reads any variable for the table.
OTHERS = {
    "cuda/chain/disk_cache.cc": {'"XDG_CACHE_HOME"', '"HOME"'},
    **{f"plugins/core/host/platform_{system}.cc": {"name"} for system in ("linux", "macos", "windows")},
}


def test_the_page_is_current() -> None:
    generator = runpy.run_path(str(ROOT / "tools/environment_page.py"))
    assert generator["PAGE"].read_text() == generator["page"](), "run tools/environment_page.py"


def test_native_readers_go_through_the_table() -> None:
    found = {}
    for room in ("plugins", "cpu", "cuda"):
        for path in (ROOT / room).rglob("*"):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix in (".cc", ".h", ".cu", ".cuh") and name != TABLE and "getenv" in path.read_text():
                found[name] = set(re.findall(r"getenv\(([^)]*)\)", path.read_text()))
    assert found == OTHERS


def test_python_readers_go_through_the_table() -> None:
    """What the package reads of its own variables; benchmarks set variables of other libraries."""
    read = re.compile(r"""environ(?:\.get\(|\[)(?:["']STOF_|[a-z_]*variable)""")
    sources = {path: path.read_text() for path in (ROOT / "optimizer/stof").rglob("*.py")}
    assert [path for path, text in sources.items() if read.search(text)] == []
    named = {n for text in sources.values() for n in re.findall(r'"(STOF_\w+)"', text)} - {"STOF_CUDA", "STOF_TENSORRT"}
    assert named == {variable.name for variable in VARIABLES}  # the two others are CMake's
