# SPDX-License-Identifier: Apache-2.0
"""The text of a chain is read by one parser, and a stored configuration by another: no module takes either apart."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STOF = ROOT / "optimizer/stof"
_PARSERS = {STOF / "fusion/description/parser.py", STOF / "fusion/decide/measured_config.py"}
# Where a text enters: attributes of nodes.
_DOORS = {STOF / "fusion/description/chain_description.py", STOF / "fusion/shape_rules.py"}
_STRING_METHODS = {
    *("startswith", "endswith", "split", "splitlines", "partition", "rpartition", "removeprefix", "removesuffix"),
    *("find", "index", "replace", "count", "strip", "lstrip", "rstrip"),
}
_WORDS = (
    "axes ",
    "let t",
    "out y",
    "x0",
    "gelu(",
    "silu(",
    "sigmoid(",
    "f16(",
    "bf16(",
    "f32 [",
    "by themselves",
    "operators 0",
)
_TEXTS = ("description", "text", "epilogue", "chain")  # names and attributes that may hold the text of a chain


def chain_text_readers(source: str) -> list[str]:
    """What a module does that only a parser may do: patterns, comparisons and string methods on the text of chains."""
    readers = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            readers += [f"imports {m}" for m in modules if m in ("ast", "re") or m.endswith("description.parser")]
        elif isinstance(node, ast.Compare):
            texts = [n.value for n in (node.left, *node.comparators) if isinstance(n, ast.Constant)]
            readers += [f"compares with {t!r}" for t in texts if isinstance(t, str) and any(w in t for w in _WORDS)]
            if any(isinstance(op, ast.In | ast.NotIn) for op in node.ops):
                readers += [f"searches {ast.unparse(n)}" for n in node.comparators if _is_text_of_chain(n)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in _STRING_METHODS and _is_text_of_chain(node.func.value):
                readers.append(f"takes apart {ast.unparse(node.func.value)}")
            if node.func.attr == "parse" and ast.unparse(node.func.value) == "ChainDescription":
                readers.append("parses a description")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "int" and len(node.args) == 2:
            readers.append("reads digits of a base")
    return readers


def _is_text_of_chain(node: ast.expr) -> bool:
    """Whether an expression ends as the text of a chain does: ``chain.description.text``, ``entry.description``."""
    if isinstance(node, ast.Attribute) and node.attr == "text":
        return isinstance(node.value, ast.Attribute | ast.Name) and ast.unparse(node.value).endswith(_TEXTS)
    return isinstance(node, ast.Attribute) and node.attr in ("description", "epilogue")


def test_only_the_parsers_read_text_of_chains() -> None:
    scanned = 0
    for path in sorted([*STOF.rglob("*.py"), *(ROOT / "tools").glob("*.py")]):
        source = path.read_text()
        is_fusion = path.is_relative_to(STOF / "fusion")
        if path in _PARSERS or not (is_fusion or "stof.fusion" in source or "StofChain" in source):
            continue
        scanned += 1
        readers = chain_text_readers(source)
        if path in _DOORS:
            readers = [r for r in readers if r != "parses a description" and not r.endswith("description.parser")]
        if not is_fusion:  # other packages read texts of their own by patterns
            readers = [r for r in readers if r not in ("imports re", "imports ast", "reads digits of a base")]
        assert not readers, (path, readers)
    assert scanned > 50


@pytest.mark.parametrize(
    "source",
    [
        "import re",
        "from stof.fusion.description.parser import parse_parts",
        'if "gelu(" in text: pass',
        'if text == "axes n = 4": pass',
        "if word in chain.description.text: pass",
        'parts = chain.description.text.split("let")',
        'text = description.text.replace("0.5", "1")',
        'count = report.description.count("f16(")',
        "again = ChainDescription.parse(chain.description.text)",
        "bits = int(key, 16)",
    ],
)
def test_the_scan_for_readers_of_chains_finds_them(source: str) -> None:
    assert chain_text_readers(source)
