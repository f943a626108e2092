# SPDX-License-Identifier: Apache-2.0
"""stof.torch.attention in regions of torch.autocast has the types of PyTorch's own scaled_dot_product_attention.

The kind: query, key and value of mixed types, as rotary embeddings in fp32 and projections in bf16 give them, were an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import func
from torch.nn.functional import scaled_dot_product_attention
from torch_oracle import attention_fp64, pairs

import stof.torch
from stof.errors import ArgumentError

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")),
]
FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
MIXTURES = [(FP32,) * 3, (FP32, BF16, BF16), (BF16, FP16, FP32), (FP16,) * 3, (BF16,) * 3]
SHAPE = (2, 4, 16, 8)


def draw(types: tuple[Any, ...], device: str = "cpu", seed: int = 1) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SHAPE, generator=generator).to(device, t).requires_grad_() for t in types]


def torchs(q: Any, k: Any, v: Any) -> Any:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def ours(q: Any, k: Any, v: Any) -> Any:
    return stof.torch.attention(q, k, v, "k <= q")


def types_of(run: Callable[..., Any], given: list[Any]) -> tuple[Any, ...]:
    """The types of the output and of the gradients."""
    output = run(*given)
    return output.dtype, *(g.dtype for g in torch.autograd.grad(output.float().sum(), given))


def compare(found: Any, given: list[Any], region: Any) -> None:
    """Against fp64 of the inputs as the region rounds them."""
    rounded = [t.detach().cpu().to(region).double() for t in given]
    expected = attention_fp64(*rounded, pairs("k <= q", 1, 1, 16, 16))[0]
    torch.testing.assert_close(found.detach().cpu().double(), expected, rtol=0, atol=3e-2 if region == BF16 else 4e-3)


@pytest.mark.parametrize("types", MIXTURES)
@pytest.mark.parametrize("region", [BF16, FP16])
@pytest.mark.parametrize("device", DEVICES)
def test_types_are_those_of_pytorchs_attention(device: str, region: Any, types: tuple[Any, ...]) -> None:
    given = draw(types, device)
    with torch.autocast(device, dtype=region):
        found, expected = types_of(ours, given), types_of(torchs, given)
        compare(ours(*given), given, region)
    assert found == expected == (region, *types)


@pytest.mark.parametrize("device", DEVICES)
def test_nested_and_disabled_regions(device: str) -> None:
    given = [t.detach() for t in draw((FP32,) * 3, device)]  # PyTorch keeps casts of leaves, also for other types
    with torch.autocast(device, dtype=BF16):
        with torch.autocast(device, dtype=FP16):
            assert ours(*given).dtype == torchs(*given).dtype == FP16
        with torch.autocast(device, enabled=False):
            assert ours(*given).dtype == torchs(*given).dtype == FP32
            with pytest.raises(ArgumentError, match=r"k has type torch.bfloat16, expected that of q, torch.float32"):
                ours(given[0], given[1].bfloat16(), given[2])
        assert ours(*given).dtype == torchs(*given).dtype == BF16
        output, lse = stof.torch.attention(*given, return_lse=True)
        assert (output.dtype, lse.dtype) == (BF16, FP32)
    assert ours(*given).dtype == FP32


def test_fp64_stays() -> None:
    given = draw((FP64,) * 3)
    with torch.autocast("cpu", dtype=BF16):
        found, expected = types_of(ours, given), types_of(torchs, given)
        output = ours(*given)
        with pytest.raises(ArgumentError, match=r"k has type torch.bfloat16, expected that of q, torch.float64"):
            ours(given[0], given[1].float(), given[2])
    assert found == expected == (FP64,) * 4
    wide = attention_fp64(*given, pairs("k <= q", 1, 1, 16, 16))[0]
    torch.testing.assert_close(output, wide, rtol=0, atol=1e-12)  # the formula's matmuls are not rounded


@pytest.mark.parametrize("types", [(FP32,) * 3, (FP64,) * 3])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's forward mode loads torch.jit
def test_the_backward_pass_in_a_region_is_not_rounded(types: tuple[Any, ...]) -> None:
    """The formula's matmuls were: their gradients had the errors of bf16."""
    given = draw(types)
    output = ours(*given)
    upper = torch.randn(SHAPE, generator=torch.Generator().manual_seed(2), dtype=FP64)
    tangents = [t.detach() for t in draw(types, seed=3)]
    with torch.autocast("cpu", dtype=BF16):
        found = torch.autograd.grad(output, given, upper.to(types[0]))
        tangent = torch.ops.stof.attention_tangent(*given, *tangents, [], "k <= q", "", 8**-0.5, 0.0, "zero", False)[0]
    wide = [t.detach().double().requires_grad_() for t in given]

    def dense(*tensors: Any) -> Any:
        return attention_fp64(*tensors, pairs("k <= q", 1, 1, 16, 16))[0]

    wanted = torch.autograd.grad(dense(*wide), wide, upper)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=0, atol=1e-5)
    wanted_tangent = func.jvp(dense, tuple(wide), tuple(t.double() for t in tangents))[1]
    torch.testing.assert_close(tangent.double(), wanted_tangent, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's forward mode loads torch.jit
def test_transforms_in_a_region() -> None:
    given = [t.detach() for t in draw((FP32, BF16, FP32))]
    tangents = [t.detach() for t in draw((FP32, BF16, FP32), seed=2)]
    with torch.autocast("cpu", dtype=BF16):
        found, expected = (func.jvp(run, tuple(given), tuple(tangents)) for run in (ours, torchs_by_hand))
        assert [t.dtype for t in found] == [t.dtype for t in expected] == [BF16] * 2
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=6e-2)
        grads = [func.grad(lambda *t, run=run: run(*t).float().sum(), (0, 1, 2))(*given) for run in (ours, torchs)]
        for one, other in zip(*grads, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=6e-2)
        mapped = func.vmap(lambda q: ours(q, *given[1:]))(torch.stack([given[0], 2 * given[0]]))
        assert mapped.dtype == BF16
        compare(mapped[1], [2 * given[0], *given[1:]], BF16)


def torchs_by_hand(q: Any, k: Any, v: Any) -> Any:
    """Attention of operators that have forward mode, which PyTorch's own has not."""
    allowed = pairs("k <= q", 1, 1, 16, 16)
    return torch.softmax((q @ k.transpose(-1, -2) * 8**-0.5).masked_fill(~allowed, float("-inf")), -1) @ v


def test_compiled_in_a_region() -> None:
    given = draw((FP32, BF16, FP32))

    def run(q: Any, k: Any, v: Any) -> Any:
        with torch.autocast("cpu", dtype=BF16):
            inside = ours(q, k, v)
        return inside, ours(q, q, v)

    output, outside = torch.compile(run, fullgraph=True, backend="aot_eager")(*given)
    assert (output.dtype, outside.dtype) == (BF16, FP32)
    compare(output, given, BF16)
    assert [g.dtype for g in torch.autograd.grad(output.float().sum(), given)] == [FP32, BF16, FP32]
    with torch.autocast("cpu", dtype=BF16):
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")(*given)
    assert compiled.dtype == BF16
