# SPDX-License-Identifier: Apache-2.0
"""The tuning cache: kept, private, of one device and build, and used by several processes at once."""

from __future__ import annotations

import multiprocessing
import sqlite3
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from stof.errors import ArgumentError
from stof.tuning_cache import Cache

PROBLEM = {"chain": "axes n = 4", "shapes": [[1, 4]]}


def test_what_is_kept_is_found(tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.sqlite"
    Cache(path, "cpu", "b1").put(PROBLEM, "0", 0.5)
    Cache(path, "cpu", "b1").put(PROBLEM, "0", 0.25)
    Cache(path, "cpu", "b1").put(PROBLEM, "2", 0.75)
    assert Cache(path, "cpu", "b1").of(PROBLEM) == {"0": 0.25, "2": 0.75}
    assert path.parent.stat().st_mode & 0o077 == 0


def test_another_device_build_or_problem_is_another_entry(tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.sqlite"
    Cache(path, "cpu", "b1").put(PROBLEM, "0", 0.5)
    assert Cache(path, "cpu", "b2").of(PROBLEM) == {}
    assert Cache(path, "gpu", "b1").of(PROBLEM) == {}
    assert Cache(path, "cpu", "b1").of({**PROBLEM, "shapes": [[2, 4]]}) == {}


ROUNDS = 150
WORKERS = 4


def _write(folder: Path, worker: int, start: Barrier) -> None:
    try:
        for i in range(ROUNDS):
            start.wait(60)  # all make the same new file at once
            Cache(folder / f"{i}.sqlite", "cpu", "b1").put(PROBLEM, f"{worker}", 1.0)
    except Exception:
        start.abort()  # the others need not wait
        raise


def test_several_processes(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(WORKERS)
    workers = [context.Process(target=_write, args=(folder, w, start)) for w in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [w.exitcode for w in workers] == [0] * WORKERS
    for i in range(ROUNDS):
        assert len(Cache(folder / f"{i}.sqlite", "cpu", "b1").of(PROBLEM)) == WORKERS


def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(ArgumentError, match="can be written by others"):
        Cache(folder / "tuning.sqlite", "cpu", "b1")


def test_a_file_that_is_no_cache_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.sqlite"
    path.parent.mkdir(mode=0o700)
    path.write_bytes(b"no database at all, but long enough to look like one" * 4)
    with pytest.raises(ArgumentError, match="cannot be used"):
        Cache(path, "cpu", "b1")


def test_damaged_entries_are_no_entries(tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.sqlite"
    cache = Cache(path, "cpu", "b1")
    cache.put(PROBLEM, "0", 0.5)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE measured SET seconds = -1")
    assert cache.of(PROBLEM) == {}


def test_a_file_damaged_at_any_place_gives_no_other_error(tmp_path: Path) -> None:
    folder = tmp_path / "own"
    Cache(folder / "whole", "cpu", "b1").put(PROBLEM, "0", 0.5)
    whole = (folder / "whole").read_bytes()
    used = [i for i, byte in enumerate(whole) if byte]
    path = folder / "damaged"
    for at in used:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
        try:
            cache = Cache(path, "cpu", "b1")
        except ArgumentError:
            continue
        cache.put(PROBLEM, "2", 0.5)
        assert all(seconds > 0 for seconds in cache.of(PROBLEM).values())  # a damaged number is one
