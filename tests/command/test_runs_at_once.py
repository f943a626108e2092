# SPDX-License-Identifier: Apache-2.0
"""Runs that write into one folder at the same time, fail or are killed: processes of their own, stopped at chosen steps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

import stof
from stof.bench import results

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parent.parent)}
SIZE = 3 << 20  # bytes of the external data, of which the model's weight is the last part
# Runs the command. At the step that the first argument names, it says so and waits for a line; "fail" makes the step fail.
DRIVER = f"""
import shutil, sys
from stof import cli, files
from stof.graph import data_copies
from stof.execution import ort_sessions as sessions

def wait(step, *_):
    print(step, flush=True)
    if sys.stdin.readline().strip() == "fail":
        raise OSError(28, "No space left on device")

def before(owner, name, step):
    own = getattr(owner, name)
    def first(*arguments, **options):
        wait(step)
        return own(*arguments, **options)
    setattr(owner, name, first)

def half(source, target, length=0, own=shutil.copyfileobj):
    target.write(source.read({SIZE} // 2))
    target.flush()
    wait("half")
    own(source, target, length)

step = sys.argv[1]
if step == "half":
    shutil.copyfileobj = half
if step == "publish":
    before(files.TemporaryFile, "publish", step)
if step == "replace":
    before(files.TemporaryFile, "replace", step)
if step == "session":
    before(sessions.Sessions, "make", step)
if step == "sleep":
    before(data_copies.time, "sleep", step)
sys.exit(cli.main([*sys.argv[2:], "--quiet"]))
"""


class Run:
    """A run of stof-optimize, or of another text, in a process of its own."""

    def __init__(self, step: str, *arguments: str | Path, text: str = DRIVER) -> None:
        command = [sys.executable, "-c", text, step, *map(str, arguments)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)
        assert self.process.stdout is not None
        self.output = self.process.stdout

    def reach(self, step: str) -> None:
        line = self.output.readline().strip()
        assert line == step, (line, self.end())

    def go_on(self, word: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def end(self) -> tuple[int, str]:
        """Exit status and messages."""
        _, errors = self.process.communicate(timeout=300)
        return self.process.returncode, errors

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        assert self.end()[0] == -signal.SIGKILL


@pytest.fixture
def started() -> Iterator[list[Run]]:
    """Ends runs that a failed test left."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        run.process.kill()
        run.process.communicate()


def model(folder: Path, seed: int = 0) -> Path:
    """Windowed attention with a projection whose weight lies at the end of ``weights/w.data``."""
    graph = onnx.parser.parse_model("""
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
            y = MatMul (out, weight)
        }""")
    data = np.random.default_rng(seed).standard_normal(SIZE // 4).astype(np.float32)
    weight = TensorProto(name="weight", data_type=TensorProto.FLOAT, dims=(8, 64), data_location=TensorProto.EXTERNAL)
    for key, value in (("location", "weights/w.data"), ("offset", SIZE - 2048), ("length", 2048)):
        weight.external_data.add(key=key, value=str(value))
    graph.graph.initializer.append(weight)
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "w.data").write_bytes(data.tobytes())
    path = folder / "m.onnx"
    path.write_bytes(graph.SerializeToString())
    return path


def outputs(path: Path) -> np.ndarray:
    options = ort.SessionOptions()
    stof.register(options)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = {n: np.random.default_rng(1).standard_normal((1, 4, 40, 8)).astype(np.float32) for n in "qkv"}
    found: np.ndarray = session.run(None, feeds)[0]
    return found


def check(folder: Path, source: Path, *names: str) -> None:
    """The folder holds the models with whole weights, each computes what the source does, and nothing else is there."""
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == sorted(
        [*names, "weights/w.data"]
    )
    assert (folder / "weights" / "w.data").read_bytes() == (source.parent / "weights" / "w.data").read_bytes()
    for name in names:
        np.testing.assert_allclose(outputs(folder / name), outputs(source), atol=1e-4)


def temporaries(folder: Path) -> set[Path]:
    return set(folder.rglob(".stof-*.tmp"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return model(tmp_path / "in")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_one_run_ends_while_another_copies(source: Path, folder: Path, started: list[Run]) -> None:
    first = Run("half", source, "-o", folder / "a.onnx", "--no-verify")
    started.append(first)
    first.reach("half")
    assert Run("", source, "-o", folder / "b.onnx", "--no-verify").end() == (0, "")
    first.go_on()
    assert first.end() == (0, "")
    check(folder, source, "a.onnx", "b.onnx")


def test_a_run_killed_while_both_copy_harms_nobody(source: Path, folder: Path, started: list[Run]) -> None:
    runs = [Run("half", source, "-o", folder / f"{n}.onnx", "--no-verify") for n in "abc"]
    started += runs
    for run in runs:
        run.reach("half")
    first, killed, last = runs
    first.go_on()
    assert first.end() == (0, "")
    killed.kill()
    left = temporaries(folder)
    assert len(left) == 4, "of two runs the data and the model"
    assert Run("", source, "-o", folder / "d.onnx", "--no-verify").end() == (0, "")
    assert len(temporaries(folder)) == 2, "those of the killed run are gone, those of the running one are not"
    assert temporaries(folder) < left
    last.go_on()
    assert last.end() == (0, "")
    check(folder, source, "a.onnx", "c.onnx", "d.onnx")


def test_data_of_a_run_that_may_still_fail_is_waited_for(source: Path, folder: Path, started: list[Run]) -> None:
    failing = Run("replace", source, "-o", folder / "a.onnx", "--no-verify")
    started.append(failing)
    failing.reach("replace")
    assert (folder / "weights" / "w.data").exists()
    waiting = Run("sleep", source, "-o", folder / "b.onnx", "--no-verify")
    started.append(waiting)
    waiting.reach("sleep")
    failing.go_on("fail")
    status, errors = failing.end()
    assert status == 1
    assert "No space left on device" in errors
    waiting.go_on()
    assert waiting.end() == (0, "")
    check(folder, source, "b.onnx")


def test_a_run_that_fails_leaves_nothing(source: Path, folder: Path, started: list[Run]) -> None:
    for step in ("half", "publish", "replace"):
        run = Run(step, source, "-o", folder / "a.onnx", "--no-verify")
        started.append(run)
        run.reach(step)
        run.go_on("fail")
        status, errors = run.end()
        assert status == 1
        assert len(errors.splitlines()) == 1
        assert "No space left on device" in errors
        assert list(folder.iterdir()) == []


def test_other_data_that_came_meanwhile_stays(source: Path, folder: Path, tmp_path: Path, started: list[Run]) -> None:
    other = model(tmp_path / "other", seed=1)
    late = Run("publish", source, "-o", folder / "a.onnx", "--no-verify")
    started.append(late)
    late.reach("publish")
    assert Run("", other, "-o", folder / "b.onnx", "--no-verify").end() == (0, "")
    late.go_on()
    status, errors = late.end()
    assert status == 1
    assert "w.data exists and differs from" in errors
    check(folder, other, "b.onnx")


def test_scratch_folders_of_killed_runs_go(source: Path, folder: Path, started: list[Run]) -> None:
    killed, running = (Run("session", source, "-o", folder / f"{n}.onnx") for n in "ab")
    started += [killed, running]
    killed.reach("session")
    running.reach("session")
    assert len(temporaries(folder)) == 2
    killed.kill()
    assert Run("", source, "-o", folder / "c.onnx", "--no-verify").end() == (0, "")
    assert len(temporaries(folder)) == 1
    for _ in range(2):
        running.go_on()
        running.reach("session")
    running.go_on()
    assert running.end() == (0, "")
    check(folder, source, "b.onnx", "c.onnx")


def test_an_interrupted_run_leaves_nothing(source: Path, folder: Path, started: list[Run]) -> None:
    for step, options in (("half", ["--no-verify"]), ("session", [])):
        for number in (signal.SIGINT, signal.SIGTERM):
            run = Run(step, source, "-o", folder / "a.onnx", *options)
            started.append(run)
            run.reach(step)
            run.process.send_signal(number)
            status, errors = run.end()
            assert status != 0
            assert "Traceback" not in errors
            assert list(folder.iterdir()) == []


def test_a_small_disk(source: Path, folder: Path) -> None:
    """The limit on a file's size fails writes as a full disk does, wherever they happen."""
    limited = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]),) * 2); " + (
        "from stof import cli; sys.exit(cli.main(sys.argv[2:]))"
    )
    options = ["-o", folder / "a.onnx", "--json", folder / "r.json", "--save-plan", folder / "p.json", "--no-verify"]
    for size in (0, 1000, SIZE // 2, SIZE - 1):
        command = [sys.executable, "-c", limited, str(size), str(source), *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=ENVIRONMENT)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1, done.stderr
        assert "File too large" in done.stderr
        assert list(folder.iterdir()) == []


STORE = """
import fcntl
import sys
from pathlib import Path
from stof.bench import results

def before(owner, name, step):
    own = getattr(owner, name)
    def first(*arguments):
        found = own(*arguments) if step == "read" else None
        print(step, flush=True)
        if step == "read":
            sys.stdin.readline()
        return found if step == "read" else own(*arguments)
    setattr(owner, name, first)

if sys.argv[1] == "read":
    before(results, "read_runs", "read")
if sys.argv[1] == "lock":
    before(fcntl, "flock", "lock")
for i in range(10):
    results.store(Path(sys.argv[2]) / "grid.json", {"key": [int(sys.argv[3]) + i]})
"""


def test_results_of_several_processes_are_all_kept(tmp_path: Path, started: list[Run]) -> None:
    started += [Run("", tmp_path, str(first), text=STORE) for first in (0, 10, 20)]
    assert [run.end() for run in started] == [(0, "")] * 3
    assert [r["key"] for r in results.read(tmp_path / "grid.json")] == [[i] for i in range(30)]
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["grid.json"]


def test_nobody_adds_results_between_reading_and_writing(tmp_path: Path, started: list[Run]) -> None:
    first = Run("read", tmp_path, "0", text=STORE)
    started.append(first)
    first.reach("read")
    second = Run("lock", tmp_path, "10", text=STORE)
    started.append(second)
    second.reach("lock")  # without a lock, it would not get here, and end before the first writes
    first.go_on("\n" * 10)
    assert first.end() == (0, "")
    assert second.end() == (0, "")
    assert [r["key"] for r in results.read(tmp_path / "grid.json")] == [[i] for i in range(20)]


def test_the_parent_keeps_its_files_when_a_forked_child_ends(tmp_path: Path) -> None:
    """What a child does at its end must not touch the temporaries that its parent works on."""
    text = (
        "import os, sys; from pathlib import Path; from stof.files import remove_temporaries, temporary_file\n"
        "with temporary_file(Path(sys.argv[1])) as new:\n"
        "    child = os.fork()\n"
        "    if not child: remove_temporaries(); os._exit(0)\n"
        "    os.waitpid(child, 0)\n"
        "    new.write(b'kept')\n"
        "    new.replace(Path(sys.argv[1]) / 'file')"
    )
    subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=True, timeout=300, env=ENVIRONMENT)
    assert (tmp_path / "file").read_bytes() == b"kept"
