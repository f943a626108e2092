# SPDX-License-Identifier: Apache-2.0
"""SIGINT, SIGTERM and SIGHUP at chosen steps of real runs: they end soon, say so in one line, and leave nothing behind."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest

import stof
from stof import cli
from stof.execution import run_limits

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])}
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
WATCHDOG = 100.0  # seconds
SLACK = 3.0  # seconds that a busy machine takes to end a process
# What a phase does when a signal comes, the phase and the signal: one of the three in rotation, all with STOF_TEST_ALL=1.
PHASES = [
    (how, step, number)
    for i, (how, step) in enumerate(itertools.product(["waits", "computes"], ["load", "match", "check", "oracle"]))
    for number in (SIGNALS if os.environ.get("STOF_TEST_ALL") == "1" else [SIGNALS[i % len(SIGNALS)]])
]
# Windowed attention; END is a number that the output needs.
ATTENTION = """
<ir_version: 8, opset_import: ["": 18]>
g (float[1,4,S,8] q, float[1,4,S,8] k, float[1,4,S,8] v) => (float[a,b,c,d] y) {
    at2 = Constant <value = int64 {2}> ()
    zero = Constant <value = int64 {0}> ()
    one = Constant <value = int64 {1}> ()
    last = Constant <value = int64[1] {1}> ()
    shape = Shape (q)
    s = Gather (shape, at2)
    columns = Range (zero, s, one)
    rows = Unsqueeze (columns, last)
    w = LessOrEqual (columns, rows)
    kt = Transpose <perm = [0, 1, 3, 2]> (k)
    s1 = MatMul (q, kt)
    low = Constant <value = float {-inf}> ()
    s2 = Where (w, s1, low)
    p = Softmax (s2)
    out = MatMul (p, v)
    start = Constant <value = float {1.0}> ()
    END
    y = Add (out, end)
}
"""
LOOP = """
    trips = Constant <value = int64 {9223372036854775807}> ()
    yes = Constant <value = bool {1}> ()
    end = Loop (trips, yes, start) <body = b (int64 i, bool go, float v) => (bool on, float w) {
        on = Identity (go)
        w = Neg (v)
    }>
"""
# Runs the command. At the step that the first argument names it says so, and does what the word behind it says.
DRIVER = """
import hashlib, sys
from stof import cli, files
from stof.files import temporary
from stof.execution import session_process
from stof.execution import ort_sessions as sessions

def does(words):
    print(words, flush=True)

def waits(words):
    does(words)
    sys.stdin.readline()

def computes(words):  # in C, which does not look for signals, for days
    does(words)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

def before(owner, name, step):
    own = getattr(owner, name)
    def first(*arguments, **options):
        process = session_process._thread_state.process
        {"waits": waits, "computes": computes, "does": does}[how](f"{step} {process.worker.popen.pid if process else 0}")
        return own(*arguments, **options)
    setattr(owner, name, first)

step, how = sys.argv[1].split()
if step == "run":
    before(sessions.VerifiedSession, "run", step)
if step == "load":
    from stof import pipeline
    before(pipeline, "load_with_opset", step)
if step == "match":
    from stof import pipeline
    before(pipeline, "rewrite", step)
if step == "check":
    from stof.mask.check import run_masks
    before(run_masks, "create_session", step)
if step == "oracle":
    from stof.attention.checks import site_comparison
    before(site_comparison, "site_exactly", step)
if step == "write":
    before(files.TemporaryFile, "replace", step)
if step == "remove":
    before(temporary, "_remove", step)
