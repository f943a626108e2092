# SPDX-License-Identifier: Apache-2.0
"""What the commands print: on any stream, in any encoding, and with the exit status that says what was written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.command.test_cli import ATTENTION, WINDOW, text

import stof
from stof import cli, terminal
from stof.errors import ArgumentError, ModelError, StofError, explained, shown
from stof.progress import Progress

HOSTILE = "a\x1b[31m\nwritten: fake\x1b]0;title\x07\u202e\u2028\x9b\x7f"
ESCAPED = r"a\x1b[31m\nwritten: fake\x1b]0;title\x07\u202e\u2028\x9b\x7f"


# ---- shown() ----
@given(st.text(st.characters()), st.integers(3, 40) | st.none())
def test_shown_is_one_bounded_line(found: str, most: int | None) -> None:
    line = shown(found, most)
    assert line.isprintable()
    assert most is None or len(line) <= most
    assert shown(line, most) == line
    if found.isprintable() and (most is None or len(found) <= most):
        assert line == found


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (HOSTILE, ESCAPED),
        ("größer 猫", "größer 猫"),
        ("a\\x1b", "a\\x1b"),
        (b"\xff\xfeab\xc3\xa9", r"\xff\xfeabé"),
        (os.fsdecode(b"bad\xff.onnx"), r"bad\xff.onnx"),
        ("\ud800", r"\ud800"),
        (Path("x"), "x"),
        ("\U000e0041\u2066\ufeff", r"\U000e0041\u2066\ufeff"),
    ],
)
def test_shown_escapes_what_a_terminal_obeys(found: object, line: str) -> None:
    assert shown(found) == line


def test_a_long_message_keeps_its_beginning_and_its_end() -> None:
    words = str(ModelError(f"node {'n' * 100_000} is wrong; export the model again"))
    assert len(words) == 3000
    assert words.startswith("node nnn")
    assert words.endswith("nnn is wrong; export the model again")


def test_errors_are_shown_whoever_prints_them() -> None:
    for kind in (StofError, ArgumentError, ModelError):
        assert str(kind(f"node {HOSTILE}")) == f"node {ESCAPED}"


def test_a_message_that_python_cannot_decode_is_still_shown() -> None:
    """As of ONNX Runtime, which quotes a name that is not UTF-8."""
    with pytest.raises(UnicodeDecodeError) as caught:
        b"node '\xff\x1b' failed".decode()
    assert explained(caught.value) == r"node '\xff\x1b' failed"


# ---- streams ----
@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(text(WINDOW + ATTENTION), str(path))
    return path


def command(arguments: list[Any], folder: Path, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    """The command in a process of its own, without verification, which takes long and prints nothing."""
    env = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1]), **settings.pop("env", {})}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | settings
    words = [sys.executable, "-m", "stof", "--no-verify", *arguments]
    return subprocess.run(words, cwd=folder, env=env, check=False, **streams)


def said(done: subprocess.CompletedProcess[bytes]) -> list[str]:
    """The lines of standard error, each fit for a terminal."""
    lines = done.stderr.decode().splitlines()
    assert all(line.isprintable() for line in lines), lines
    return lines


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")


@needs_full
def test_a_full_disk_behind_standard_output_is_no_failure_of_what_was_written(model: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        done = command(["model.onnx"], model.parent, stdout=full)
    assert done.returncode == 0
    assert said(done) == [
        "stof-optimize: standard output cannot be written: No space left on device; written: model.stof.onnx"
    ]
    assert model.with_name("model.stof.onnx").is_file()


@needs_full
@pytest.mark.parametrize("arguments", [["model.onnx", "--dry-run"], ["--version"], ["--help"]])
def test_a_report_that_cannot_be_printed_is_a_failure_where_nothing_else_was_asked_for(
    arguments: list[str], model: Path
) -> None:
    with Path("/dev/full").open("wb") as full:
        done = command(arguments, model.parent, stdout=full)
    assert done.returncode == 1
    assert said(done) == ["stof-optimize: standard output cannot be written: No space left on device"]


@pytest.mark.parametrize("arguments", [["model.onnx"], ["--help"]])
def test_a_closed_pipe_is_silent(arguments: list[str], model: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = command(arguments, model.parent, stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")
    assert model.with_name("model.stof.onnx").is_file() == (arguments == ["model.onnx"])


@needs_full
def test_standard_error_that_takes_nothing_leaves_the_exit_status(model: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        assert command(["none.onnx"], model.parent, stderr=full).returncode == 1
        model.write_bytes(b"no model")
        assert command(["model.onnx"], model.parent, stderr=full).returncode == 3


def test_closed_streams_are_no_error(model: Path) -> None:
    """As ``stof-optimize model.onnx >&- 2>&-`` in a shell, where Python has no stream at all."""
    words = f'"{sys.executable}" -m stof --no-verify model.onnx >&- 2>&-'
    env = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])}
    assert subprocess.run(["sh", "-c", words], cwd=model.parent, env=env, check=False).returncode == 0
    assert model.with_name("model.stof.onnx").is_file()


# ---- encodings ----
UTF8 = {"PYTHONIOENCODING": "utf-8:strict"}
ASCII = {"PYTHONIOENCODING": "ascii:strict", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("name", "env"),
    [
        (b"bad\xff.onnx", UTF8),
        (b"line\nbreak\x1b[31m.onnx", UTF8),
        (b"bad\xff.onnx", ASCII),
        ("größer-猫.onnx".encode(), ASCII),
        ("größer-猫.onnx".encode(), {"PYTHONIOENCODING": "latin-1"}),
    ],
)
def test_file_names_print_in_any_encoding(name: bytes, env: dict[str, str], model: Path) -> None:
    source = model.rename(model.parent / os.fsdecode(name))
    done = command([name, "-o", b"out-" + name, "--json", "report.json"], model.parent, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode(env["PYTHONIOENCODING"].partition(":")[0]).splitlines()
    assert all(line.isprintable() for line in lines)
    assert lines[-2].startswith("written: out-")
    assert (model.parent / os.fsdecode(b"out-" + name)).is_file()
    source.unlink()
    done = command([name], model.parent, env=env)
    assert done.returncode == 1
    (line,) = done.stderr.decode(env["PYTHONIOENCODING"].partition(":")[0]).splitlines()
    assert line.isprintable()
    assert " does not exist; did you mean " in line


def test_an_argument_that_is_wrong_is_quoted_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        [f"--{HOSTILE}"],
        ["m.onnx", HOSTILE],
        ["m.onnx", "--target", HOSTILE],
        ["m.onnx", "--tune", HOSTILE],
    ):
        assert cli.main(arguments) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.isprintable()


# ---- the last line of defence ----
@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (ValueError(HOSTILE), 3, f"internal error: ValueError: {ESCAPED}; please report it"),
        (RecursionError("maximum recursion depth exceeded"), 3, "internal error: RecursionError"),
        (MemoryError(), 3, "internal error: MemoryError: "),
        (AssertionError(), 3, "internal error: AssertionError: "),
        (OSError(36, "File name too long", "a\x1b"), 1, r"x: a\x1b: File name too long"),
        (
            UnicodeEncodeError("utf-8", "\udcff", 0, 1, "surrogates not allowed"),
            3,
            "internal error: UnicodeEncodeError",
        ),
    ],
)
def test_errors_that_nobody_foresaw_are_one_line(
    error: Exception, status: int, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> int:
        raise error

    monkeypatch.delenv("STOF_TRACEBACK", raising=False)
    assert terminal.run_command("x", run) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("x: ")
    assert line.isprintable()
    assert words in line
    monkeypatch.setenv("STOF_TRACEBACK", "1")
    assert terminal.run_command("x", run) == status
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == line
    assert all(found.isprintable() for found in lines)


def test_progress_is_one_line_of_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((40, 24)))
    monkeypatch.setattr("sys.stderr.fileno", lambda: 2)
    progress = Progress()
    progress.show(f"measuring {HOSTILE * 10}")
    found = capsys.readouterr().err
    assert found.startswith("\r\033[Kmeasuring a\\x1b[31m")
    assert found.removeprefix("\r\033[K").isprintable()
    assert len(found.removeprefix("\r\033[K")) <= 39


def test_say_goes_nowhere_without_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    terminal.say("a")
    terminal.complain("b")
    Progress().show("c")


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """``python -m bench``, its status and all that it says."""
    from bench.cli import main

    def run(*arguments: str) -> tuple[int, str]:
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_benchmarks_print_names_as_text(bench: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    found, results = tmp_path / "found", tmp_path / "results"
    found.mkdir()
    (found / "a\x1b[31m\n\udcff.json").write_text('[{"key": [1]}]')
    status, words = bench("merge", str(found), str(results))
    assert status == 0
    assert words == "a\\x1b[31m\\n\\xff.json: 1 records, 1 of them new, 1 in all\n"
    (found / "b\x1b.json").write_text('[{"key": [Infinity]}]')
    status, words = bench("merge", str(found), str(results))
    assert status == 1
    assert words.endswith("found/b\\x1b.json is no JSON: Infinity is no JSON number\n")
    status, words = bench(HOSTILE)
    assert status == 1
    assert words.removesuffix("\n").isprintable()
