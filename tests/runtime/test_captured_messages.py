# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime's own messages: none on the terminal of a run that succeeds, and told where they explain a failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.command.test_cli import ATTENTION, WINDOW, text

from stof import cli
from stof.execution import session_process
from stof.execution.captured_messages import CapturedMessages, import_onnxruntime
from stof.execution.session_process import RuntimeFailure, create_session, end_process
from stof.execution.session_worker import SessionSpec
from stof.execution.worker import start as worker_start

WATCHDOG = 120.0  # seconds


@pytest.fixture
def fresh() -> Iterator[None]:
    """A process of the test's own."""
    end_process()
    yield
    end_process()


@pytest.fixture
def logged(fresh: None, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the processes have written, as it is forgotten."""
    found: list[str] = []
    clear = CapturedMessages.clear

    def record(self: CapturedMessages) -> None:
        found.append(self.text())
        clear(self)

    monkeypatch.setattr(CapturedMessages, "clear", record)
    return found


def with_ids(nodes: list[onnx.NodeProto], constants: dict[str, np.ndarray]) -> onnx.ModelProto:
    """Attention over q, k and v, and nodes that read the integers ``ids`` [4, S], rows of a table, and fail for some."""
    model = text(WINDOW + ATTENTION, more=", int64[4,S] ids")
    model.graph.node.append(helper.make_node("Gather", ["table", "ids"], ["embedded"]))
    model.graph.node.extend(nodes)
    constants = {**constants, "table": np.arange(300, dtype=np.float32).reshape(100, 3)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(v), n) for n, v in constants.items())
    for name in ("embedded", "found"):
        model.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    return model


def first_token() -> onnx.ModelProto:
    """Reads where the number 2 stands first, which fails where it stands nowhere."""
    nodes = [
        helper.make_node("Equal", ["ids", "token"], ["is_token"]),
        helper.make_node("NonZero", ["is_token"], ["places"]),
        helper.make_node("Gather", ["places", "first"], ["place"], axis=1),
        helper.make_node("Cast", ["place"], ["found"], to=TensorProto.FLOAT),
    ]
    return with_ids(nodes, {"token": np.int64(2), "first": np.array([0])})


def pairs() -> onnx.ModelProto:
    """Puts the places of odd numbers into pairs, which fails where one is left over."""
    nodes = [
        helper.make_node("Mod", ["ids", "token"], ["is_odd"]),
        helper.make_node("NonZero", ["is_odd"], ["places"]),
        helper.make_node("Reshape", ["places", "pair"], ["paired"]),
        helper.make_node("Cast", ["paired"], ["found"], to=TensorProto.FLOAT),
    ]
    return with_ids(nodes, {"token": np.int64(2), "pair": np.array([2, -1, 2])})


def count() -> onnx.ModelProto:
    """Looks up how often the number 2 stands in the ids, which fails from three times on."""
    nodes = [
        helper.make_node("Equal", ["ids", "token"], ["is_token"]),
        helper.make_node("Cast", ["is_token"], ["ones"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["ones"], ["number"], keepdims=0),
        helper.make_node("Gather", ["names", "number"], ["found"]),
    ]
    return with_ids(nodes, {"token": np.int64(2), "names": np.arange(3, dtype=np.float32)})


@pytest.mark.parametrize("make", [first_token, pairs, count])
def test_a_run_that_succeeds_prints_no_message_of_the_runtime(
    make: object, logged: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(make(), path)  # type: ignore[operator]
    status = cli.main([str(path), "--verify-budget", "2"])
    end_process()
    captured = capfd.readouterr()
    assert status == 0, captured.err
    assert "written: " in captured.out
    assert captured.err == ""
    assert any("[E:onnxruntime" in words for words in logged), "the model has to fail on some inputs"


def test_a_failure_carries_the_messages_of_its_request(fresh: None, capfd: pytest.CaptureFixture[str]) -> None:
    graph = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 18]> g (float[4] x, int64[n] i) => (float[n] y) { y = Gather (x, i) }'
    )
    session = create_session(SessionSpec(graph.SerializeToString()), WATCHDOG)
    feeds = {"x": np.zeros(4, np.float32), "i": np.array([9])}
    with pytest.raises(RuntimeFailure, match="out of data bounds") as caught:
        session.run(None, feeds, WATCHDOG)
    (note,) = caught.value.__notes__
    assert note.startswith("ONNX Runtime's messages:\n")
    assert "[E:onnxruntime" in note
    assert "\x1b" not in note
    assert session.run(None, {**feeds, "i": np.array([1])}, WATCHDOG)[0].tolist() == [0.0]
    with pytest.raises(RuntimeFailure) as caught:
        session.run(None, {}, WATCHDOG)
    assert "out of data bounds" not in "".join(getattr(caught.value, "__notes__", ()))
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (
            b"\\x1b[31mterminate called after throwing\\x1b[m\\n  what(): bad",
            "terminate called after throwing; what(): bad",
        ),
        (b"one\\ntwo\\nthree\\nfour\\n", "two; three; four"),
        (b"x" * 30_000, "x" * 400),
    ],
)
def test_the_last_words_of_a_process_are_told(
    written: bytes, words: str, fresh: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    dying = f"import os; os.write(2, b'{written.decode()}'); os.abort()"
    monkeypatch.setattr(worker_start, "_START", dying)
    with pytest.raises(RuntimeFailure) as caught:
        create_session(SessionSpec(b""), WATCHDOG)
    assert str(caught.value) == f"the process that runs ONNX Runtime was ended by SIGABRT; its last message: {words}"
    assert capfd.readouterr().err == ""


def test_the_last_words_before_the_first_request_are_told(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_start, "_START", "import os; os.write(2, b'no such library'); os.abort()")
    process = session_process._SessionProcess()
    process.worker.popen.wait(WATCHDOG)
    with pytest.raises(RuntimeFailure, match=r"ended by SIGABRT; its last message: no such library$"):
        process.request(None, WATCHDOG)


def test_a_process_that_says_nothing_has_no_last_words(fresh: None) -> None:
    graph = '<ir_version: 8, opset_import: ["": 18]> g (float x) => (float y) { y = Neg (x) }'
    session = create_session(SessionSpec(onnx.parser.parse_model(graph).SerializeToString()), WATCHDOG)
    process = session_process._thread_state.process
    assert process is not None
    os.kill(process.worker.popen.pid, signal.SIGTERM)
    with pytest.raises(RuntimeFailure, match=r"was ended by SIGTERM$"):
        session.run(None, {"x": np.float32(1)}, WATCHDOG)


def test_messages_are_forgotten_and_go_on() -> None:
    messages = CapturedMessages()
    other = os.dup(messages.descriptor)
    for words in (b"first", b"second"):
        os.write(other, words)
        assert messages.text() == words.decode()
        messages.clear()
        assert messages.text() == messages.summary() == ""
    os.write(other, b"a\xff\n\n b \n")
    assert messages.summary() == "a\ufffd; b"
    os.close(other)
    messages.close()


def test_messages_go_with_their_process(fresh: None) -> None:
    def files() -> int:
        return sum("stof-messages" in str(p.readlink()) for p in Path("/proc/self/fd").iterdir() if p.is_symlink())

    graph = '<ir_version: 8, opset_import: ["": 18]> g (float x) => (float y) { y = Neg (x) }'
    model = onnx.parser.parse_model(graph).SerializeToString()
    before = files()
    for _ in range(3):
        create_session(SessionSpec(model), WATCHDOG)
        assert files() == before + 1
        end_process()
    assert files() == before


NOISY = """
import contextlib, os
with contextlib.suppress(OSError):
    os.write(2, b"[W:onnxruntime:Default, device_discovery.cc:164] GPU device discovery failed\\n")
"""


@pytest.mark.parametrize("closed", [False, True])
def test_the_import_is_quiet(closed: bool, tmp_path: Path) -> None:
    """On machines without devices of a kind, ONNX Runtime warns when it is imported."""
    (tmp_path / "onnxruntime.py").write_text(NOISY)
    code = (
        "import sys; from stof.execution.captured_messages import import_onnxruntime as load\n"
        "assert load() is load() is sys.modules['onnxruntime']\n"
        "import os; print('out'); " + ("" if closed else "os.write(2, b'after')")
    )
    words = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(cli.__file__).parents[1])])}
    command = ["sh", "-c", '"$@" 2>&-', "sh", *words] if closed else words
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    assert done.stdout == b"out\n"
    assert done.stderr == (b"" if closed else b"after")
    assert import_onnxruntime().__name__ == "onnxruntime"
