# SPDX-License-Identifier: Apache-2.0
"""Gradients of stof.torch.attention and merge, by finite differences and against PyTorch's own autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch_oracle import attention_fp64, pairs

import stof.torch
import stof.torch.dense

MASK = "k < q and k != 3 and (h > 0 or q != 4)"


def leaves(*shapes: tuple[int, ...], dtype: Any = torch.float64) -> list[Any]:
    generator = torch.Generator().manual_seed(len(shapes))
    drawn = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return [t.to(dtype).requires_grad_() for t in drawn]


@pytest.mark.parametrize("empty_rows", ["zero", "mean", "all"])
def test_gradients_by_finite_differences(empty_rows: str) -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, MASK, empty_rows=empty_rows, softcap=1.5, scale=0.7)

    given = leaves((2, 2, 6, 3), (2, 1, 5, 3), (2, 1, 5, 2))
    assert torch.autograd.gradcheck(run, given, fast_mode=True)


def test_gradients_of_the_lse_by_finite_differences() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, "k <= q", softcap=2.0, return_lse=True)

    assert torch.autograd.gradcheck(run, leaves((1, 2, 4, 3), (1, 2, 5, 3), (1, 2, 5, 3)), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("empty_rows", ["zero", "mean", "all"])
@pytest.mark.parametrize("chunk_bytes", [1, 40_000, 1 << 28])
def test_gradients_are_those_of_the_formula(
    empty_rows: str, dtype: Any, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stof.torch.dense, "CHUNK_BYTES", chunk_bytes)
    q, k, v = leaves((2, 4, 13, 8), (2, 2, 11, 8), (2, 2, 11, 6), dtype=dtype)
    upper, upper_lse = (t.detach() for t in leaves((2, 4, 13, 6), (2, 4, 13)))
    output, lse = stof.torch.attention(q, k, v, MASK, empty_rows=empty_rows, softcap=1.1, return_lse=True)
    finite = lse.masked_fill(torch.isneginf(lse), 0).double()
    found = torch.autograd.grad((output.double() * upper).sum() + (finite * upper_lse).sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected, expected_lse = attention_fp64(*wide, pairs(MASK, 2, 4, 13, 11), softcap=1.1, empty_rows=empty_rows)
    finite = expected_lse.masked_fill(torch.isneginf(expected_lse), 0)
    wanted = torch.autograd.grad((expected * upper).sum() + (finite * upper_lse).sum(), wide)
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other, rtol=0, atol=tolerance)


def test_rows_of_nan_reach_the_gradient_of_values_alone() -> None:
    q, k, v = leaves((1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4), dtype=torch.float32)
    output = stof.torch.attention(q, k, v, "k < q", empty_rows="nan")
    grads = torch.autograd.grad(output.sum(), (q, k, v))
    assert not grads[0].isnan().any()
    assert grads[2].isnan().all()


def test_no_gradient_is_asked_for_where_none_is_needed() -> None:
    q, k, v = leaves((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), dtype=torch.float32)
    with torch.no_grad():
        assert not stof.torch.attention(q, k, v, "k <= q").requires_grad
    output = stof.torch.attention(q.detach(), k.detach(), v, "k <= q")
    (grad,) = torch.autograd.grad(output.sum(), v)
    assert torch.isfinite(grad).all()
