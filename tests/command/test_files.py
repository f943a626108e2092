# SPDX-License-Identifier: Apache-2.0
"""Files are read only where they are regular, written whole or not at all, and never over what is read."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stof
from stof.errors import ArgumentError
from stof.files import (
    TemporaryFile,
    check_outputs,
    outputs,
    read_bytes,
    read_text,
    remove_leftovers,
    remove_temporaries,
    temporary_file,
    temporary_folder,
    write_bytes,
    write_text,
)

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])}
# Makes a temporary file and a temporary folder with a file in it, says so, and waits to be killed.
WORKING = """
import sys
from pathlib import Path
from stof.files import temporary_file, temporary_folder
folder = Path(sys.argv[1])
with temporary_file(folder) as new, temporary_folder(folder) as scratch:
    (scratch / "inside").write_text("x")
    print("ready", flush=True)
    sys.stdin.read()
"""


def working(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WORKING, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_temporaries_of_killed_processes_go_and_those_of_others_stay(tmp_path: Path) -> None:
    killed = working(tmp_path)
    left = names(tmp_path)
    running = working(tmp_path)
    live = names(tmp_path) - left
    try:
        assert len(left) == len(live) == 2
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        # What a user might call files of his own, and what other versions of stof left.
        own = {
            ".stof-notes",
            ".stof-0123456789abcdef.tmp",
            f".stof-{'0' * 32}.tmp.txt",
            f"stof-{'0' * 32}.tmp",
            ".w.part",
        }
        for name in own:
            (tmp_path / name).write_text("mine")
        linked = tmp_path / f".stof-{'1' * 32}.tmp"
        linked.symlink_to(tmp_path / ".w.part")
        filled = tmp_path / f".stof-{'2' * 32}.tmp"  # no lock: none of stof's
        filled.mkdir()
        (filled / "file").write_text("mine")
        with temporary_file(tmp_path) as new, temporary_folder(tmp_path) as scratch:
            remove_leftovers(tmp_path)
            assert names(tmp_path) == {*own, *live, linked.name, filled.name, new.path.name, scratch.parent.name}
        assert names(tmp_path) == {*own, *live, linked.name, filled.name}
    finally:
        running.communicate("")
    assert names(tmp_path) == {*own, linked.name, filled.name}
    assert (filled / "file").read_text() == (tmp_path / ".w.part").read_text() == "mine"


def test_folders_whose_removal_was_cut_short_go(tmp_path: Path) -> None:
    empty, emptied = (tmp_path / f".stof-{c * 32}.tmp" for c in "ab")
    empty.mkdir()
    emptied.mkdir()
    (emptied / "lock").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == set()


def test_all_temporaries_of_a_process_can_be_removed_at_once(tmp_path: Path) -> None:
    """As at the end of a process, or in a signal's handler."""
    with temporary_file(tmp_path), temporary_folder(tmp_path) as scratch:
        (scratch / "x").touch()
        remove_temporaries()
        assert names(tmp_path) == set()


def test_new_files_have_the_mode_of_any_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a look at the process's umask, which can be read only by changing it for all threads."""
    monkeypatch.setattr(os, "umask", lambda _: pytest.fail("the umask of the process was changed"))
    (tmp_path / "plain").touch()
    write_bytes("report", tmp_path / "written", b"x")
    assert (tmp_path / "written").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("step", ["write", "fsync", "replace", "short"])
def test_a_full_disk_leaves_the_old_file(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "report"
    path.write_text("old")
    if step == "write":
        monkeypatch.setattr(TemporaryFile, "write", full)
    elif step == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    elif step == "replace":
        monkeypatch.setattr(Path, "replace", full)
    else:  # a file system that takes bytes and loses them
        monkeypatch.setattr(os, "fsync", lambda descriptor: os.ftruncate(descriptor, 2))
    words = "2 of 3 bytes were written" if step == "short" else "No space left on device"
    with pytest.raises(ArgumentError, match=f"the report .* cannot be written: {words}"):
        write_bytes("report", path, b"new")
    monkeypatch.undo()
    assert names(tmp_path) == {"report"}
    assert path.read_text() == "old"


def test_a_copy_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(5 << 20))
    with temporary_file(tmp_path) as new:
        new.copy(source)
        assert new.path.read_bytes() == source.read_bytes()

    for place in (0, (5 << 20) - 1):

        def damaged(given: object, target: object, _: int, place: int = place) -> None:
            data = bytearray(source.read_bytes())
            data[place] ^= 1
            target.write(data)  # type: ignore[attr-defined]

        monkeypatch.setattr(shutil, "copyfileobj", damaged)
        with temporary_file(tmp_path) as new, pytest.raises(OSError, match="reads back as other bytes"):
            new.copy(source)

    def changing(given: object, target: object, _: int) -> None:
        source.write_bytes(b"shorter")
        target.write(b"shorter")  # type: ignore[attr-defined]

    monkeypatch.setattr(shutil, "copyfileobj", changing)
    with temporary_file(tmp_path) as new, pytest.raises(ArgumentError, match="changed while it was copied"):
        new.copy(source)


