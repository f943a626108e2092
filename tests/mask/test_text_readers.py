# SPDX-License-Identifier: Apache-2.0
"""Mask text is read by one parser: no other module matches patterns in it, compares it or evaluates it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Names of strings' methods that take text apart.
_STRING_METHODS = {"startswith", "endswith", "split", "partition", "removeprefix", "find", "index", "replace", "count"}
_WORDS = ("pad[", "segment_q[", "segment_k[", "lengths[", "q - k", "k <= q", "q <= k", "table0[")


def text_readers(source: str, *, holds_masks: bool) -> list[str]:
    """What a module does that only the parser of masks may do: read mask text by patterns, comparisons or Python's parser."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if holds_masks and isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            found += [f"imports {m}" for m in modules if m in ("ast", "re")]
        given: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            given = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _STRING_METHODS:
            given = [node.func.value, *node.args]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "eval":
            found.append("calls eval")
        texts = [n.value for n in given if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        found += [f"compares with {t!r}" for t in texts if any(w in t for w in _WORDS)]
        if texts and any(isinstance(n, ast.Attribute) and n.attr in ("mask", "expression", "text") for n in given):
            found += [f"takes {ast.unparse(node)} apart" for t in texts if t in (" and ", " or ")]
    return found


def test_only_the_parser_reads_mask_text() -> None:
    for path in (ROOT / "tools").glob("*.py"):
        assert not text_readers(path.read_text(), holds_masks=False), path
    scanned = 0
    for path in sorted((ROOT / "optimizer/stof").rglob("*.py")):
        source = path.read_text()
        in_room = path.is_relative_to(ROOT / "optimizer/stof/mask")
        holds_masks = in_room or "MaskExpression" in source or "LiftedMask" in source
        scanned += holds_masks
        assert not text_readers(source, holds_masks=holds_masks), path
    assert scanned > 40


@pytest.mark.parametrize(
    "source",
    [
        "import re",
        "from ast import parse",
        'if mask.expression == "k <= q": pass',
        'found = "not pad[" in mask.expression.text',
        'found = text.startswith("pad[")',
        'parts = case.mask.split(" and ")',
        "found = eval(case.mask)",
    ],
)
def test_the_scan_finds_readers(source: str) -> None:
    assert text_readers(source, holds_masks=True)
