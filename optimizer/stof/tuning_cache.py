# SPDX-License-Identifier: Apache-2.0
"""What was measured before: a database that any number of processes may use at once.

Keys hold the problem, the configuration, the device and the build of the library: a new library measures again.
"""

from __future__ import annotations

import math
import os
import platform
import sqlite3
import stat
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from stof import strict_json
from stof.errors import ArgumentError

VERSION = 1
_WAIT = 30.0  # seconds for another process to finish writing
_DAMAGED = (sqlite3.Error, UnicodeDecodeError)  # text of a damaged file reaches messages, and may be no text
_TABLE = """CREATE TABLE IF NOT EXISTS measured
    (problem TEXT, config TEXT, seconds REAL NOT NULL, PRIMARY KEY (problem, config)) WITHOUT ROWID"""


def cache_path() -> Path:
    """``STOF_CACHE``, or ``stof/tuning.sqlite`` in the user's folder for caches.

    Raises:
        ArgumentError: for a user without a home.
    """
    given = os.environ.get("STOF_CACHE")
    if given:
        return Path(given)
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
    name = platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{name}, {cores} cores, {library.get('cpu_isa', '')}"


class Cache:
    """Seconds by problem and configuration.

    Raises:
        ArgumentError: when the file cannot be used; it says which and why.
    """

    def __init__(self, path: Path, device: str, build: str) -> None:
        self.path = path
        self.common = {"device": device, "build": build, "version": VERSION}
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._private(path.parent)
            with closing(self._open()) as database, database:
                database.execute(_TABLE)
        except (OSError, *_DAMAGED) as error:
            raise ArgumentError(
                f"the tuning cache {path} cannot be used: {error}; STOF_CACHE names another file"
            ) from error

    def _private(self, folder: Path) -> None:
        if not hasattr(os, "getuid"):
            return
        found = folder.stat()
        if found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
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
        try:
            with closing(self._open()) as database:
                command = "SELECT config, seconds FROM measured WHERE problem = ?"
                rows = database.execute(command, (self._problem(problem),)).fetchall()
        except _DAMAGED:  # a damaged cache is an empty one
            return {}
        return {str(c): float(s) for c, s in rows if isinstance(s, float) and math.isfinite(s) and s > 0}

    def put(self, problem: Mapping[str, Any], config: str, seconds: float) -> None:
        """Keeps a measurement; of the same problem and configuration, the last one."""
        try:
            with closing(self._open()) as database, database:
                command = "INSERT OR REPLACE INTO measured VALUES (?, ?, ?)"
                database.execute(command, (self._problem(problem), config, seconds))
        except _DAMAGED:  # measured again next time
            return