del sys.argv[1]
sys.argv.append("--quiet")
sys.exit(cli.main())
"""


def model(folder: Path, end: str = "end = Identity (start)") -> Path:
    path = folder / "m.onnx"
    onnx.save(onnx.parser.parse_model(ATTENTION.replace("END", end)), path)
    return path


class Run:
    """A program in a process of its own."""

    def __init__(self, step: str, *arguments: str | Path, text: str = DRIVER, ignored: int = 0) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [sys.executable, "-c", text, step, *map(str, arguments)],
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            env=ENVIRONMENT,
            preexec_fn=(lambda: signal.signal(ignored, signal.SIG_IGN)) if ignored else None,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def reach(self, step: str) -> int:
        """Waits for a step; the process that holds sessions then."""
        words = self.output.readline().split()
        assert words[:1] == [step], (words, self.process.communicate())
        return int(words[1])

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Exit status and messages."""
        _, errors = self.process.communicate(timeout=WATCHDOG)
        return self.process.returncode, errors


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Starts runs, and ends those that a failed test left."""
    runs: list[Run] = []

    def started(*arguments: str | Path, **options: object) -> Run:
        runs.append(Run(*arguments, **options))  # type: ignore[arg-type]
        return runs[-1]

    yield started
    for run in runs:
        run.process.kill()
        run.process.communicate()


def await_end(number: int) -> None:
    """Waits until a process is gone, or a zombie that nobody has asked for."""
    end = time.monotonic() + WATCHDOG
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {number} still runs")


def check_interrupted(run: Run, number: signal.Signals, folder: Path) -> None:
    """That the run ended by the signal, and its folder holds the model alone."""
    status, errors = run.end()
    assert errors == f"stof-optimize: interrupted by {number.name}\n"
    assert status == 128 + number
    assert [p.name for p in folder.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize("number", SIGNALS)
def test_an_endless_original_is_interrupted(number: signal.Signals, tmp_path: Path, start: Callable[..., Run]) -> None:
    run = start("run does", model(tmp_path, LOOP))
    worker = run.reach("run")
    run.process.send_signal(number)
    check_interrupted(run, number, tmp_path)
    await_end(worker)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("step", ["run", "write"])
def test_nothing_is_left_at_any_step(
    step: str, number: signal.Signals, tmp_path: Path, start: Callable[..., Run]
) -> None:
    run = start(f"{step} waits", model(tmp_path))
    worker = run.reach(step)
    assert len(list(tmp_path.iterdir())) > 1, "a temporary of the run"
    run.process.send_signal(number)
    check_interrupted(run, number, tmp_path)
    await_end(worker)


@pytest.mark.parametrize("number", SIGNALS)
def test_what_hides_signals_is_ended(number: signal.Signals, tmp_path: Path, start: Callable[..., Run]) -> None:
    run = start("run computes", model(tmp_path))
    worker = run.reach("run")
    assert len(list(tmp_path.iterdir())) > 1, "a temporary of the run"
    run.process.send_signal(number)
    check_interrupted(run, number, tmp_path)
    await_end(worker)


@pytest.mark.parametrize(("how", "step", "number"), PHASES)
def test_each_phase_ends_within_a_second(
    how: str, step: str, number: signal.Signals, tmp_path: Path, start: Callable[..., Run]
) -> None:
    """Between instructions, and within native code that hides signals."""
    run = start(f"{step} {how}", model(tmp_path))
    worker = run.reach(step)
    sent = time.monotonic()
    run.process.send_signal(number)
    check_interrupted(run, number, tmp_path)
    assert time.monotonic() - sent < 1.0 + SLACK
    if worker:
        await_end(worker)


def test_a_second_signal_does_not_cut_the_cleaning_up_short(tmp_path: Path, start: Callable[..., Run]) -> None:
    run = start("remove waits", model(tmp_path))
    run.reach("remove")  # the probe whether the folder can be written
    run.process.send_signal(signal.SIGTERM)
    run.reach("remove")
    for _ in range(10):
        run.process.send_signal(signal.SIGINT)
    run.go_on()
    check_interrupted(run, signal.SIGTERM, tmp_path)


def test_ignored_signals_stay_ignored(tmp_path: Path, start: Callable[..., Run]) -> None:
    """As nohup asks for it, and shells for what they run in the background."""
    run = start("write waits", model(tmp_path), ignored=signal.SIGHUP)
    run.reach("write")
    run.process.send_signal(signal.SIGHUP)
    run.go_on()
    assert run.end() == (0, "")
    assert (tmp_path / "m.stof.onnx").exists()


@pytest.mark.parametrize("budget", ["0", "0.1"])
def test_an_endless_original_ends_without_a_signal(
    budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_limits, "GRACE", 3.0)  # a busy machine takes long to load a session
    path = model(tmp_path, LOOP)
    for chains in ("off", "on"):
        assert cli.main([str(path), "--verify-budget", budget, "--chains", chains]) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1
        assert re.search(r"verification was ended: ONNX Runtime took longer than [0-3]\.\d s to ", errors)
        assert "the original, which may be endless. Nothing was written" in errors
        assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


# A program of somebody else's; the first argument is its model, the second an endless one.
PROGRAM = """
import os, signal, sys
import stof
from stof.execution import ort_sessions as sessions

