# SPDX-License-Identifier: Apache-2.0
"""stof.torch.attention on a CUDA device: results, gradients, streams, captured graphs. Needs a device and a library with CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_oracle import attention_fp64, pairs

import stof.torch
from stof.runtime.library import LibraryError, build_info, call, library

CAUSAL = "k <= q and q - k < 40"
S2 = "k <= q and (q // 16 - k // 16 < 2 or (k // 16 + h) % 3 == 2)"
BLOCKS = torch.randint(0, 2, (4, 7, 8), generator=torch.Generator().manual_seed(1)).bool()
TABLE = "table0[h, q // 16, k // 16]"
on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def draw(dtype: Any, S: int = 100, T: int = 117) -> list[Any]:
    generator = torch.Generator().manual_seed(S)
    shapes = ((2, 4, S, 64), (2, 2, T, 64), (2, 2, T, 64))
    return [torch.randn(s, generator=generator).to("cuda", dtype) for s in shapes]


def tolerance(dtype: Any) -> float:
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


@pytest.mark.skipif("cuda" in build_info()["backends"], reason="the library has CUDA kernels")
def test_a_library_without_cuda_says_so() -> None:
    assert hasattr(library(), "stof_op_run_cuda_allocating")
    with pytest.raises(LibraryError, match="CUDA"):
        call("stof_op_run_cuda_allocating", None, None, 0, None, 0, None, None, None)


@on_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", ["", CAUSAL, S2, TABLE])
def test_output_lse_and_gradients(text: str, dtype: Any) -> None:
    given = [t.requires_grad_() for t in draw(dtype)]
    tables = {"table0": BLOCKS} if text == TABLE else None
    output, lse = stof.torch.attention(*given, text, tables=tables, softcap=3.0, return_lse=True)
    wide = [t.detach().cpu().double().requires_grad_() for t in given]
    allowed = pairs(text, 1, 4, 100, 117, **({"table0": BLOCKS} if tables else {}))
    expected, expected_lse = attention_fp64(*wide, allowed, softcap=3.0)
    torch.testing.assert_close(output.cpu().double(), expected, rtol=0, atol=tolerance(dtype))
    torch.testing.assert_close(lse.cpu().double(), expected_lse, rtol=0, atol=tolerance(dtype))
    upper = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = torch.autograd.grad((output.double() * upper.cuda()).sum(), given)
    wanted = torch.autograd.grad((expected * upper).sum(), wide)
    for one, other in zip(found, wanted, strict=True):
        scale = max(1.0, float(other.abs().max()))
        torch.testing.assert_close(one.cpu().double(), other, rtol=0, atol=2 * scale * tolerance(dtype))


@on_device
def test_operands_of_the_run_and_layouts() -> None:
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in draw(torch.float16))
    lengths = torch.tensor([90, 117], dtype=torch.int32)
    pad = torch.rand(2, 117, generator=torch.Generator().manual_seed(3)) < 0.8
    text = "k <= q and k < lengths[b] and pad[b, k]"
    found = stof.torch.attention(q, k, v, text, lengths=lengths.cuda(), pad=pad.cuda())
    wide = [t.cpu().double() for t in (q, k, v)]
    expected, _ = attention_fp64(*wide, pairs(text, 2, 4, 100, 117, lengths=lengths, pad=pad))
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=4e-3)


@on_device
def test_work_is_queued_on_the_current_stream() -> None:
    q, k, v = draw(torch.float16, 2048, 2048)
    expected = stof.torch.attention(q, k, v, S2)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    outputs = []
    with torch.cuda.stream(side):
        for _ in range(8):
            fresh = q * 1  # written on the side stream just before
            outputs.append(stof.torch.attention(fresh, k, v, S2))
    side.synchronize()
    for output in outputs:
        torch.testing.assert_close(output, expected)


@on_device
def test_captured_graph_replays_with_new_content() -> None:
    q, k, v = draw(torch.float16)
    stof.torch.attention(q, k, v, S2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = stof.torch.attention(q, k, v, S2)
    for i in range(200):  # other operators, so that a bounded cache would drop the captured one
        stof.torch.attention(q[:, :, :8], k, v, f"k <= q + {i}")
    q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(9)).half())
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(output, stof.torch.attention(q, k, v, S2))


@on_device
def test_head_sizes_that_the_kernels_have_not_are_an_error() -> None:
    q = torch.zeros(1, 2, 4, 12, device="cuda", dtype=torch.float16)
    with pytest.raises(LibraryError, match="head"):
        stof.torch.attention(q, q, q, "k <= q")
