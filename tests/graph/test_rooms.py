# SPDX-License-Identifier: Apache-2.0
"""The ground-floor packages import nothing from the packages above them."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import stof

_ROOT = Path(stof.__file__).parent
_PACKAGES = {path.parent.name for path in _ROOT.glob("*/__init__.py")}
_MAY_IMPORT = {
    "graph": {"graph"},
    "symbolic": {"graph", "symbolic"},
    "mask": _PACKAGES - {"attention", "fusion", "verification", "bench", "tensorrt"},
}


@pytest.mark.parametrize("package", _MAY_IMPORT)
def test_imports_point_downwards(package: str) -> None:
    for path in (_ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            used = {n.split(".")[1] for n in names if n.startswith("stof.")} & _PACKAGES
            assert used <= _MAY_IMPORT[package], f"{path.relative_to(_ROOT)} imports {used - _MAY_IMPORT[package]}"
