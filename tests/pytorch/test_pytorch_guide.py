# SPDX-License-Identifier: Apache-2.0
"""Every block of docs/guide/pytorch.md runs as it is printed, in order, and prints what the page states."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from guide_pages import PageRun, read_blocks

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guide/pytorch.md"


@pytest.mark.filterwarnings("ignore")
def test_blocks_print_what_the_page_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = PageRun()
    for block in read_blocks(PAGE):
        run.take(block)
    assert len(run.ran) == 6  # five of Python, and a command
    assert len(run.compared) == 5


def test_make_test_all_runs_the_scripts_that_it_names() -> None:
    for script in re.findall(r"^python (\S+)", PAGE.read_text(), re.MULTILINE):
        assert script in (ROOT / "tools/test.sh").read_text()
