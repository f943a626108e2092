# SPDX-License-Identifier: Apache-2.0
"""docs/reference/numbers.md is what ``python -m bench table`` writes from the stored results, and short."""

from __future__ import annotations

import re
from pathlib import Path

from bench.gpu import tables
from bench.numbers_page import document
from stof.bench.results import read, store_all

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = DOCS / "reference" / "numbers.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == document(DOCS / "results")
    assert len(PAGE.read_text().splitlines()) <= 240


def test_links_resolve() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target


def test_part_of_a_grid(tmp_path: Path) -> None:
    """A grid that was not finished says what is open; a folder without results gives nothing."""
    assert tables.summary_lines(tmp_path, tmp_path) == []
    records = read(DOCS / "results" / "h100" / "attention-cuda-paper.json")
    store_all(tmp_path / "attention-cuda-paper.json", [r for r in records if r["mask_name"] != "causal"])
    text = "\n".join(tables.summary_lines(tmp_path, tmp_path))
    assert "* paper: not measured yet, 18 points of causal" in text
    assert "| **paper** | 72 |" in text
    assert "paper: causal" not in text
