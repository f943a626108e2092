# SPDX-License-Identifier: Apache-2.0
"""The tuning cache: kept, private, of one device and build, and used by several processes at once."""

from __future__ import annotations

import json
import math
import multiprocessing
import sqlite3
import time
from contextlib import closing
from datetime import UTC, datetime
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from stof.errors import ArgumentError
from stof.tuning_cache import Cache, EarlierMeasurements, Measurement

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
        database.execute("UPDATE measurements SET seconds = -1")
    assert cache.of(PROBLEM) == {}


UNDATED = (
    "CREATE TABLE IF NOT EXISTS measured\n"
    "    (problem TEXT, config TEXT, seconds REAL NOT NULL, PRIMARY KEY (problem, config)) WITHOUT ROWID"
)


def write_undated(path: Path, **seconds: object) -> None:
    """A file as versions before the date wrote it, of a device and a build."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    text = json.dumps({**PROBLEM, "device": "cpu", "build": "b1", "version": 1}, sort_keys=True)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(UNDATED)
        database.executemany("INSERT INTO measured VALUES (?, ?, ?)", [(text, c, s) for c, s in seconds.items()])


def test_measurements_without_a_date_count_and_stay_where_they_are(tmp_path: Path) -> None:
    """Files of versions that stored no date: nothing of them is lost, and those versions can go on using them."""
    path = tmp_path / "own" / "tuning.sqlite"
    write_undated(path, original=0.5, a=0.25, b=-1.0, c="no number")
    cache = Cache(path, "cpu", "b1")
    assert cache.measurements(PROBLEM) == {"original": Measurement(0.5, None), "a": Measurement(0.25, None)}
    cache.put(PROBLEM, "a", 0.125)
    found = cache.measurements(PROBLEM)["a"]
    assert found.seconds == 0.125
    assert found.time == pytest.approx(time.time(), abs=60)
    cache.put(PROBLEM, "original", math.inf)  # no longer counts, whatever was stored before
    assert cache.of(PROBLEM) == {"a": 0.125}
    with closing(sqlite3.connect(path)) as database:
        assert len(database.execute("SELECT * FROM measured").fetchall()) == 4


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW measured AS SELECT '' AS problem, '' AS config, 1.0 AS seconds",
        "CREATE TABLE measured (problem, config)",
        "CREATE VIEW measurements AS SELECT '' AS problem, '' AS config, 1.0 AS seconds, 1.0 AS time",
        "CREATE TABLE measurements (problem, config, seconds)",
    ],
)
def test_tables_of_another_form_are_not_read(statement: str, tmp_path: Path) -> None:
    """A view may compute without an end, and a trigger writes what it likes: the file is not trusted."""
    path = tmp_path / "own" / "tuning.sqlite"
    path.parent.mkdir(mode=0o700)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement)
    if "measurements" in statement:
        with pytest.raises(ArgumentError, match="STOF_CACHE names another file"):
            Cache(path, "cpu", "b1")
    else:
        assert Cache(path, "cpu", "b1").of(PROBLEM) == {}


def test_a_trigger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.sqlite"
    Cache(path, "cpu", "b1")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TRIGGER t AFTER INSERT ON measurements BEGIN DELETE FROM measurements; END")
    with pytest.raises(ArgumentError, match="not those of a tuning cache"):
        Cache(path, "cpu", "b1")


@pytest.mark.parametrize("date", ["'yesterday'", "1e300", "-5.0", "9e999", "x'00'"])
def test_a_date_that_is_none_is_an_unknown_one(date: str, tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.sqlite"
    cache = Cache(path, "cpu", "b1")
    cache.put(PROBLEM, "0", 0.5)
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(f"UPDATE measurements SET time = {date}")
    assert cache.measurements(PROBLEM) == {"0": Measurement(0.5, None)}
    cache.note_decision([PROBLEM], ["0"])
    assert cache.earlier == EarlierMeasurements(str(path), 1, (None,))
    assert "1 of unknown date" in cache.earlier.to_text()


def test_measurements_of_earlier_runs_can_be_ignored(tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.sqlite"
    write_undated(path, old=0.5)
    first = Cache(path, "cpu", "b1")
    first.put(PROBLEM, "first", 0.5)
    started = time.time()
    second = Cache(path, "cpu", "b1", started, ignores_earlier=True)
    assert second.of(PROBLEM) == {}
    second.put(PROBLEM, "second", 0.25)
    assert second.of(PROBLEM) == {"second": 0.25}
    assert set(first.of(PROBLEM)) == {"old", "first", "second"}


def test_only_what_earlier_runs_measured_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "own" / "tuning.sqlite"
    other = {**PROBLEM, "shapes": [[2, 4]]}
    first = Cache(path, "cpu", "b1")
    for problem in (PROBLEM, other):
        first.put(problem, "original", 1.0)
    first.note_decision([PROBLEM, other], ["original"])
    assert first.earlier is None
    second = Cache(path, "cpu", "b1", time.time())
    second.put(PROBLEM, "a", 0.5)
    for _ in range(2):  # the same decision, taken again
        second.note_decision([PROBLEM, other], ["original", "a", "not measured"])
    assert second.earlier is not None
    assert (second.earlier.decisions, len(second.earlier.times)) == (1, 2)
    words = second.earlier.to_text()
    assert f"1 follows 2 measurements of earlier runs ({datetime.now(UTC):%Y-%m-%d} " in words
    assert f" UTC) in {path}; --ignore-measurements decides without them" in words


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
