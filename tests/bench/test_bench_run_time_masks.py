# SPDX-License-Identifier: Apache-2.0
"""The CPU's grid of run-time masks: what its points draw, records of small ones, and masks that lose what decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.cli import main
from bench.core.case import AttentionCase
from bench.core.point import measure_point
from bench.cpu import decode, run_time_masks
from bench.cpu.device import CpuDevice
from bench.cpu.run_time_masks import (
    CANDIDATES,
    CHOOSE_BLOCKS,
    CHOOSE_PAGES,
    SKIP_SCORES,
    MaskPoint,
    PromptWithFewKeys,
    StepWithFewPages,
)
from stof.bench.results import read


def prompt(kind: str, share: float, gap: float = 24.0, length: int = 1024) -> PromptWithFewKeys:
    case = AttentionCase("run-time-masks", "causal", "k <= q", 1, 2, 2, length, length, 64, "float32")
    return PromptWithFewKeys(case, MaskPoint(kind, length, share), gap)


def step(share: float, rows: int, gap: float = 24.0, keys: int = 1024) -> StepWithFewPages:
    return StepWithFewPages(decode.step(1, keys, 32, 2), MaskPoint(CHOOSE_PAGES, keys, share, rows), gap)


@pytest.mark.parametrize("kind", [SKIP_SCORES, CHOOSE_BLOCKS])
def test_a_share_of_the_blocks_decides(kind: str) -> None:
    problem = prompt(kind, 0.25)
    scores = problem.q[0].astype(np.float64) @ problem.k[0].astype(np.float64).transpose(0, 2, 1) * problem.scale
    means = scores.reshape(2, 1024, 8, 128).mean((0, 1, 3))
    assert (means > 20).sum() == 2
    assert means[0] > 20
    np.testing.assert_allclose(means[means < 20], 0, atol=1)


@pytest.mark.parametrize("kind", [SKIP_SCORES, CHOOSE_BLOCKS])
def test_a_prompt_is_checked_counted_and_timed(kind: str) -> None:
    record = measure_point(prompt(kind, 0.25), CANDIDATES, CpuDevice(1), rounds=1)
    own, dense = record["peers"]["stof"], record["peers"]["stof-dense"]
    assert own["us"] > 0
    assert dense["us"] > 0
    assert dense["skipped"] == 0
    assert 0.3 < own["skipped"] < 0.8
    assert record["key"] == [kind, "B1 H2 S1024 D64", 0.25, 1]
    (text,) = run_time_masks.describe_record(record)
    assert text.startswith(f"{kind} B1 H2 S1024 D64, 25% ")
    assert f"{own['skipped']:.0%} of the pairs skipped; every key" in text


@pytest.mark.parametrize("rows", [16, 64])
def test_a_step_is_checked_counted_and_timed(rows: int) -> None:
    problem = step(0.25, rows)
    record = measure_point(problem, CANDIDATES, CpuDevice(1), rounds=1)
    own, dense = record["peers"]["stof"], record["peers"]["stof-dense"]
    assert own["us"] > 0
    assert dense["us"] > 0
    assert dense["skipped"] == 0
    pages = 1024 // rows
    assert problem.chosen == pages // 4
    assert 1 - (problem.chosen + 4) / pages <= own["skipped"] <= 1 - problem.chosen / pages
    assert record["key"] == [CHOOSE_PAGES, "B1 H32 G2 S1 T1024 D32", 0.25, rows, 1]
    assert record["chosen_pages"] == problem.chosen
    (text,) = run_time_masks.describe_record(record)
    assert f"25% of {rows} rows" in text


@pytest.mark.parametrize("kind", [CHOOSE_BLOCKS, CHOOSE_PAGES])
def test_a_mask_that_loses_what_decides_is_not_timed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the gap, keys that are left out count as much as others."""
    monkeypatch.setitem(run_time_masks._THRESHOLDS, CHOOSE_BLOCKS, {"block_threshold": 1.0})
    problem = step(0.05, 16, gap=0.0) if kind == CHOOSE_PAGES else prompt(kind, 0.25, gap=0.0)
    record = measure_point(problem, CANDIDATES, CpuDevice(1), rounds=1)
    assert "wrong result" in record["peers"]["stof"]["missing"]
    assert record["peers"]["stof-dense"]["us"] > 0
    assert "missing: wrong result" in run_time_masks.describe_record(record)[0]


def test_the_grid() -> None:
    points = list(run_time_masks.grid(None, None, None, None))
    assert len(points) == len(set(points)) == 2 * 2 * 3 + 2 * 2 * 2
    assert {p.rows for p in points if p.kind == CHOOSE_PAGES} == {16, 64}
    some = list(run_time_masks.grid([CHOOSE_PAGES], [4096], [0.1], [32]))
    assert some == [MaskPoint(CHOOSE_PAGES, 4096, 0.1, 32)]
    problem = some[0].problem()
    assert isinstance(problem, StepWithFewPages)
    assert (problem.case.T, problem.chosen) == (4096, 13)


def test_the_command(tmp_path: Path) -> None:
    words = "run-time-masks --kinds skip-scores choose-blocks --lengths 512 --shares 0.25 --threads 1 --rounds 1"
    assert main([*words.split(), "--results", str(tmp_path)]) == 0
    records = read(tmp_path / "run-time-masks-cpu.json")
    assert {r["kind"] for r in records} == {SKIP_SCORES, CHOOSE_BLOCKS}
    assert {r["grid"] for r in records} == {"run-time-masks"}
    assert all(row["us"] > 0 for r in records for row in r["peers"].values())