def told(self, *arguments, own=sessions.VerifiedSession.run):
    print("run 0", flush=True)
    assert [signal.getsignal(n) for n in numbers] == handlers, "within a run"
    return own(self, *arguments)

numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
handlers = [signal.getsignal(n) for n in numbers]
wakeup = signal.set_wakeup_fd(-1)
run, sessions.VerifiedSession.run = sessions.VerifiedSession.run, told
try:
    stof.optimize(sys.argv[2])
except KeyboardInterrupt as interrupt:
    assert type(interrupt) is KeyboardInterrupt
    print("interrupted 0", flush=True)
sessions.VerifiedSession.run = run
assert stof.optimize(sys.argv[1]).output
assert [signal.getsignal(n) for n in numbers] == handlers
assert signal.set_wakeup_fd(-1) == wakeup
"""


def test_a_program_keeps_its_handlers_and_goes_on(tmp_path: Path, start: Callable[..., Run]) -> None:
    folders = [tmp_path / name for name in ("good", "endless")]
    for folder in folders:
        folder.mkdir()
    run = start(model(folders[0]), model(folders[1], LOOP), text=PROGRAM)
    run.reach("run")
    run.process.send_signal(signal.SIGINT)
    run.reach("interrupted")
    assert [p.name for p in folders[1].iterdir()] == ["m.onnx"]
    assert run.end() == (0, "")
    assert sorted(p.name for p in folders[0].iterdir()) == ["m.onnx", "m.stof.onnx"]


# Tuning keeps what it has at a first Ctrl-C: the first argument says what comes then.
TUNING = """
import os, signal, sys, threading, time
from stof.interrupts import end_by_signals, keeping_results, report_interrupt, resume

try:
    with end_by_signals("tune", lambda: None, last=True):
        try:
            with keeping_results():
                print("measures 0", flush=True)
                while True:
                    time.sleep(60)
        except KeyboardInterrupt as interrupt:
            if not resume(interrupt):
                raise
        print("goes_on 0", flush=True)
        sys.stdin.readline()
except KeyboardInterrupt as interrupt:
    sys.exit(report_interrupt("tune", interrupt))
"""


def test_tuning_goes_on_with_what_it_has_at_a_first_interrupt(start: Callable[..., Run]) -> None:
    run = start("tune", text=TUNING)
    run.reach("measures")
    run.process.send_signal(signal.SIGINT)
    run.reach("goes_on")
    run.go_on()
    assert run.end() == (0, "")


def test_tuning_ends_at_a_second_interrupt(start: Callable[..., Run]) -> None:
    run = start("tune", text=TUNING)
    run.reach("measures")
    run.process.send_signal(signal.SIGINT)
    run.reach("goes_on")
    run.process.send_signal(signal.SIGINT)
    assert run.end() == (130, "tune: interrupted by SIGINT\n")


@pytest.mark.parametrize("number", SIGNALS[1:])
def test_tuning_ends_when_the_process_is_to_end(number: signal.Signals, start: Callable[..., Run]) -> None:
    run = start("tune", text=TUNING)
    run.reach("measures")
    run.process.send_signal(number)
    assert run.end() == (128 + number, f"tune: interrupted by {number.name}\n")
