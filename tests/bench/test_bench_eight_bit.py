# SPDX-License-Identifier: Apache-2.0
"""The grid of attention in 8 bits."""

from __future__ import annotations

import dataclasses

import pytest

from bench.core.candidate import Unavailable
from bench.gpu.cases import grid

torch = pytest.importorskip("torch")

from bench.gpu.baselines.torch_sdpa import need_plain  # noqa: E402
from bench.gpu.problem import GpuProblem  # noqa: E402


def test_errors_of_8_bits_are_root_mean_squares() -> None:
    case = next(iter(grid("8-bit", masks=["causal"], lengths=[8192])))
    problem = GpuProblem(dataclasses.replace(case, H=2, G=2, S=40, T=40), device="cpu")
    q, k, v = (x.double() for x in problem.sets()[0])
    scores = (q @ k.transpose(2, 3) * problem.scale).masked_fill(~torch.ones(40, 40).tril().bool(), -torch.inf)
    expected = torch.softmax(scores, -1) @ v
    noise = torch.where(torch.arange(case.D) % 2 == 0, 0.01, -0.01) * expected.square().mean().sqrt()
    assert problem.error(expected) < 1e-6
    assert problem.error(expected + noise) == pytest.approx(0.01, rel=0.2)
    assert problem.tolerance == problem.tolerance_of("sage") == 0.1
    assert problem.tolerance_of("stof-int8") == 0.015
    assert problem.tolerance_of("stof-int8-fp8") == 0.045


@pytest.mark.parametrize(("mask", "causal"), [("dense", False), ("causal", True)])
def test_peers_in_8_bits_take_no_other_mask(mask: str, causal: bool) -> None:
    assert need_plain(GpuProblem(next(iter(grid("8-bit", masks=[mask]))), device="cpu")) is causal


def test_peers_in_8_bits_refuse_windows() -> None:
    with pytest.raises(Unavailable, match="no mask but the causal one"):
        need_plain(GpuProblem(next(iter(grid("8-bit", masks=["causal-4096"]))), device="cpu"))
