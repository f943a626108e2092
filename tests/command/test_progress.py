# SPDX-License-Identifier: Apache-2.0
"""Progress of ``stof-optimize``: a line that is written over on a terminal, lines of a log elsewhere."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from tests.command.test_cli import ATTENTION, WINDOW, text

import stof
from stof import cli, progress
from stof.progress import Progress, StepLog, step, step_log

STEPS = ["load", "match", "lift", "choose", "emit", "shapes", "memory", "verify", "write"]
SLOW = """
import sys, time
from stof import cli, files, progress
progress._LOG_EVERY, progress._TERMINAL_EVERY = 0.2, 0.2
write = files.TemporaryFile.write
files.TemporaryFile.write = lambda *given: (time.sleep(1.0), write(*given))[1]
sys.exit(cli.main())
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(text(WINDOW + ATTENTION), path)
    return path


def slow(model: Path, *arguments: str, stderr: int) -> subprocess.CompletedProcess[bytes]:
    """A run of over a second, with intervals of a fifth of one."""
    environment = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])}
    words = [sys.executable, "-c", SLOW, str(model), *arguments]
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=stderr, env=environment, check=True)


def test_a_log_has_a_line_for_each_step_and_each_interval(model: Path) -> None:
    lines = slow(model, stderr=subprocess.PIPE).stderr.decode().splitlines()
    ended = [m[1] for line in lines if (m := re.fullmatch(r"stof-optimize: (\w+) \d+\.\d s", line))]
    going = [m[1] for line in lines if (m := re.fullmatch(r"stof-optimize: (\w+), \d+ s so far", line))]
    assert len(ended) + len(going) == len(lines), lines
    assert [s for s in ended if s != "chains"] == STEPS
    assert going.count("write") >= 3


def test_a_short_run_is_silent(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(model), "--no-verify"]) == 0
    assert capfd.readouterr().err == ""


def test_quiet_says_nothing(model: Path) -> None:
    for option in ("-q", "--quiet"):
        assert slow(model, option, stderr=subprocess.PIPE).stderr == b""


@pytest.mark.parametrize("quiet", [False, True])
def test_a_terminal_has_one_line_that_goes(quiet: bool, model: Path) -> None:
    own, other = pty.openpty()
    found: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(own, 4096):
                found.append(data)
        except OSError:  # the other end was closed
            pass

    reader = threading.Thread(target=read)
    reader.start()
    try:
        slow(model, *(["--quiet"] if quiet else []), stderr=other)
    finally:
        os.close(other)
        reader.join()
        os.close(own)
    shown = b"".join(found).decode()
    assert "\n" not in shown
    changes = shown.split("\r\033[K")
    assert changes[0] == changes[-1] == ""
    assert len(changes) == 1 if quiet else sum(c.startswith("write ") for c in changes) >= 3


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def log() -> Callable[[bool], tuple[StepLog, Clock]]:
    def make(is_terminal: bool) -> tuple[StepLog, Clock]:
        clock = Clock()
        return StepLog("x", is_terminal, clock), clock

    return make


def test_lines_of_a_log(log: Callable[..., tuple[StepLog, Clock]], capsys: pytest.CaptureFixture[str]) -> None:
    steps, clock = log(False)
    steps.tick()  # before any step
    steps.begin("load")
    clock.now = 4.0
    steps.end()
    assert capsys.readouterr().err == ""
    steps.begin("match")
    clock.now = 15.0
    steps.tick()
    assert capsys.readouterr().err == "x: load 4.0 s\nx: match, 11 s so far\n"
    steps.begin("emit")  # within match
    steps.detail = "3 of 4\x1b\n"
    clock.now = 30.0
    steps.tick()
    assert capsys.readouterr().err == "x: emit, 15 s so far: 3 of 4\\x1b\\n\n"
    steps.end()
    steps.end()
    assert capsys.readouterr().err == "x: emit 15.0 s\nx: match 26.0 s\n"
    steps.tick()
    steps.close()
    assert capsys.readouterr().err == ""


def test_the_line_of_a_terminal(log: Callable[..., tuple[StepLog, Clock]], capsys: pytest.CaptureFixture[str]) -> None:
    steps, clock = log(True)
    steps.begin("match")
    clock.now = 2.0
    steps.tick()
    steps.detail = "what a tuner shows itself"
    steps.tick()
    steps.end()
    steps.close()
    steps.close()
    assert capsys.readouterr().err == "\r\033[Kmatch 2 s\r\033[K"


def test_what_a_long_step_is_at_is_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LOG_EVERY", 0.05)
    shown = Progress()
    with step_log("x", quiet=False), step("chains"):
        shown.show("2 of 7")
        time.sleep(0.3)
        shown.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "x: chains, 0 s so far: 2 of 7"
    assert lines[-1].startswith("x: chains 0.")


def test_nothing_outlasts_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the thread nor the steps of other programs; errors pass through."""
    with pytest.raises(KeyError), step_log("x", quiet=False), step("match"):
        raise KeyError
    assert progress._log is None
    assert "stof-progress" not in [t.name for t in threading.enumerate()]
    with step("match"):
        pass
    assert capsys.readouterr().err == ""


def test_stof_optimize_in_python_has_no_thread_and_no_lines(
    model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LOG_EVERY", 0.01)
    stof.optimize(model, options=stof.Options(verify=False))
    assert capfd.readouterr().err == ""


def test_a_closed_stream_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = (tmp_path / "x").open("w")
    closed.close()
    for stream in (None, closed):
        monkeypatch.setattr(sys, "stderr", stream)
        steps = StepLog("x", False)
        steps.begin("match")
        if stream is not None:
            steps.tick()
        with step_log("x", quiet=False), step("match"):
            Progress().show("1 of 2")
