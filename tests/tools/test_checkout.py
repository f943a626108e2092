# SPDX-License-Identifier: Apache-2.0
"""What a checkout keeps before anything is built: unique names of test files, one place for versions of packages."""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINNED = re.compile(r"[\w.-]+ ?==[\d.]+")


def test_names_of_test_files_are_unique() -> None:
    """Pytest imports test files by their base names: of two in different folders it refuses one."""
    folders = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        folders[path.name].append(str(path.parent.relative_to(ROOT)))
    assert folders
    assert {name: where for name, where in folders.items() if len(where) > 1} == {}


def test_versions_of_packages_stand_once() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    packages = [p for group in groups.values() for p in group if isinstance(p, str)]
    pinned = {re.split(r"[=><]", p)[0] for p in packages if "==" in p}
    assert {"onnx", "onnxruntime", "mypy", "ruff"} <= pinned
    for page in (ROOT / "CONTRIBUTING.md", *(ROOT / "tools").glob("*.sh")):
        repeated = {p for p in PINNED.findall(page.read_text()) if p.split("==")[0].strip() in pinned}
        assert repeated == set(), page
