# SPDX-License-Identifier: Apache-2.0
"""What was measured before: a database that any number of processes may use at once.

Keys hold the problem, the configuration, the device and the build of the library: a new library measures again.
"""

from __future__ import annotations

import math
import os
import sqlite3
import stat
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stof.arguments.environment import CACHE
from stof.errors import ArgumentError
from stof.files import strict_json
from stof.options import Options
from stof.system.processor import cpu_name, usable_cores

VERSION = 1
OPTION = "--ignore-measurements"
_WAIT = 30.0  # seconds for another process to finish writing
_MOST = 10_000  # configurations of a problem that are read: the file may hold anything
_DAMAGED = (sqlite3.Error, UnicodeDecodeError)  # text of a damaged file reaches messages, and may be no text
_TABLE = """measurements
    (problem TEXT, config TEXT, seconds REAL NOT NULL, time REAL NOT NULL, PRIMARY KEY (problem, config)) WITHOUT ROWID"""
# What versions before that have written, without a date. It is read and never changed: they may still be in use.
_UNDATED_TABLE = """measured
    (problem TEXT, config TEXT, seconds REAL NOT NULL, PRIMARY KEY (problem, config)) WITHOUT ROWID"""


def cache_path() -> Path:
    """``STOF_CACHE``, or ``tuning.sqlite`` in the folder of stof among the user's caches.

    Raises:
        ArgumentError: for a user without a home.
    """
    if path := CACHE.text():
        return Path(path)
    if sys.platform != "linux":
        import platformdirs

        return Path(platformdirs.user_cache_dir("stof", appauthor=False)) / "tuning.sqlite"
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = str(Path.home() / ".cache")
        except RuntimeError as error:
            raise ArgumentError(
                "this user has no home folder; set STOF_CACHE to the file of the tuning cache"
            ) from error
    return Path(base) / "stof" / "tuning.sqlite"


def has_cache() -> bool:
    """Whether something was measured before."""
    try:
        return cache_path().is_file()
    except (OSError, ArgumentError):
        return False


def device_name(library: Mapping[str, Any]) -> str:
    """The processor and how many of its cores this process may use."""
    return f"{cpu_name()}, {usable_cores()} cores, {library.get('cpu_isa', '')}"


@dataclass(frozen=True)
class Measurement:
    """One measured time.

    Attributes:
        seconds: the time.
        time: when it was measured, in seconds since 1970; None: not known.
    """

    seconds: float
    time: float | None


