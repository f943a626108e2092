# SPDX-License-Identifier: Apache-2.0
"""What was measured once, kept for the next time: an SQLite file that several processes may use at once."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

_SCHEMA = "CREATE TABLE IF NOT EXISTS measured (key TEXT PRIMARY KEY, microseconds REAL NOT NULL) WITHOUT ROWID"
_WAIT = 10.0  # seconds for another process's write
_FILE = "tuning-1.sqlite3"  # the number changes with the schema or the meaning of keys


def cache_path() -> Path:
    """The file; its folder is ``STOF_CACHE_DIR``, or ``stof`` in the user's cache folder (XDG)."""
    folder = os.environ.get("STOF_CACHE_DIR")
    if folder:
        return Path(folder) / _FILE
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stof" / _FILE


class TuningCache:
    """Times by (problem, configuration, device, library build). A cache that cannot be used is empty and keeps nothing."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or cache_path()
        self.problem = ""  # why the file is of no use; empty: it is
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with closing(self._connect()) as connection, connection:
                connection.execute(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            self.problem = f"{self.path}: {error}"

    @staticmethod
    def key(**parts: object) -> str:
        """The text for a measurement; the order of its parts does not matter."""
        return json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    def get(self, key: str) -> float | None:
        """Microseconds, None where nothing was measured."""
        if self.problem:
            return None
        try:
            with closing(self._connect()) as connection:
                row = connection.execute("SELECT microseconds FROM measured WHERE key = ?", (key,)).fetchone()
        except sqlite3.Error as error:
            self.problem = f"{self.path}: {error}"
            return None
        return float(row[0]) if row else None

    def put(self, found: Mapping[str, float]) -> None:
        """Keeps measurements, all or none of them."""
        if self.problem or not found:
            return
        try:
            with closing(self._connect()) as connection, connection:
                connection.executemany("INSERT OR REPLACE INTO measured VALUES (?, ?)", found.items())
        except sqlite3.Error as error:
            self.problem = f"{self.path}: {error}"

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(self.path, timeout=_WAIT)
