# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  Python for Windows without an installation reads no PYTHONPATH: this file states the path.
"""The optimizer in a Python of Windows, which Wine may run: locks, outputs, the process of sessions and its end, whole models.

``build/windows/python tests/portability/check_windows.py MODEL.onnx`` (tools/windows/python.sh makes that Python). With
``STOF_LIBRARY``, a stof_ort.dll, it also optimizes the model and a folder of it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "optimizer"))

import numpy as np
import onnx
import psutil

from stof.errors import ArgumentError
from stof.execution import session_process
from stof.execution.run_limits import MemoryLimit
from stof.execution.session_process import RuntimeFailure, create_session, end_process
from stof.execution.session_worker import SessionSpec
from stof.execution.worker import start
from stof.files import folder_lock, temporary_file, temporary_folder, try_lock, write_text
from stof.system.memory import free_memory, resident_bytes
from stof.system.processor import cpu_name, usable_cores

WATCHDOG = 120.0  # seconds
NEG = '<ir_version: 8, opset_import: ["": 18]> g (float[n] x) => (float[n] y) { y = Neg(x) }'
LOOP = """<ir_version: 8, opset_import: ["": 18]> g (float x) => (float y) {
    trips = Constant <value = int64 {9223372036854775807}> ()
    yes = Constant <value = bool {1}> ()
    end = Loop (trips, yes, x) <body = b (int64 i, bool go, float v) => (bool on, float w) {
        on = Identity (go)
        w = Neg (v)
    }>
    y = Identity (end)
}"""


def spec(text: str) -> SessionSpec:
    return SessionSpec(onnx.parser.parse_model(text).SerializeToString())


def check_files(folder: Path) -> None:
    """Locks exclude, readers are not hindered, outputs are replaced, and nothing is left."""
    with temporary_file(folder) as new:
        assert new.is_locked
        new.write(b"a\nb\r\n" * 1000)
        other = os.open(new.path, os.O_RDWR | os.O_BINARY)  # type: ignore[attr-defined]
        assert try_lock(other) is False
        assert try_lock(other, shared=True) is False
        assert len(os.read(other, 1 << 20)) == 5000, "ends of lines are translated, or the lock hinders readers"
        os.close(other)
        new.replace(folder / "out")
    with temporary_file(folder) as new:
        new.write(b"data")
        new.publish(folder / "data")
        assert new.is_at(folder / "data")
    with temporary_folder(folder) as scratch:
        (scratch / "x").write_bytes(b"x")
    first, second, third = (os.open(folder / "out", os.O_RDWR) for _ in range(3))
    assert try_lock(first, shared=True) is True
    assert try_lock(second, shared=True) is True
    assert try_lock(third) is False
    for descriptor in (first, second, third):
        os.close(descriptor)
    with (folder / "out").open("rb"):
        expect(ArgumentError, "another program may have it open", lambda: write_text("report", folder / "out", ["a"]))
    write_text("report", folder / "out", ["×"])
    assert (folder / "out").read_bytes() == "×\n".encode()
    with folder_lock(folder):
        pass
    assert sorted(p.name for p in folder.iterdir()) == ["data", "out"]


def check_sessions() -> None:
    """Runs, failures, limits, and what a process that ended has said."""
    x = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    session = create_session(spec(NEG), WATCHDOG)
    (y,) = session.run(None, {"x": x}, WATCHDOG, 1 << 40)
    np.testing.assert_array_equal(y, -x)
    unknown = spec(NEG.replace("Neg", "NoSuchOperator"))
    expect(RuntimeFailure, "NoSuchOperator", lambda: create_session(unknown, WATCHDOG))
    expect(RuntimeFailure, "z", lambda: session.run(None, {"z": x}, WATCHDOG))
    expect(MemoryLimit, "more than 1 MiB", lambda: session.run(None, {"x": x}, WATCHDOG, 1 << 20))
    session = create_session(spec(NEG), WATCHDOG)
    process = session_process._thread_state.process
    assert process is not None
    process.worker.popen.kill()
    expect(RuntimeFailure, "ended with status 1", lambda: session.run(None, {"x": x}, WATCHDOG))
    endless = create_session(spec(LOOP), WATCHDOG)
    expect(TimeoutError, "longer than 2 s", lambda: endless.run(None, {"x": np.asarray(1.0, np.float32)}, 2.0))
    own, start._START_WITH_PIPES = start._START_WITH_PIPES, "import os; os.write(2, b'bad'); os._exit(3)"
    expect(RuntimeFailure, "ended with status 3; its last message: bad", lambda: create_session(spec(NEG), WATCHDOG))
    start._START_WITH_PIPES = own
    end_process()


def expect(kind: type[Exception], words: str, act: Callable[[], object]) -> None:
    """Does what has to raise an error with these words."""
    message = None
    try:
        act()
    except kind as error:
        message = str(error)
    assert message is not None, f"no {kind.__name__}"
    assert words in message, message


PARENT = f"""
import sys; sys.path.insert(0, {str(ROOT / "optimizer")!r})
import numpy as np, onnx
from stof.execution import session_process
from stof.execution.session_worker import SessionSpec
session = session_process.create_session(SessionSpec(onnx.parser.parse_model({LOOP!r}).SerializeToString()), {WATCHDOG})
print(session_process._thread_state.process.worker.popen.pid, flush=True)
session.run(None, {{"x": np.asarray(1.0, np.float32)}}, {WATCHDOG})
"""


def check_end_with_parent() -> None:
    """A parent that is killed takes its process of sessions along, within a run."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        time.sleep(1)
        assert psutil.pid_exists(worker)
        parent.kill()
    end = time.monotonic() + WATCHDOG
    while psutil.pid_exists(worker):
        assert time.monotonic() < end, "the process of sessions outlives its parent"
        time.sleep(0.1)


def check_models(model: Path, folder: Path) -> None:
    """A file and a folder are optimized, with verification and times."""
    import shutil

    from stof.cli import main

    (folder / "in/onnx").mkdir(parents=True)
    (folder / "out").mkdir()
    for path in model.parent.glob(f"{model.name}*"):
        shutil.copy(path, folder / "in/onnx" / path.name)
    assert main([str(model), "-o", str(folder / "fast.onnx"), "--report", str(folder / "report.html")]) == 0
    assert main([str(folder / "in"), "-o", str(folder / "out"), "--time"]) == 0
    assert (folder / "out/onnx/stof_ort.dll").is_file()
    assert (folder / "out/onnx" / model.name).read_bytes() == (folder / "fast.onnx").read_bytes()
    assert b"\r" not in (folder / "report.html").read_bytes()


def main() -> int:
    """Runs the checks; the number of those that failed is the status."""
    print(
        f"{sys.version}\n{cpu_name()}, {usable_cores()} cores, {free_memory() >> 20} MiB free, {resident_bytes() >> 20} held"
    )
    failed = 0
    checks = [(check_files, ()), (check_sessions, ()), (check_end_with_parent, ())]
    if os.environ.get("STOF_LIBRARY"):
        checks.append((check_models, (Path(sys.argv[1]).absolute(),)))  # type: ignore[arg-type]
    for check, arguments in checks:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            began = time.monotonic()
            try:
                check(*arguments, *([Path(folder)] if check in (check_files, check_models) else []))  # type: ignore[operator]
            except Exception as error:
                failed += 1
                print(f"FAILED {check.__name__}: {type(error).__name__}: {error}")
            else:
                print(f"passed {check.__name__}, {time.monotonic() - began:.1f} s")
    print(f"{len(checks) - failed} passed, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