def test_publishing_replaces_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    for links in (True, False):
        if not links:
            monkeypatch.setattr(Path, "hardlink_to", no_links)
        target = tmp_path / f"data{links}"
        with temporary_file(tmp_path) as new:
            new.write(b"first")
            new.publish(target)
        with temporary_file(tmp_path) as new:
            new.write(b"second")
            with pytest.raises(FileExistsError):
                new.publish(target)
        assert target.read_bytes() == b"first"
    assert names(tmp_path) == {"dataTrue", "dataFalse"}


def test_outputs_are_no_file_that_is_read_copied_or_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("in", "out"):
        Path(folder).mkdir()
    Path("in/model").write_text("model")
    Path("out/hard").hardlink_to("in/model")
    Path("out/soft").symlink_to("../in/model")
    Path("again").symlink_to("out")
    Path("out/later").symlink_to("new")

    def check(**written: str) -> None:
        check_outputs(
            {"input": Path("in/model")},
            {name: Path(path) for name, path in written.items()},
            {"external data 'w'": Path("out/w"), "external data 'sub/w'": Path("out/sub/w")},
        )

    check(output="out/model", report="out/report", plan="in/plan")
    for path in ("in/model", "in/../in/model", "out/hard", "out/soft", "again/soft", str(tmp_path / "in" / "model")):
        with pytest.raises(ArgumentError, match=r"the output .* is the input; choose another file"):
            check(output=path)
    for path in ("out/w", "again/w", "out/../out/w", "out/sub"):
        with pytest.raises(ArgumentError, match=r"is where external data '.*w' is copied, which the output needs"):
            check(report=path)
    for path in ("out/new", "again/new", "out/later"):
        with pytest.raises(ArgumentError, match=r"the plan .* is the output too"):
            check(output="out/new", plan=path)
    check(output="out/Model", report="out/MODEL", plan="out/W")
    monkeypatch.setattr(outputs, "ignores_case", lambda _: True)
    with pytest.raises(ArgumentError, match="the report out/MODEL is the output too"):
        check(output="out/Model", report="out/MODEL")
    with pytest.raises(ArgumentError, match=r"is where external data 'w' is copied"):
        check(plan="out/W")
    with pytest.raises(ArgumentError, match="is the output too"):  # one letter, or two
        check(output="out/\u00e9", report="out/E\u0301")


def test_whether_a_folder_ignores_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not outputs.ignores_case(tmp_path)
    monkeypatch.setattr(os.path, "lexists", lambda path: Path(str(path).lower()).is_file())
    (tmp_path / "lower").mkdir()
    monkeypatch.chdir(tmp_path / "lower")
    assert outputs.ignores_case(Path())


def test_paths_that_no_file_can_have(tmp_path: Path) -> None:
    (tmp_path / "cycle").symlink_to("cycle")
    for name, words in (("a" * 300, "File name too long"), ("cycle", "symbolic links"), ("a\0b", "null byte")):
        with pytest.raises(ArgumentError, match=f"the output .* cannot be used: .*{words}"):
            check_outputs({}, {"output": tmp_path / name})
        with pytest.raises(ArgumentError, match=f"the plan .* cannot be read: .*{words}"):
            read_text("plan", tmp_path / name)
    longest = tmp_path / ("a" * 255)
    write_text("report", longest, ["x"])
    assert longest.read_text() == "x\n"


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    """At once: a pipe waits for a writer, and a device may have no end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ArgumentError, match="a device or a pipe, expected a file"):
            read_bytes("plan", path)
    with pytest.raises(ArgumentError, match="Is a directory"):
        read_bytes("plan", tmp_path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ArgumentError, match=re.escape(f"has {1 << 40} bytes, expected at most")):
        read_text("plan", tmp_path / "large")


def test_names_and_texts_that_are_no_utf_8(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"report\xff")
    write_text("report", path, ['"caf\u00e9 \udcff"'])
    assert read_text("report", path) == '"caf\u00e9 \\udcff"\n'
    assert os.listdir(os.fsencode(tmp_path)) == [b"report\xff"]  # noqa: PTH208 (bytes)
