# SPDX-License-Identifier: Apache-2.0
"""Sessions of ONNX Runtime in a process of their own: what comes back, and how the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import stof
from stof.execution import session_process
from stof.execution.session_process import RuntimeFailure, Session, create_session, end_process
from stof.execution.session_worker import SessionSpec

WATCHDOG = 120.0  # seconds; only a defect takes as long
# A Loop over a constant that ends after 2^63 trips: runtimes compute it when the session is created.
ENDLESS = """
<ir_version: 8, opset_import: ["": 18]>
g (float x) => (float y) {
    trips = Constant <value = int64 {9223372036854775807}> ()
    yes = Constant <value = bool {1}> ()
    start = Constant <value = float {1.0}> ()
    end = Loop (trips, yes, start) <body = b (int64 i, bool go, float v) => (bool on, float w) {
        on = Identity (go)
        w = Neg (v)
    }>
    y = Add (x, end)
}
"""


def spec(text: str, **others: object) -> SessionSpec:
    return SessionSpec(onnx.parser.parse_model(text).SerializeToString(), **others)  # type: ignore[arg-type]


def identity(dtype: int) -> SessionSpec:
    x, y = (helper.make_tensor_value_info(n, dtype, None) for n in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    return SessionSpec(model.SerializeToString())


def pid() -> int:
    """Of the calling thread's process."""
    process = session_process._thread_state.process
    assert process is not None
    return process.worker.popen.pid


def await_end(number: int) -> None:
    """Waits until a process is gone, or is a zombie that nobody has asked for."""
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


@pytest.fixture
def fresh() -> Iterator[None]:
    """A process of the test's own."""
    end_process()
    yield
    end_process()


ARRAYS = {
    "large": np.random.default_rng(0).standard_normal((300, 1000), np.float32),
    "transposed": np.arange(24, dtype=np.float64).reshape(4, 6).T,
    "every other": np.arange(20, dtype=np.int64)[::2],
    "half": np.arange(7, dtype=np.float16),
    "empty": np.zeros((3, 0, 2), np.float32),
    "scalar": np.asarray(2.5, np.float32),
    "bool": np.array([[True, False]]),
    "text": np.array([["a", "bc"], ["", "ü"]], object),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_come_back_as_they_were(name: str) -> None:
    array = ARRAYS[name]
    kind = TensorProto.STRING if array.dtype == object else helper.np_dtype_to_tensor_dtype(array.dtype)
    session = create_session(identity(kind), WATCHDOG)
    assert (session.inputs, session.outputs) == (("x",), ("y",))
    (found,) = session.run(None, {"x": array}, WATCHDOG)
    np.testing.assert_array_equal(found, array, strict=True)


def test_outputs_are_those_that_were_asked_for() -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 18]> g (float[n] x) => (float[n] y, float[n] z) { y = Neg(x) z = Abs(x) }'
    )
    session = create_session(spec(text), WATCHDOG)
    x = np.array([-1.0, 2.0], np.float32)
    for names in (["z"], ["z", "y"], None):
        wanted = {"y": -x, "z": np.abs(x)}
        for found, name in zip(session.run(names, {"x": x}, WATCHDOG), names or ["y", "z"], strict=True):
            np.testing.assert_array_equal(found, wanted[name])


def test_outputs_outlast_the_process(fresh: None) -> None:
    array = np.arange(100_000, dtype=np.float32)
    (found,) = create_session(identity(TensorProto.FLOAT), WATCHDOG).run(None, {"x": array}, WATCHDOG)
    end_process()
    np.testing.assert_array_equal(found, array)


def test_what_the_runtime_refuses_is_told_and_the_session_goes_on() -> None:
    with pytest.raises(RuntimeFailure, match="NoSuchOperator"):
        create_session(
            spec('<ir_version: 8, opset_import: ["": 18]> g (float x) => (float y) { y = NoSuchOperator(x) }'), WATCHDOG
        )
    session = create_session(identity(TensorProto.FLOAT), WATCHDOG)
    with pytest.raises(RuntimeFailure, match="x"):
        session.run(None, {}, WATCHDOG)
    assert session.run(None, {"x": np.ones(2, np.float32)}, WATCHDOG)[0].tolist() == [1.0, 1.0]


def test_the_evaluator_of_onnx_stands_in() -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = Neg(x) }'
    session = create_session(spec(text, reference=True), WATCHDOG)
    assert session.run(["y"], {"x": np.array([1.0, -2.0], np.float32)}, WATCHDOG)[0].tolist() == [-1.0, 2.0]


@pytest.mark.parametrize("optimizations", ["all", "none"], ids=["while it is loaded", "while it runs"])
def test_an_endless_loop_ends_at_the_limit(optimizations: str, fresh: None) -> None:
    create_session(identity(TensorProto.FLOAT), WATCHDOG)
    worker = pid()

    def run() -> None:
        session = create_session(spec(ENDLESS, optimizations=optimizations), 0.5)
        session.run(None, {"x": np.asarray(1.0, np.float32)}, 0.5)

    with pytest.raises(TimeoutError, match=r"longer than 0\.5 s"):
        run()
    await_end(worker)
    session = create_session(identity(TensorProto.FLOAT), WATCHDOG)
    assert pid() != worker
    assert session.run(None, {"x": np.asarray(1.0, np.float32)}, WATCHDOG)[0] == 1.0


