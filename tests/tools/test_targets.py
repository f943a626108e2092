# SPDX-License-Identifier: Apache-2.0
"""Targets are objects: nothing but ``stof.targets`` compares their names, so a new one is an instance with properties."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from stof.targets import TARGETS

SOURCES = Path(__file__).resolve().parents[2] / "optimizer" / "stof"
_TARGET = re.compile(r"\b_?target(\.name)?$", re.IGNORECASE)


def is_name(node: ast.expr) -> bool:
    """Whether an expression is the name of a target, or a collection that has one."""
    constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    return any(c in TARGETS for c in constants if isinstance(c, str))


def compared_names(source: str) -> list[int]:
    """The lines of a source that compare what is called a target with a name, or two targets' names."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            targets = [s for s in sides if _TARGET.search(ast.unparse(s))]
            names = [s for s in targets if ast.unparse(s).endswith((".name", "options.target"))]
            if targets and (names or any(is_name(s) for s in sides)):
                found.append(node.lineno)
        elif isinstance(node, ast.Match) and _TARGET.search(ast.unparse(node.subject)):
            found += [
                c.pattern.lineno for c in node.cases if any(is_name(n) for n in ast.walk(c) if isinstance(n, ast.expr))
            ]
    return found


def test_comparisons_of_names_are_seen() -> None:
    for line in (
        'options.target == "cuda"',
        'x = 1 if target != "cpu" else 2',
        'self._target in ("cpu", "cuda")',
        "plan.target.name != options.target",
        'match target:\n    case "cuda":\n        pass',
    ):
        assert compared_names(line), line
    for line in ("target == path", "plan.target is not options.tuned_for", 'provider == "cuda"', "target.uses_gpu"):
        assert not compared_names(line), line


def test_no_module_compares_names_of_targets() -> None:
    sources = [p for p in SOURCES.rglob("*.py") if p != SOURCES / "targets.py"]
    assert len(sources) > 300
    found = {str(p.relative_to(SOURCES)): lines for p in sources if (lines := compared_names(p.read_text()))}
    assert not found


def test_each_target_has_one_instance_under_its_name() -> None:
    assert all(name == target.name for name, target in TARGETS.items())
    assert len({t.provider for t in TARGETS.values()}) == len(TARGETS)