@dataclass(frozen=True)
class EarlierMeasurements:
    """Measurements of earlier runs that decided in this one.

    Attributes:
        path: of the cache that keeps them.
        decisions: how many choices they decided; candidates that are alike share one.
        times: when each of them was made, in seconds since 1970; None: not known.
    """

    path: str
    decisions: int
    times: tuple[float | None, ...]

    @property
    def dates(self) -> list[str]:
        """When the first and the last one of known time was made, as UTC; empty where none is known."""
        times = [t for t in self.times if t is not None]
        return (
            [datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%d %H:%M UTC") for t in (min(times), max(times))]
            if times
            else []
        )

    def join(self, other: EarlierMeasurements) -> EarlierMeasurements:
        """Those of two ops together."""
        return EarlierMeasurements(self.path, self.decisions + other.decisions, self.times + other.times)

    def to_text(self) -> str:
        """How many there are, from when, where they lie, and the option that ignores them."""
        count, undated = len(self.times), self.times.count(None)
        when = [" to ".join(dict.fromkeys(self.dates))] if self.dates else []
        when += [f"{undated} of unknown date"] if undated else []
        return (
            f"{self.decisions} follow{'' if self.decisions > 1 else 's'} {count} measurement{'s' if count > 1 else ''} of "
            f"earlier runs ({', '.join(when)}) in {self.path}; {OPTION} decides without them"
        )

    def to_json(self) -> dict[str, Any]:
        """Every fact by its key in the report's JSON."""
        first, last = self.dates or (None, None)
        return {
            "path": self.path,
            "decisions": self.decisions,
            "measurements": len(self.times),
            "undated": self.times.count(None),
            "first": first,
            "last": last,
        }


class Cache:
    """Seconds by problem and configuration.

    Args:
        path: the file.
        device: what measurements are of.
        build: of the library.
        started: when the run began, in seconds since 1970; None: now. What was measured before is of an earlier run.
        ignores_earlier: whether measurements of earlier runs are as if they were not there.

    Raises:
        ArgumentError: when the file cannot be used; it says which and why.
    """

    def __init__(
        self, path: Path, device: str, build: str, started: float | None = None, ignores_earlier: bool = False
    ) -> None:
        self.path = path
        self.common = {"device": device, "build": build, "version": VERSION}
        self._started = time.time() if started is None else started
        self._ignores_earlier = ignores_earlier
        self._earlier: dict[tuple[str, str], float | None] = {}  # those that decided, by problem and configuration
        self._decisions: set[str] = set()  # the first problem of each decision
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._check_private(path.parent)
            with closing(self._open()) as database, database:
                database.execute(f"CREATE TABLE IF NOT EXISTS {_TABLE}")
                if not _has_table(database, _TABLE):
                    raise sqlite3.DatabaseError("its tables are not those of a tuning cache")
                self._has_undated = _has_table(database, _UNDATED_TABLE)
        except (OSError, *_DAMAGED) as error:
            raise ArgumentError(
                f"the tuning cache {path} cannot be used: {error}; STOF_CACHE names another file"
            ) from error

    def _check_private(self, folder: Path) -> None:
        if not hasattr(os, "getuid"):
            return
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return
        raise ArgumentError(
            f"the folder {folder} of the tuning cache can be written by others; STOF_CACHE names a file elsewhere"
        )

    def _open(self) -> sqlite3.Connection:
        # With the journal that SQLite has by itself: the switch to a write-ahead log does not wait for other processes,
        # and gains nothing where a connection writes once. A file that has such a log keeps it.
        return sqlite3.connect(self.path, timeout=_WAIT)

    def _problem(self, problem: Mapping[str, Any]) -> str:
        return strict_json.dumps({**self.common, **problem}, sort_keys=True)

    def of(self, problem: Mapping[str, Any]) -> dict[str, float]:
        """What was measured of a problem on this device, by configuration."""
        return {config: measurement.seconds for config, measurement in self.measurements(problem).items()}

    def measurements(self, problem: Mapping[str, Any]) -> dict[str, Measurement]:
        """The same with dates."""
        commands = [f"SELECT config, seconds, time FROM measurements WHERE problem = ? LIMIT {_MOST}"]
        if self._has_undated:
            commands.insert(0, f"SELECT config, seconds, NULL FROM measured WHERE problem = ? LIMIT {_MOST}")
        entries: dict[str, tuple[object, object]] = {}
        try:
            with closing(self._open()) as database:
                for command in commands:  # a dated measurement takes the place of one without
                    rows = database.execute(command, (self._problem(problem),))
                    entries |= {str(config): (seconds, at) for config, seconds, at in rows}
        except _DAMAGED:  # a damaged cache is an empty one
            return {}
        usable = {
            c: Measurement(s, _read_date(at))
            for c, (s, at) in entries.items()
            if isinstance(s, float) and 0 < s < math.inf
        }
        return {c: m for c, m in usable.items() if not (self._ignores_earlier and self._is_earlier(m))}

    def _is_earlier(self, measurement: Measurement) -> bool:
        return measurement.time is None or measurement.time < self._started

    def put(self, problem: Mapping[str, Any], config: str, seconds: float) -> None:
        """Keeps a measurement; of the same problem and configuration, the last one."""
        try:
            with closing(self._open()) as database, database:
                command = "INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?)"
                database.execute(command, (self._problem(problem), config, seconds, time.time()))
        except _DAMAGED:  # measured again next time
            return

    def note_decision(self, problems: Sequence[Mapping[str, Any]], configs: Collection[str]) -> None:
        """Notes which measurements have decided about one thing: those of earlier runs are reported.

        Args:
            problems: it at several sizes.
            configs: those that were compared.
        """
        for problem in problems:
            text, measured = self._problem(problem), self.measurements(problem)
            for config in configs:
                if config in measured and self._is_earlier(measured[config]):
                    self._earlier[text, config] = measured[config].time
                    self._decisions.add(self._problem(problems[0]))

    @property
    def earlier(self) -> EarlierMeasurements | None:
        """The measurements of earlier runs that have decided so far; None: there are none."""
        if not self._earlier:
            return None
        return EarlierMeasurements(str(self.path), len(self._decisions), tuple(self._earlier.values()))


def open_cache(options: Options, device: str, library: Mapping[str, Any], started: float | None = None) -> Cache:
    """The user's cache, without what was measured before this run where options ignore that.

    Args:
        options: of the run.
        device: what measurements are of.
        library: ``build_info()``.
        started: when the run began, in seconds since 1970; None: now.

    Raises:
        ArgumentError: when it cannot be used.
    """
    return Cache(cache_path(), device, str(library.get("build_id", "")), started, options.ignore_measurements)


def _has_table(database: sqlite3.Connection, definition: str) -> bool:
    """Whether a table is as this module defines it: a view, a trigger or other columns would be somebody else's."""
    name = definition.split(maxsplit=1)[0]
    command = "SELECT type, sql FROM sqlite_master WHERE tbl_name = ? AND sql IS NOT NULL"
    return database.execute(command, (name,)).fetchall() == [("table", f"CREATE TABLE {definition}")]


def _read_date(date: object) -> float | None:
    """A date of the file, which may hold anything; None where it is no date of the past."""
    return date if isinstance(date, float) and 0 < date <= time.time() else None
