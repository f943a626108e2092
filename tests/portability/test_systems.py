# SPDX-License-Identifier: Apache-2.0
"""The optimizer under simulated macOS and Windows: its imports, and whole runs without what these systems lack."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import onnx
import pytest
from tests.command.test_cli import ATTENTION, WINDOW, text

from stof.system.processor import cpu_name

ROOT = Path(__file__).resolve().parents[2]
SIMULATION = Path(__file__).with_name("simulated_system.py")
SYSTEMS = ("win32", "darwin")
WATCHDOG = 300.0  # seconds

IMPORTS = """
import importlib, pkgutil, stof
names = [m.name for m in pkgutil.walk_packages(stof.__path__, "stof.") if not m.name.endswith("__main__")]
names = [n for n in names if not n.startswith(("stof.torch", "stof.integrations."))]  # which need other packages
for name in names:
    importlib.import_module(name)
print(len(names))
"""
COMMAND = "import sys; from stof.cli import main; sys.exit(main())"
LOCKS = """
import os, sys, time
from pathlib import Path
from stof.files import folder_lock, remove_leftovers, temporary_file, temporary_folder, try_lock, write_text
from stof.files import temporary

folder = Path(sys.argv[1])
with temporary_file(folder) as new:
    assert new.is_locked
    other = os.open(new.path, os.O_RDWR)
    assert try_lock(other) is False
    assert try_lock(other, shared=True) is False
    os.close(other)
    new.write(b"whole")
    new.replace(folder / "out")
    assert new.file.closed, "Windows renames no open file"
    assert new.is_at(folder / "out")
assert (folder / "out").read_bytes() == b"whole"
with temporary_file(folder) as new:
    new.write(b"data")
    new.publish(folder / "data")
    assert new.is_at(folder / "data")
    first = os.open(folder / "data", os.O_RDWR)
    assert try_lock(first, shared=True) is False, "the copy is locked until its model is complete"
    os.close(first)
first, second, third = (os.open(folder / "data", os.O_RDWR) for _ in range(3))
assert try_lock(first, shared=True) is True
assert try_lock(second, shared=True) is True
assert try_lock(third) is False
for descriptor in (first, second, third):
    os.close(descriptor)
with temporary_folder(folder) as scratch:
    (scratch / "x").write_bytes(b"x")
with folder_lock(folder):
    pass