def test_a_process_that_is_killed_is_told_and_another_takes_its_place(fresh: None) -> None:
    session = create_session(identity(TensorProto.FLOAT), WATCHDOG)
    os.kill(pid(), signal.SIGKILL)
    for words in ("was ended by SIGKILL; there may be too little memory", "has ended"):
        with pytest.raises(RuntimeFailure, match=words):
            session.run(None, {"x": np.ones(2, np.float32)}, WATCHDOG)
    again = create_session(identity(TensorProto.FLOAT), WATCHDOG)
    assert again.run(None, {"x": np.ones(2, np.float32)}, WATCHDOG)[0].tolist() == [1.0, 1.0]


def test_each_thread_has_a_process_that_ends_with_it(fresh: None) -> None:
    session = create_session(identity(TensorProto.FLOAT), WATCHDOG)
    found: list[int] = []

    def run() -> None:
        own = create_session(identity(TensorProto.FLOAT), WATCHDOG)
        assert own.run(None, {"x": np.ones(1, np.float32)}, WATCHDOG)[0] == 1.0
        found.append(pid())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (other,) = found
    assert other != pid()
    await_end(other)
    assert session.run(None, {"x": np.ones(1, np.float32)}, WATCHDOG)[0] == 1.0


# Of one program: the first argument says how it ends.
PROGRAM = f"""
import os, signal, sys
import numpy as np, onnx
from stof.execution import session_process
from stof.execution.session_worker import SessionSpec
from stof.execution.worker.socket_channel import SocketChannel

def session(text, optimizations="none"):
    model = onnx.parser.parse_model(text).SerializeToString()
    return session_process.create_session(SessionSpec(model, optimizations=optimizations), {WATCHDOG})

feeds = {{"x": np.asarray(1.0, np.float32)}}
good = session('<ir_version: 8, opset_import: ["": 18]> g (float x) => (float y) {{ y = Neg (x) }}')
endless = session({ENDLESS!r})
worker = session_process._thread_state.process.worker.popen.pid
send = SocketChannel.send

def told(self, request):
    send(self, request)
    print(worker, flush=True)

if sys.argv[1] == "runs":
    SocketChannel.send = told
    endless.run(None, feeds, {WATCHDOG})
if sys.argv[1] == "loads":
    SocketChannel.send = told
    session({ENDLESS!r}, "all")
if sys.argv[1] == "waits":
    print(worker, flush=True)
    signal.pause()
if sys.argv[1] == "ends":
    print(worker, flush=True)
if sys.argv[1] == "forks":
    child = os.fork()
    if child == 0:  # must not touch the parent's process, neither now nor at its end
        own = session('<ir_version: 8, opset_import: ["": 18]> g (float x) => (float y) {{ y = Abs (x) }}')
        assert own.run(None, feeds, {WATCHDOG})[0] == 1
        assert session_process._thread_state.process.worker.popen.pid != worker
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert good.run(None, feeds, {WATCHDOG})[0] == -1
    print(worker, flush=True)
"""


@pytest.fixture
def program() -> Iterator[list[subprocess.Popen[str]]]:
    """Ends what a failed test left."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def start(program: list[subprocess.Popen[str]], how: str) -> tuple[subprocess.Popen[str], int]:
    """The program, and the process that holds its sessions."""
    environment = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    program.append(process)
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    return process, int(line)


@pytest.mark.parametrize("how", ["runs", "loads", "waits"])
def test_the_process_ends_when_its_program_is_killed(how: str, program: list[subprocess.Popen[str]]) -> None:
    process, worker = start(program, how)
    process.kill()
    process.communicate()
    await_end(worker)


@pytest.mark.parametrize("how", ["ends", "forks"])
def test_the_process_ends_with_its_program(how: str, program: list[subprocess.Popen[str]]) -> None:
    process, worker = start(program, how)
    _, errors = process.communicate(timeout=WATCHDOG)
    assert (process.returncode, errors) == (0, "")
    await_end(worker)


def test_sessions_that_are_gone_are_released(fresh: None) -> None:
    first = create_session(identity(TensorProto.FLOAT), WATCHDOG)
    process = session_process._thread_state.process
    assert process is not None
    kept = first._number
    del first
    assert list(process.released_sessions) == [kept]
    session_process.release_sessions()
    assert not process.released_sessions
    gone: Session = Session.__new__(Session)
    gone._process, gone._number = process, kept
    with pytest.raises(RuntimeFailure, match=str(kept)):  # the other end does not know it any more
        gone.run(None, {"x": np.ones(1, np.float32)}, WATCHDOG)
