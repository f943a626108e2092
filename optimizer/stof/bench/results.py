# SPDX-License-Identifier: Apache-2.0
"""Results as JSON: a file for each grid, a list with a record of each point on a line of its own.

A run appends its records and leaves the lines of others as they are; of a point, the last record counts. Files of versions
before, without ``run`` in a record and with a record on many lines, are read, too.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stof.files import folder_lock, remove_leftovers, strict_json, write_text

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The last record of each point, ordered by key; records without a key as they stand. None when the file does not exist.

    Raises:
        ValueError: when it holds something else.
    """
    records = read_runs(path)
    if not all(isinstance(record, dict) and "key" in record for record in records):
        return records
    return sorted({_text_of(record["key"]): record for record in records}.values(), key=_order)


def read_runs(path: Path) -> list[Record]:
    """The records of all runs, one run after the other; none when the file does not exist.

    Raises:
        ValueError: when it holds something else.
    """
    if not path.is_file():
        return []
    try:
        records = strict_json.loads(path.read_text(encoding="utf-8"), restore_numbers=True)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(records, list):
        raise ValueError(f"{path} holds no list of records")
    return records


def _order(record: Record) -> tuple[str, ...]:
    return tuple(f"{v:09d}" if isinstance(v, int) else str(v) for v in record["key"])


def _text_of(key: Any) -> str:
    return strict_json.dumps(key)


@functools.cache
def _name_run(process: int) -> str:
    """The name of a process's run: its time and the process."""
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC, {process}"


def store(path: Path, record: Record) -> None:
    """Appends a record of this run."""
    store_all(path, [record])


def store_all(path: Path, added: Sequence[Record]) -> None:
    """Appends records of this run, a process; those of the same points that it has stored before make room.

    Several processes may do so at once.

    Raises:
        ArgumentError: when the file cannot be written; it stays as it was.
    """
    run = _name_run(os.getpid())
    _append(path, [{**record, "run": run} for record in added])


def _append(path: Path, added: Sequence[Record]) -> None:
    def identify(records: Iterable[Record]) -> list[tuple[Any, str]]:
        return [(record.get("run"), _text_of(record["key"])) for record in records]

    replaced = set(identify(added))
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    with folder_lock(path.parent):  # nobody adds to the file between its reading and its writing
        before = read_runs(path)
        kept = [record for record, identity in zip(before, identify(before), strict=True) if identity not in replaced]
        write_text("results", path, [strict_json.dumps_by_line([*kept, *added], sort_keys=True)])


def merge(folder: Path, results: Path) -> list[str]:
    """Appends the runs of every file of a folder to the file of the same name in another; a line a file.

    Raises:
        ValueError: when the folder holds no file of records, or another kind of file.
    """
    lines = []
    for path in sorted(folder.glob("*.json")):
        added = read_runs(path)
        if not all(isinstance(r, dict) and "key" in r for r in added):
            raise ValueError(f"{path} holds records without keys: it was not written by a benchmark")
        before = len(read(results / path.name))
        _append(results / path.name, added)
        after = len(read(results / path.name))
        lines.append(f"{path.name}: {len(added)} records, {after - before} of them new, {after} in all")
    if not lines:
        raise ValueError(f"{folder} holds no results")
    return lines
