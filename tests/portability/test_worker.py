# SPDX-License-Identifier: Apache-2.0
"""The process of sessions as macOS and Windows have it, on Linux: its channel of pipes, and how it ends with its parent."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.portability.test_systems import run_python

from stof.execution.worker.pipe_channel import PipeChannel
from stof.execution.worker.start import _START

WATCHDOG = 60.0  # seconds


@pytest.fixture
def ends() -> Iterator[tuple[PipeChannel, PipeChannel]]:
    """Both ends of a channel."""
    (read, written), (back, answered) = os.pipe(), os.pipe()
    first = PipeChannel(io.FileIO(back, "rb"), io.FileIO(written, "wb"))
    second = PipeChannel(io.FileIO(read, "rb"), io.FileIO(answered, "wb"))
    yield first, second
    for end in (first, second):
        end._outgoing.close()
    for end in (first, second):
        end.close()


ARRAYS = {
    "large": np.random.default_rng(0).standard_normal((300, 4000)).astype(np.float32),
    "transposed": np.arange(24, dtype=np.float64).reshape(4, 6).T,
    "every other": np.arange(20, dtype=np.int64)[::2],
    "empty": np.zeros((3, 0, 2), np.float32),
    "scalar": np.asarray(2.5, np.float16),
    "text": np.array([["a", "bc"], ["", "ü"]], object),
}


def test_arrays_come_as_they_were_sent(ends: tuple[PipeChannel, PipeChannel]) -> None:
    first, second = ends
    first.send(ARRAYS)
    found = second.receive(WATCHDOG)
    assert isinstance(found, dict)
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    assert found["large"].flags.writeable
    assert found["large"].ctypes.data % 64 == 0
    found["large"][:] = 0  # its own memory
    second.send([1, None])
    assert first.receive(WATCHDOG) == [1, None]


def test_a_wait_has_an_end_and_is_watched(ends: tuple[PipeChannel, PipeChannel]) -> None:
    first, _ = ends
    looks: list[float] = []
    with pytest.raises(TimeoutError, match=r"longer than 0\.3 s"):
        first.receive(0.3, lambda: looks.append(time.monotonic()))
    assert len(looks) > 3

    def refuse() -> None:
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        first.receive(None, refuse)


def test_a_wait_without_an_end_goes_in_steps(ends: tuple[PipeChannel, PipeChannel]) -> None:
    """A step of a wait ends soon: Ctrl-C is seen after it on Windows."""
    first, second = ends
    steps: list[bool] = []
    waiting = threading.Thread(target=lambda: steps.append(first._has_come(None)), daemon=True)
    waiting.start()
    waiting.join(WATCHDOG)
    assert steps == [False]
    threading.Timer(0.3, second.send, ["late"]).start()
    assert first.receive() == "late"


def test_the_end_of_the_other_side_is_seen(ends: tuple[PipeChannel, PipeChannel]) -> None:
    first, second = ends
    closed = threading.Event()
    first._when_closed = closed.set
    second._outgoing.close()
    for _ in range(2):
        with pytest.raises(EOFError):
            first.receive(WATCHDOG)
    assert closed.wait(WATCHDOG)
    second._incoming.close()
    with pytest.raises(BrokenPipeError):
        first.send(bytes(1 << 20))


def test_half_a_message_is_none(ends: tuple[PipeChannel, PipeChannel]) -> None:
    first, second = ends
    first._outgoing.write((1000).to_bytes(8, "little") + b"half")
    first._outgoing.close()
    with pytest.raises(EOFError):
        second.receive(WATCHDOG)


def test_a_parent_of_macos_that_ends_meanwhile() -> None:
    """SIGIO ends nothing there by itself; Python's handlers would wait for the end of the long call."""
    read, write = os.pipe()
    endless = "print('alive', flush=True)\nimport re\nre.match('(a|aa)+$', 'a' * 120 + 'b')\n"
    code = "import sys; sys.platform = 'darwin'\n" + _START.partition("from stof")[0] + endless
    command = [sys.executable, "-c", code, "0", str(read), *sys.path]
    with subprocess.Popen(command, pass_fds=(read,), text=True, stdout=subprocess.PIPE) as child:
        os.close(read)
        assert child.stdout is not None
        assert child.stdout.readline() == "alive\n"
        assert child.poll() is None
        os.close(write)
        assert child.wait(WATCHDOG) == signal.SIGIO  # as a status: the C library's _exit was called with its number


ENDS = """
import os, signal, sys, time
import numpy as np, onnx
from stof.execution import session_process
from stof.execution.session_worker import SessionSpec
LOOP = '''<ir_version: 8, opset_import: ["": 18]> g (float x) => (float y) {
    trips = Constant <value = int64 {9223372036854775807}> ()
    yes = Constant <value = bool {1}> ()
    end = Loop (trips, yes, x) <body = b (int64 i, bool go, float v) => (bool on, float w) {
        on = Identity (go)
        w = Neg (v)
    }>
    y = Identity (end)
}'''
model = onnx.parser.parse_model(LOOP).SerializeToString()
session = session_process.create_session(SessionSpec(model), 100.0)
process = session_process._thread_state.process
print(process.worker.popen.pid, flush=True)
process.worker.channel.send(__import__("stof.execution.session_worker").execution.session_worker.Request(
    (), session_process.Run(session._number, None, {"x": np.asarray(1.0, np.float32)})))
time.sleep(1)
os.kill(os.getpid(), 9)
"""


def test_a_parent_of_windows_that_is_killed_takes_the_process_along(tmp_path: Path) -> None:
    """Also without a job: the end of its standard input ends the process, within a run too."""
    done = run_python("win32", ENDS, tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    worker = int(done.stdout)
    end = time.monotonic() + WATCHDOG
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    raise AssertionError("the process of sessions outlives its parent")


def test_last_words_and_failures_of_the_process_are_told(tmp_path: Path) -> None:
    script = """
import os, numpy as np, onnx
from stof.execution import session_process
from stof.execution.session_process import RuntimeFailure, create_session, end_process
from stof.execution.session_worker import SessionSpec
from stof.execution.worker import start
text = '<ir_version: 8, opset_import: ["": 18]> g (float[4] x, int64[n] i) => (float[n] y) { y = Gather (x, i) }'
spec = SessionSpec(onnx.parser.parse_model(text).SerializeToString())
session = create_session(spec, 100.0)
feeds = {"x": np.zeros(4, np.float32), "i": np.array([9])}
for _ in range(2):
    try:
        session.run(None, feeds, 100.0)
    except RuntimeFailure as failure:
        print("out of data bounds" in str(failure), len(failure.__notes__), failure.__notes__[0].count("[E:onnxruntime"))
print(session.run(None, {**feeds, "i": np.array([1])}, 100.0, 1 << 40)[0].tolist())
session_process._thread_state.process.worker.popen.kill()
try:
    session.run(None, feeds, 100.0)
except RuntimeFailure as failure:
    print(failure)
start._START_WITH_PIPES = "import os; os.write(2, b'bad things'); os._exit(3)"
try:
    create_session(spec, 100.0)
except RuntimeFailure as failure:
    print(failure)
print(session_process._name_end(0xC0000005))
"""
    done = run_python("win32", script, tmp_path)
    assert done.stdout.splitlines() == [
        "True 1 1",
        "True 1 1",
        "[0.0]",
        "the process that runs ONNX Runtime was ended by SIGKILL; there may be too little memory",
        "the process that runs ONNX Runtime ended with status 3; its last message: bad things",
        "ended with exception 0xC0000005, an access violation",
    ], done.stderr
