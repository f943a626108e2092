# SPDX-License-Identifier: Apache-2.0
"""FlashInfer as a peer: its view of a cache in pages, and what it is not timed for. A stand-in attends the pages."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.core.candidate import Unavailable
from bench.gpu import cases
from bench.gpu.baselines.flashinfer_decode import PAGE, flashinfer_decode
from bench.gpu.candidates import find
from bench.gpu.problem import GpuProblem

torch = pytest.importorskip("torch")


class Wrapper:
    """Attention over pages, in the interface of FlashInfer's wrapper."""

    def __init__(self, workspace: Any, layout: str, use_tensor_cores: bool) -> None:
        assert layout == "HND"
        self.use_tensor_cores = use_tensor_cores

    def plan(self, first: Any, pages: Any, last: Any, *sizes: int, **options: Any) -> None:
        self.first, self.pages, self.last = first.tolist(), pages.long(), last.tolist()
        self.sizes, self.options = sizes, options

    def run(self, query: Any, cache: tuple[Any, Any], out: Any) -> None:
        H, G, _, page = self.sizes
        for b in range(len(self.first) - 1):
            chosen = self.pages[self.first[b] : self.first[b + 1]]
            # [G, T, D] out of pages [n, G, page, D]
            keys, values = (x[chosen].transpose(0, 1).reshape(G, -1, x.shape[-1]).double() for x in cache)
            assert self.last[b] == page
            left = self.options["window_left"]
            first = 0 if left < 0 else max(0, keys.shape[1] - 1 - left)
            for h in range(H):
                scores = keys[h // (H // G), first:] @ query[b, h].double() * self.options["sm_scale"]
                out[b, h] = (scores.softmax(0) @ values[h // (H // G), first:]).to(out.dtype)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=Wrapper))


def case_of(mask: str, T: int = 16 * PAGE) -> Any:
    case = next(cases.grid("cached", [mask], [4096], [8]))
    return dataclasses.replace(case, B=3, H=4, G=2, T=T, D=16)


@pytest.mark.parametrize("mask", ["dense", "causal-1024"])
@pytest.mark.parametrize("tensor_cores", [False, True])
def test_pages_are_the_cache_in_place(stand_in: None, mask: str, tensor_cores: bool) -> None:
    problem = GpuProblem(case_of(mask, 1024 + 5 * PAGE), device="cpu")
    runner = flashinfer_decode(problem, None, tensor_cores)
    runner.bind()
    assert torch.isnan(runner.output()).all()
    runner.call(0)
    q, k, v = problem.sets()[0]
    k, v = (x.double().repeat_interleave(2, 1) for x in (k, v))
    first = 0 if mask == "dense" else problem.case.T - 1024
    scores = q.double() @ k[:, :, first:].transpose(2, 3) * problem.scale
    expected = scores.softmax(-1) @ v[:, :, first:]
    np.testing.assert_allclose(runner.output().double(), expected, atol=2e-3)
    assert runner.keep[0].use_tensor_cores == tensor_cores


def test_what_it_is_not_timed_for(stand_in: None) -> None:
    with pytest.raises(Unavailable, match="whole pages of 16 rows"):
        flashinfer_decode(GpuProblem(case_of("dense", 100), device="cpu"), None)
    pattern = dataclasses.replace(case_of("dense"), mask="k <= q and k % 3 == 0")
    with pytest.raises(Unavailable, match="causal window"):
        flashinfer_decode(GpuProblem(pattern, device="cpu"), None)
    prompt = dataclasses.replace(case_of("dense"), S=2)
    with pytest.raises(Unavailable, match="one query"):
        flashinfer_decode(GpuProblem(prompt, device="cpu"), None)


def test_it_is_absent_where_it_does_not_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(Unavailable, match="flashinfer is not installed"):
        flashinfer_decode(GpuProblem(case_of("dense"), device="cpu"), None)


def test_grid_of_caches_has_it() -> None:
    names = {c.name for c in find(None, "cached")}
    assert {"flashinfer", "flashinfer-tensor-cores"} <= names
    assert not {"flashinfer", "flashinfer-tensor-cores"} & {c.name for c in find(None, "decode")}
