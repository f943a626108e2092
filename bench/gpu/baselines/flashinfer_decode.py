# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's decode over a KV cache, where it is installed; its kernels are compiled at the first use."""

from __future__ import annotations

import functools
from typing import Any

from bench.core.candidate import Unavailable, require
from bench.gpu.device_runner import DeviceRunner, window
from bench.gpu.problem import GpuProblem

PAGE = 16  # rows, the least that its users take: sequences are split into whole pages
_WORKSPACE = 256 << 20  # bytes for partial results


@functools.cache
def _workspace(device: str) -> Any:
    torch: Any = require("torch")
    return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


def flashinfer_decode(problem: GpuProblem, stream: Any, tensor_cores: bool = False) -> DeviceRunner:
    """One query over the cache [B, G, T, D] in place, as pages of 16 rows; the plan is made ahead.

    It attends only: the cache holds the new key already, and appending it is not timed.

    Raises:
        Unavailable: when FlashInfer is not installed, or the mask is no causal window.
    """
    flashinfer: Any = require("flashinfer")
    case, torch = problem.case, problem.torch
    sides = window(case)
    if case.S != 1 or sides is None or sides[1] > 0:
        raise Unavailable("expresses one query, dense or in a causal window")
    if case.T % PAGE:
        raise Unavailable(f"timed with whole pages of {PAGE} rows")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        _workspace(problem.device), "HND", use_tensor_cores=tensor_cores
    )
    first, pages = page_table(problem)
    last = torch.full((case.B,), PAGE, dtype=torch.int32, device=problem.device)
    wrapper.plan(
        first, pages, last, case.H, case.G, case.D, PAGE, window_left=sides[0], q_data_type=problem.dtype,
        kv_data_type=problem.dtype, sm_scale=problem.scale,
    )  # fmt: skip
    calls: list[tuple[Any, Any, Any]] = []

    def bind() -> None:
        calls.clear()
        for q, k, v in problem.sets():
            query = q[:, :, 0]
            calls.append((query, (as_pages(k), as_pages(v)), torch.full_like(query, float("nan"))))

    def run(i: int) -> None:
        query, cache, output = calls[i]
        wrapper.run(query, cache, out=output)

    return DeviceRunner(run, lambda: calls[0][2][:, :, None], bind, calls.clear, keep=(wrapper, first, pages, last))


def as_pages(cache: Any) -> Any:
    """A cache [B, G, T, D] as overlapping pages [(B - 1) · G · T / 16 + T / 16, G, 16, D] of the same memory.

    Page b · G · T / 16 + p has rows 16p … 16p + 15 of sequence b; the others are not in a page table.
    """
    B, G, T, D = cache.shape
    count = (B - 1) * G * (T // PAGE) + T // PAGE
    return cache.as_strided((count, G, PAGE, D), (PAGE * D, T * D, D, 1))


def page_table(problem: GpuProblem) -> tuple[Any, Any]:
    """The first entry of every sequence [B + 1], and the pages of all sequences, as :func:`as_pages` numbers them."""
    case, torch = problem.case, problem.torch
    count = case.T // PAGE
    first = torch.arange(case.B + 1, dtype=torch.int32, device=problem.device) * count
    sequences = torch.arange(case.B, dtype=torch.int32, device=problem.device) * (case.G * count)
    pages = sequences[:, None] + torch.arange(count, dtype=torch.int32, device=problem.device)
    return first, pages.reshape(-1).contiguous()
