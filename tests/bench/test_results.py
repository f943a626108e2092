# SPDX-License-Identifier: Apache-2.0
"""Results of benchmarks: runs append lines, the last record of a point counts, and files of versions before are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stof.bench import results
from stof.bench.results import read, read_runs, store, store_all
from stof.files import strict_json

ROOT = Path(__file__).resolve().parents[2]


def in_another_run(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(results, "_name_run", lambda process: name)


def test_a_run_leaves_the_lines_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "grid.json"
    in_another_run(monkeypatch, "first")
    store_all(path, [{"key": ["b", 1], "us": 5.0}, {"key": ["a", 10], "us": 4.0}, {"key": ["a", 2], "us": 3.0}])
    before = path.read_text().splitlines()
    assert before[1] == '{"key":["b",1],"run":"first","us":5.0},'
    in_another_run(monkeypatch, "second")
    store(path, {"key": ["a", 10], "us": 1.0})
    store(path, {"key": ["a", 10], "us": 2.0})  # of the same run: in the place of the one before
    after = path.read_text().splitlines()
    assert [line.rstrip(",") for line in after[:4]] == [line.rstrip(",") for line in before[:4]]
    assert after[4:] == ['{"key":["a",10],"run":"second","us":2.0}', "]"]
    assert [(r["key"], r["us"]) for r in read(path)] == [(["a", 2], 3.0), (["a", 10], 2.0), (["b", 1], 5.0)]
    assert [r["us"] for r in read_runs(path)] == [5.0, 4.0, 3.0, 2.0]


def test_files_of_versions_before_are_read_and_appended_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "grid.json"
    old = [{"key": ["a", 1], "us": 5.0}, {"key": ["a", 2], "us": 6.0}]
    path.write_text(json.dumps(old, indent=1))
    assert read(path) == old
    in_another_run(monkeypatch, "now")
    store(path, {"key": ["a", 1], "us": 4.0})
    assert read(path) == [{"key": ["a", 1], "us": 4.0, "run": "now"}, old[1]]
    assert read_runs(path)[:2] == old
    path.write_text(json.dumps([{"us": 2}, {"us": 1}], indent=1))  # of another tool: no keys
    assert read(path) == [{"us": 2}, {"us": 1}]


def test_a_merge_appends_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, run in ((here, "first"), (there, "second")):
        in_another_run(monkeypatch, run)
        store(folder / "grid.json", {"key": [1], "us": 1.0})
    for _ in range(2):
        assert results.merge(there, here) == ["grid.json: 1 records, 0 of them new, 1 in all"]
        assert [r["run"] for r in read_runs(here / "grid.json")] == ["first", "second"]


@pytest.mark.parametrize("path", sorted((ROOT / "docs/results").rglob("*.json")), ids=lambda path: path.name)
def test_stored_results_have_a_point_a_line(path: Path) -> None:
    """So that a run changes as many lines as it measures points."""
    text = path.read_text()
    assert text == strict_json.dumps_by_line(json.loads(text)) + "\n"
