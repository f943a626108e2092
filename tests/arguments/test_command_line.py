# SPDX-License-Identifier: Apache-2.0
"""The command lines of all three commands: what a user mistypes, asks for, and pipes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stof.bench.cli import main as bench
from stof.cli import main
from stof.execution import runtime_faults
from stof.tensorrt.cli import main as trt


@pytest.fixture(autouse=True)
def _in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["TYPO/model.onnx"], "the input TYPO/model.onnx does not exist, nor does its folder TYPO"),
        (["modle.onnx"], "the input modle.onnx does not exist; did you mean model.onnx?"),
        (["far.bin"], "the input far.bin does not exist"),
        (["org/bert-base"], "if it is a model of the hub, name a new folder: stof-optimize org/bert-base -o FOLDER"),
        (["https://example.org/model.onnx"], "is an address, expected a file or folder; download the model first"),
        (["model.onnx", "out.onnx"], "unrecognized arguments: out.onnx; name the output with -o"),
        (["model.onnx", "--verify-budgit", "3"], "--verify-budgit 3; did you mean '--verify-budget'?"),
        (["model.onnx", "--sparse"], "unrecognized arguments: --sparse; did you mean '--sparse-mlp'?"),
        (["model.onnx", "--qqqqqqqq"], "unrecognized arguments: --qqqqqqqq (see stof-optimize --help)"),
        ([], "no model given"),
    ],
)
def test_mistakes(arguments: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]


def test_an_output_folder_that_is_missing_is_named(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path), "-o", "nowhere/new.onnx"]) == 1
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize("command", [main, bench, trt])
def test_version(command: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("stof 0.1.0, backends cpu")
    assert [line.split(":")[0] for line in lines[1:]] == ["ONNX Runtime", "CUDA kernels", "TensorRT plugin"]


def test_unknown_options_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["model", "m.onnx", "--lenghts", "3"]) == 1
    assert "did you mean '--lengths'?" in capsys.readouterr().err


def test_help_has_groups_an_example_and_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for title in ("what is replaced", "measuring and plans", "verification", "what changes outputs", "reports"):
        assert f"\n{title}" in text
    tail = text.splitlines()[-3:]
    assert tail[0].startswith("example: stof-optimize model.onnx")
    assert "docs/guide/options.md" in tail[2]


def test_json_to_standard_output(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is the JSON alone, which another command reads; the report for people goes to standard error."""
    assert main([str(path), "--json", "-", "-o", "new.onnx"]) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["output"] == "new.onnx"
    assert "written: new.onnx" in captured.err
    assert sorted(p.name for p in path.parent.iterdir()) == ["model.onnx", "new.onnx"]


def test_json_of_a_folder_to_standard_output(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(path.parent), "--json", "-", "--dry-run"]) == 0
    assert list(json.loads(capsys.readouterr().out)["files"]) == ["model.onnx"]


def test_old_runtimes_are_named(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kind: a library that is too old ends in some error of its own after a minute."""
    monkeypatch.setattr(runtime_faults, "runtime_version", lambda: (1, 17))
    assert main([str(path)]) == 1
    error = capsys.readouterr().err
    assert "ONNX Runtime 1.17 is installed, which cannot load stof's library; expected 1.18 or later" in error
    assert main([str(path), "--no-verify", "-o", "new.onnx"]) == 0
