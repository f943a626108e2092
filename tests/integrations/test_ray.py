# SPDX-License-Identifier: Apache-2.0
"""Ray Data: two processes give the vectors of one, also where one of them is killed; their threads and memory are bounded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray_texts
from guide_pages import read_blocks
from tool_folders import ROOT, damage, run_program

_TEXTS = 10_000
_TOLERANCE = 1e-6  # of the largest value; batches of other processes may hold other texts


@pytest.fixture(scope="module")
def expected(folders: Path) -> np.ndarray:
    """The vectors of all texts by this process alone."""
    return ray_texts.embed_alone(str(folders / "fast-features"), ray_texts.draw_texts(_TEXTS))


def run_job(folder: Path, target: Path, threads: int = 1, marker: str = "", texts: int = _TEXTS) -> dict[str, Any]:
    program, vectors = ROOT / "tests/integrations/ray_job.py", target / "vectors.npy"
    path = (ROOT / "examples",)
    printed = run_program("python", program, folder, texts, threads, marker, vectors, more_path=path)
    return {**json.loads(printed.splitlines()[-1]), "vectors": np.load(vectors)}


def worst_difference(found: np.ndarray, wanted: np.ndarray) -> float:
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def test_two_processes_give_the_vectors_of_one(folders: Path, expected: np.ndarray, tmp_path: Path) -> None:
    assert np.linalg.matrix_rank(expected[:100]) > 8, "the vectors are all alike, which says nothing"
    found = run_job(folders / "fast-features", tmp_path)
    assert found["ids_in_order"]
    assert len(found["processes"]) == 2
    assert worst_difference(found["vectors"], expected) <= _TOLERANCE
    assert found["session_threads"] == [0]
    assert found["omp_threads"] == [1]
    assert found["most_resident"] < 700 << 20
    assert found["most_resident"] - found["least_resident"] < 100 << 20


def test_a_killed_process_is_started_again(folders: Path, expected: np.ndarray, tmp_path: Path) -> None:
    marker = tmp_path / "killed"
    found = run_job(folders / "fast-features", tmp_path, marker=str(marker))
    assert marker.read_text().isdigit(), "no process was killed"
    assert len(found["processes"]) >= 2
    assert found["ids_in_order"]
    assert worst_difference(found["vectors"], expected) <= _TOLERANCE


def test_threads_are_those_of_the_session(folders: Path, expected: np.ndarray, tmp_path: Path) -> None:
    """The count sees threads where there are some; vectors are the same."""
    found = run_job(folders / "fast-features", tmp_path, threads=2, texts=500)
    assert found["session_threads"] == [1]  # beside the caller's own
    assert found["omp_threads"] == [2]
    assert worst_difference(found["vectors"], expected[:500]) <= _TOLERANCE


def test_processes_run_the_operators(folders: Path, expected: np.ndarray, tmp_path: Path) -> None:
    damaged = damage(folders / "fast-features", tmp_path / "damaged")
    found = run_job(damaged, tmp_path, texts=500)
    assert worst_difference(found["vectors"], expected[:500]) > 1e-2


def test_page_has_the_class_of_the_example(folders: Path) -> None:
    """The page's class gives what the example's does. The job itself is the example's, which the test below runs."""
    (block,) = (block for block in read_blocks(ROOT / "docs/guide/ray.md") if block.language == "python")
    text, job = block.text.split("vectors = ray.data")
    assert "map_batches" in job
    names: dict[str, Any] = {}
    exec(compile(text, block.place, "exec"), names)
    texts = np.array(ray_texts.draw_texts(50), object)
    folder = str(folders / "fast-features")
    found = names["Embedder"](folder)({"id": np.arange(50), "text": texts})
    assert np.array_equal(
        found["vector"], ray_texts.Embedder(folder, 1)({"id": np.arange(50), "text": texts})["vector"]
    )


def test_example(folders: Path) -> None:
    printed = run_program("python", ROOT / "examples/ray_texts.py", folders / "fast-features", "--texts", 1000)
    assert "1000 vectors of 64 elements" in printed
