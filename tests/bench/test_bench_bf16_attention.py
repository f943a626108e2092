# SPDX-License-Identifier: Apache-2.0
"""The CPU's grid of bf16 attention: points, errors as root mean squares, and the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.cli import main
from bench.core.point import measure_point
from bench.cpu import bf16_attention
from bench.cpu.bf16_attention import CANDIDATES, Bf16Problem
from bench.cpu.device import CpuDevice
from stof.arguments.precisions import BF16
from stof.bench.results import read


def test_the_grid() -> None:
    cases = list(bf16_attention.grid(None, None, None))
    assert len({(c.name, c.S, c.D) for c in cases}) == len(cases) == 3 * 2 * 2
    (case,) = bf16_attention.grid(["window-128"], [96], [32])
    assert (case.mask, case.S, case.D, case.H) == ("abs(q - k) <= 128", 96, 32, 12)


@pytest.mark.parametrize("mask", bf16_attention.MASKS)
def test_errors_are_root_mean_squares(mask: str) -> None:
    """Of operands that are rounded to bf16, some thousandths; of another scale, a wrong result."""
    (case,) = bf16_attention.grid([mask], [160], [64])
    problem = Bf16Problem(case)

    def attend(scale: float, rounded: bool) -> np.ndarray:
        given = (problem.q, problem.k, problem.v)
        q, k, v = (x.astype(np.float64) for x in (map(BF16.round, given) if rounded else given))
        scores = q @ k.swapaxes(2, 3) * scale
        scores = scores if problem.allowed is None else np.where(problem.allowed, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return np.asarray(weights @ v / weights.sum(-1, keepdims=True))

    assert problem.error(attend(problem.scale, rounded=False)) < 1e-12
    assert 5e-4 < problem.error(attend(problem.scale, rounded=True)) < 1e-2
    assert problem.error(attend(2 * problem.scale, rounded=False)) > problem.tolerance
    with pytest.raises(ValueError, match="expected"):
        problem.error(np.zeros((1, 2)))


def test_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = "bf16-attention --masks causal --lengths 128 --sizes 32 --threads 1 --rounds 1"
    assert main([*words.split(), "--results", str(tmp_path)]) == 0
    (record,) = read(tmp_path / "bf16-attention-cpu.json")
    assert record["grid"] == "bf16-attention"
    assert {c.name for c in CANDIDATES} == set(record["peers"])
    for name in ("stof-bf16", "stof"):
        assert record["peers"][name]["us"] > 0
        assert record["peers"][name]["error"] < 1e-2
    assert record["peers"]["stof"]["error"] < 1e-5
    text = capfd.readouterr().out
    assert "causal B1 H12 S128 D32, 1 thread(s), " in text
    assert "relative RMS error" in text


def test_a_wrong_result_is_not_timed() -> None:
    """As of a kernel that lets each query attend every key."""
    (case,) = bf16_attention.grid(["window-128"], [512], [32])
    problem = Bf16Problem(case)
    other = next(bf16_attention.grid(["dense"], [512], [32]))
    wrong = [c for c in CANDIDATES if c.name == "stof-bf16"]
    problem.case = other
    record = measure_point(problem, wrong, CpuDevice(1), rounds=1)
    assert "us" in record["peers"]["stof-bf16"]
    problem = Bf16Problem(case)
    _ = problem._reference
    problem.case = other
    record = measure_point(problem, wrong, CpuDevice(1), rounds=1)
    assert "wrong result" in record["peers"]["stof-bf16"]["missing"]
    assert "missing: wrong result" in bf16_attention.describe_record(record)[1]
