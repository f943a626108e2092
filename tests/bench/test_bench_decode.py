# SPDX-License-Identifier: Apache-2.0
"""The CPU's decode grid: what its points count, and a record of a small one."""

from __future__ import annotations

import pytest

from bench.core.case import AttentionCase
from bench.core.point import measure_point
from bench.cpu import decode
from bench.cpu.decode import DecodeProblem, step
from bench.cpu.device import CpuDevice


@pytest.mark.parametrize(
    ("case", "window"),
    [
        (step(2, 40, 8, 4, S=3), 0),
        (step(1, 40, 8, 32, 7, S=5), 7),
        (step(1, 40, 8, 32, 7, cache="int8"), 7),
    ],
)
def test_problems_count_pairs_and_bytes(case: AttentionCase, window: int) -> None:
    """Against every pair and key, one by one."""
    problem = DecodeProblem(case)
    assert case.window == window
    pairs = [
        (q, k) for q in range(case.T - case.S, case.T) for k in range(case.T) if k <= q and (not window or q - k < window)
    ]  # fmt: skip
    assert problem.pairs == case.B * 32 * len(pairs)
    item = 1 if case.cache == "int8" else 4
    assert problem.bytes == 2 * item * case.B * case.G * case.D * len({k for _, k in pairs})


def test_caches_of_all_layers_exceed_an_l3_cache() -> None:
    """No point of the grid keeps its caches in L3, or takes more than 2 GiB."""
    problems = [DecodeProblem(case) for case in decode.steps()]
    assert len({tuple(p.describe(1)["key"]) for p in problems}) == len(problems) == 63
    for problem in problems:
        assert 128 << 20 <= problem.layers * problem.cache_bytes <= 2 << 30, problem.case


@pytest.mark.parametrize("cache", ["", "int8"])
def test_a_step_is_checked_and_timed(cache: str) -> None:
    """Both candidates agree with fp64; the record has their times."""
    problem = DecodeProblem(step(1, 64, 16, 1, 16, cache=cache))
    record = measure_point(problem, decode.CANDIDATES, CpuDevice(1), rounds=1)
    assert set(record["peers"]) == {"stof", "ort-gqa"}
    assert all(peer["us"] > 0 and peer["gbps"] > 0 for peer in record["peers"].values())
    assert record["mask"] == "k <= q and q - k < 16"
    assert record["shape"]["T"] == 64
    (text,) = decode.describe_record(record)
    assert text.startswith(f"B1 H32 G1 S1 T64 D16 window 16{' int8' if cache else ''} ")
    assert "GroupQueryAttention" in text
    assert record["key"][7:] == ([cache] if cache else [])


def test_a_wrong_candidate_is_listed_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = DecodeProblem(step(1, 64, 16, 1))
    monkeypatch.setattr(DecodeProblem, "tolerance", -1.0)
    record = measure_point(problem, decode.CANDIDATES, CpuDevice(1), rounds=1)
    assert all("wrong result" in row["missing"] and "us" not in row for row in record["peers"].values())
    assert "missing: wrong result" in decode.describe_record(record)[0]
