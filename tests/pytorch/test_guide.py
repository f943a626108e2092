# SPDX-License-Identifier: Apache-2.0
"""Every snippet of docs/guide/pytorch.md runs as it is printed, in order, and prints what the page states."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from stof import cli

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs/guide/pytorch.md").read_text()
# Python, and the block that follows at once: what it prints, or a command and what that prints.
SNIPPETS = re.findall(r"^```python\n(.*?)^```\n(?:```\n(.*?)^```\n)?", GUIDE, re.MULTILINE | re.DOTALL)


def run(code: str, names: dict[str, Any]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "docs/guide/pytorch.md", "exec"), names)
    return printed.getvalue()


@pytest.mark.filterwarnings("ignore")
def test_snippets_print_what_the_page_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    commands = 0
    for code, stated in SNIPPETS:
        printed = run(code, names)
        if not stated.startswith("stof-optimize "):
            assert not stated or printed == stated
            continue
        commands += 1
        command, *lines = stated.splitlines()
        capsys.readouterr()
        assert cli.main(shlex.split(command)[1:]) == 0
        printed = capsys.readouterr().out
        found = iter(printed.splitlines())
        for line in lines:  # in this order; "..." stands for what depends on the machine
            assert any(re.fullmatch(re.escape(line).replace(r"\.\.\.", ".*"), other) for other in found), (
                line,
                printed,
            )
    assert len(SNIPPETS) == 5
    assert commands == 1


def test_the_installation_names_what_exists() -> None:
    extras = re.search(r"pip install '\.\[([\w,]+)\]'", GUIDE)
    assert extras is not None
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = ", project, re.MULTILINE) for extra in extras[1].split(","))
    for script in re.findall(r"^python (\S+)", GUIDE, re.MULTILINE):
        assert script in (ROOT / "tools/test.sh").read_text()
