# SPDX-License-Identifier: Apache-2.0
"""Results as JSON: a file for each grid, a record for each point; a new record of a point replaces the old one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stof.files import folder_lock, remove_leftovers, strict_json, write_text

Record = dict[str, Any]


def read(path: Path) -> list[Record]:
    """The records of a file; none when it does not exist.

    Raises:
        ValueError: when it holds something else.
    """
    if not path.is_file():
        return []
    try:
        found = strict_json.loads(path.read_text(), restore_numbers=True)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, list):
        raise ValueError(f"{path} holds no list of records")
    return found


def _order(record: Record) -> tuple[str, ...]:
    return tuple(f"{v:09d}" if isinstance(v, int) else str(v) for v in record["key"])


def store(path: Path, record: Record) -> None:
    """Adds a record, or replaces the one with the same key."""
    store_all(path, [record])


def store_all(path: Path, added: Sequence[Record]) -> None:
    """Adds records, each in the place of the one with the same key. Several processes may do so at once.

    Raises:
        ArgumentError: when the file cannot be written; it stays as it was.
    """
    keys = [r["key"] for r in added]
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    with folder_lock(path.parent):  # nobody adds to the file between its reading and its writing
        records = [*[r for r in read(path) if r["key"] not in keys], *added]
        write_text("results", path, [strict_json.dumps(sorted(records, key=_order), indent=1, sort_keys=True)])


def merge(found: Path, results: Path) -> list[str]:
    """Adds the records of every file of a folder to the file of the same name in another; a line a file.

    Raises:
        ValueError: when the folder holds no file of records, or another kind of file.
    """
    lines = []
    for path in sorted(found.glob("*.json")):
        added = read(path)
        if not all(isinstance(r, dict) and "key" in r for r in added):
            raise ValueError(f"{path} holds records without keys: it was not written by stof-bench")
        before = len(read(results / path.name))
        store_all(results / path.name, added)
        after = len(read(results / path.name))
        lines.append(f"{path.name}: {len(added)} records, {after - before} of them new, {after} in all")
    if not lines:
        raise ValueError(f"{found} holds no results")
    return lines
