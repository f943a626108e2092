# SPDX-License-Identifier: Apache-2.0
"""Every block of docs/guide and of README runs as it is printed, in order, and prints what the page states.

Pages had become stale: a count of nodes, a line of the report and a command that ended with an error. What is not run says why.
docs/guide/pytorch.md is run by tests/pytorch, where PyTorch is.
"""

from __future__ import annotations

import sys
from pathlib import Path

import onnxruntime.transformers  # noqa: F401  it extends sys.path when it is imported first, which a test would undo
import pytest
from guide_files import FILES
from guide_pages import Block, PageRun, check_unrun, compare_lines, read_blocks

from stof.errors import ArgumentError
from stof.verification import model_times

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ("README.md", "examples/README.md", "CONTRIBUTING.md")
PAGES = [*sorted((ROOT / "docs/guide").glob("*.md")), *(ROOT / name for name in OTHERS)]
HERE = [page for page in PAGES if page.stem != "pytorch"]


@pytest.mark.usefixtures("small_mlps_gain")
@pytest.mark.parametrize("page", HERE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = read_blocks(page)
    for name, make in FILES.get(page.relative_to(ROOT).as_posix(), {}).items():
        make(tmp_path / name)
    quick = model_times.TimingLimits(seconds=0.5, end=60.0, most_rounds=3, least_rounds=2)
    monkeypatch.setattr(model_times, "_LIMITS", quick)
    monkeypatch.setattr(model_times, "SECONDS", 0.5)
    monkeypatch.setattr(sys, "path", [*sys.path])  # --inputs module:function adds the current folder
    monkeypatch.chdir(tmp_path)
    run = PageRun()
    for block in blocks:
        run.take(block)
    assert len(run.ran) + len(run.compared) + len(run.left) == len(blocks)
    for place, reason in run.left.items():
        print(f"{place}: not run: {reason}")


def test_most_blocks_run() -> None:
    blocks = [block for page in PAGES for block in read_blocks(page)]
    assert len([b for b in blocks if not b.reason]) > len(blocks) / 2
    assert [b.place for b in blocks if b.note.startswith("not run") and len(b.reason.split()) < 3] == []


def block(text: str, note: str = "", language: str = "") -> Block:
    return Block("page:1", language, text, note, False)


def test_stale_blocks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = PageRun()
    with pytest.raises(AssertionError, match="status 1"):
        run.take(block("stof-optimize none.onnx\n"))
    run.take(block("stof-optimize none.onnx\n", "run: status=1"))
    run.take(block("... none.onnx ...\n", "output"))
    with pytest.raises(AssertionError, match="which is not printed"):
        run.take(block("written: none.onnx\n", "output"))
    with pytest.raises(AssertionError, match="cannot be run"):
        run.take(block("trtexec model.onnx\n"))
    run.take(block("print(6 * 7)\n", language="python"))
    with pytest.raises(AssertionError, match="states"):
        run.take(Block("page:1", "", "41\n", "", True))


@pytest.mark.parametrize(
    "text",
    [
        "stof-optimize model.onnx --sparse",
        "make none",
        "python examples/none.py",
        "cmake --preset none",
        "pip install '.[none]'",
    ],
)
def test_stale_commands_that_are_not_run_are_found(text: str) -> None:
    with pytest.raises((AssertionError, ArgumentError)):
        check_unrun(block(text + "\n", "not run: a reason of words"))


def test_numbers_vary_and_words_do_not() -> None:
    compare_lines(
        "  14 x window(64, 64) avx2…\n...\n1.5x\n", "2 x window(16, 16) avx512_vnni,\nand\n41.3x", vary=True, place=""
    )
    with pytest.raises(AssertionError):
        compare_lines("14 x window\n", "2 x dense", vary=True, place="")
    with pytest.raises(AssertionError):
        compare_lines("14 x window\n", "2 x window", vary=False, place="")
    with pytest.raises(AssertionError):
        compare_lines("b\na\n", "a b", vary=False, place="")
