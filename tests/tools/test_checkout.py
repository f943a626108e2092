# SPDX-License-Identifier: Apache-2.0
"""What a checkout keeps before anything is built: names of test files, versions of packages, parts of make test."""

from __future__ import annotations

import re
import subprocess
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


def test_parts_of_make_test() -> None:
    """Each part of the list is one that the script runs, and an unknown one is told from them."""
    script = ROOT / "tools/test.sh"
    listed = re.search(r"^parts=\(([^)]*)\)$", script.read_text(), re.MULTILINE)
    assert listed
    parts = listed[1].split()
    assert list(dict.fromkeys(re.findall(r"^if wants (\w+); then$", script.read_text(), re.MULTILINE)))[1:] == [
        part for part in parts if part != "unit"
    ]  # unit is wanted first of all, for its browser
    done = subprocess.run(["bash", script, "lnt"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == f"no part and no Python: lnt\nparts: {' '.join(parts)}\n"
    stated = re.search(r"`tools/test.sh lint` \| (.*) \|", (ROOT / "CONTRIBUTING.md").read_text())
    assert stated
    assert set(re.findall(r"`(\w+)`", stated[1])) <= set(parts)