# What a killed run left is removed once it is old enough: without a lock, a file may be about to get its final name.
left = folder / f".stof-{'0' * 32}.tmp"
left.write_bytes(b"half")
remove_leftovers(folder)
assert left.exists()
old = time.time() - 1000
os.utime(left, (old, old))
remove_leftovers(folder)
assert not left.exists()
print(sorted(os.listdir(folder)))
"""
SIZES = """
import ctypes
from stof.system import windows_api as api
print(ctypes.sizeof(api._Overlapped), ctypes.sizeof(api._BasicLimits), ctypes.sizeof(api._ExtendedLimits))
print(api.end_with_this_process(1))
"""


def run_python(
    system: str, script: str, folder: Path, *arguments: object, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A script in a Python that looks like one of another system; "" is this one."""
    path, temporary = folder / "script.py", folder / "temporary"
    temporary.mkdir(exist_ok=True)
    path.write_text(script, encoding="utf-8")
    words = [sys.executable, *([str(SIMULATION), system] if system else []), str(path), *map(str, arguments)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "optimizer"), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(temporary),
        **variables,
    }
    return subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=WATCHDOG, env=environment)


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_module_can_be_imported(system: str, tmp_path: Path) -> None:
    done = run_python(system, IMPORTS, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 400


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_simulation_lacks_what_the_system_lacks(system: str, tmp_path: Path) -> None:
    """Else the tests of this file could not fail."""
    done = run_python(system, "import os; os.sched_getaffinity(0)", tmp_path)
    assert "has no attribute 'sched_getaffinity'" in done.stderr
    done = run_python(system, "import fcntl, sys; print(sys.platform)", tmp_path)
    assert done.stdout.strip() == ("" if system == "win32" else system)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_model_is_optimized_as_on_linux(system: str, tmp_path: Path) -> None:
    """The same file, verified by runs in the process of sessions."""
    model = text(WINDOW + ATTENTION)
    written = {}
    for name in ("", system):
        folder = tmp_path / (name or "linux")
        folder.mkdir()
        onnx.save(model, folder / "model.onnx")
        done = run_python(name, COMMAND, folder, folder / "model.onnx", "--json", folder / "report.json", "--time")
        assert done.returncode == 0, done.stderr + done.stdout
        assert done.stderr == ""
        report = json.loads((folder / "report.json").read_text())
        assert report["verification"]["ok"]
        assert len(report["verification"]["comparisons"]) > 1, "the site and the model are compared"
        assert b"\r" not in (folder / "report.json").read_bytes()
        written[name] = (folder / "model.stof.onnx").read_bytes()
        names = ["model.onnx", "model.stof.onnx", "report.json", "script.py", "temporary"]
        assert sorted(p.name for p in folder.iterdir()) == names
        assert not list((folder / "temporary").glob(".stof-*.tmp"))
    assert written[""] == written[system]
    assert b"StofAttention" in written[system]


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_folder_is_optimized_into_an_empty_one(system: str, tmp_path: Path) -> None:
    (tmp_path / "in" / "onnx").mkdir(parents=True)
    (tmp_path / "out").mkdir()
    onnx.save(text(WINDOW + ATTENTION), tmp_path / "in/onnx/model.onnx")
    (tmp_path / "in/config.json").write_text("{}")
    done = run_python(system, COMMAND, tmp_path, tmp_path / "in", "-o", tmp_path / "out", "--no-verify")
    assert done.returncode == 0, done.stderr + done.stdout
    library = {"win32": "stof_ort.dll", "darwin": "libstof_ort.dylib"}[system]
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {"config.json", "onnx/model.onnx", f"onnx/{library}"}


def test_locks_and_temporary_files_of_windows(tmp_path: Path) -> None:
    folder = tmp_path / "outputs"
    folder.mkdir()
    done = run_python("win32", LOCKS, tmp_path, folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['data', 'out']"


def test_structures_of_windows_have_its_sizes(tmp_path: Path) -> None:
    """Of 64-bit Windows: OVERLAPPED, JOBOBJECT_BASIC_LIMIT_INFORMATION, JOBOBJECT_EXTENDED_LIMIT_INFORMATION."""
    done = run_python("win32", SIZES, tmp_path)
    assert done.stdout.split() == ["32", "64", "144", "True"], done.stderr


@pytest.mark.parametrize(("system", "number"), [("win32", "SIGBREAK"), ("darwin", "SIGHUP")])
def test_signals_of_the_system_end_a_command(system: str, number: str, tmp_path: Path) -> None:
    script = f"""
import signal, sys, time
from stof.interrupts import end_by_signals, report_interrupt
try:
    with end_by_signals("program", lambda: print("cleaned up"), last=True):
        signal.raise_signal(signal.{number})
        time.sleep(60)
except KeyboardInterrupt as interrupt:
    sys.exit(report_interrupt("program", interrupt))
"""
    done = run_python(system, script, tmp_path)
    expected = signal.SIGTTIN if number == "SIGBREAK" else signal.SIGHUP  # the simulation has no number of its own
    assert done.returncode == 128 + expected, done.stderr
    assert done.stdout.strip() == "cleaned up"
    assert done.stderr.startswith("program: interrupted by SIG")


@pytest.mark.parametrize(("system", "end"), [("win32", "stof/Cache"), ("darwin", "Library/Caches/stof")])
def test_the_cache_is_where_the_system_keeps_caches(system: str, end: str, tmp_path: Path) -> None:
    script = "from stof.tuning_cache import cache_path; print(cache_path())"
    home = {"HOME": str(tmp_path), "LOCALAPPDATA": str(tmp_path), "STOF_CACHE": ""}
    done = run_python(system, script, tmp_path, **home)
    assert Path(done.stdout.strip()) == tmp_path / end / "tuning.sqlite", done.stderr


X86 = "processor\t: 0\nmodel name\t: Some CPU @ 3.00GHz\n\nprocessor\t: 1\nmodel name\t: Another\n"
AARCH64 = "processor\t: 0\nCPU implementer\t: 0x41\nCPU variant\t: 0x1\nCPU part\t: 0xd40\nCPU revision\t: 1\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (X86, "Some CPU @ 3.00GHz"),
        (AARCH64, "CPU implementer 0x41, CPU part 0xd40, CPU variant 0x1"),
        ("processor\t: 0\n", platform.machine()),
        (None, platform.machine()),
    ],
)
def test_the_processor_has_a_name(text: str | None, name: str, tmp_path: Path) -> None:
    """Results of different processors stay apart in the tuning cache, on AArch64 too."""
    if text is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc/cpuinfo").write_text(text, encoding="utf-8")
    assert cpu_name(tmp_path) == name


@pytest.mark.parametrize("system", SYSTEMS)
def test_figures_of_the_machine(system: str, tmp_path: Path) -> None:
    script = """
import os
import time
from stof.bench.measure import pinned
from stof.bench.memory import measure_run
from stof.system.memory import PeakMemory, free_memory, resident_bytes
from stof.system.processor import cpu_name, usable_cores
assert cpu_name() and usable_cores() >= 1
assert free_memory() > 1 << 24
before = resident_bytes()
peak = PeakMemory(os.getpid())
kept = bytearray(b"x" * (64 << 20))
assert peak.peak_bytes() - before > 48 << 20
assert PeakMemory(1 << 22).peak_bytes() == 0
def hold_memory():
    kept = bytearray(b"x" * (64 << 20))
    time.sleep(0.1)  # frees the interpreter for the thread that samples, as a session's run does
assert measure_run(hold_memory)["above"] > 48 << 20
with pinned(1):
    print(usable_cores())
"""
    done = run_python(system, script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 1
