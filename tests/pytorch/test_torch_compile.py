# SPDX-License-Identifier: Apache-2.0
"""stof.torch.attention under torch.compile, torch.export and the checks of torch.library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch_oracle import attention_fp64, pairs

import stof.torch
from stof.errors import ArgumentError

MASK = "k <= q and (q - k < 4 or (k // 4 + h) % 3 == 2)"


def draw(S: int = 9, B: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(S)
    return [torch.randn(s, generator=generator) for s in ((B, 4, S, 8), (B, 2, S, 8), (B, 2, S, 8))]


class Model(torch.nn.Module):
    """Attention with a table that is a buffer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "blocks", torch.randint(0, 2, (4, 8, 8), generator=torch.Generator().manual_seed(1)).bool()
        )

    def forward(self, q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, f"{MASK} or table0[h, q // 4, k // 4]", tables={"table0": self.blocks})


def test_compiled_whole_with_dynamic_lengths_and_gradients() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, MASK, softcap=2.0, return_lse=True)

    # Without code generation, which a C++ compiler would do for minutes: the graph and its gradients are what is tested.
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for S in (9, 14):
        given = [t.requires_grad_() for t in draw(S)]
        output, lse = compiled(*given)
        expected, expected_lse = attention_fp64(*given, pairs(MASK, 2, 4, S, S), softcap=2.0)
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=1e-5)
        found = torch.autograd.grad(output.square().sum() + lse.sum(), given)
        wanted = torch.autograd.grad(expected.square().sum() + expected_lse.sum(), given)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


def test_a_block_mask_is_translated_outside_of_a_compiled_function() -> None:
    def run(q: Any, k: Any, v: Any) -> Any:
        return stof.torch.attention(q, k, v, block_mask)

    block_mask = create_block_mask(lambda b, h, q, k: (k <= q) & (q - k < 5), None, None, 9, 9, device="cpu")
    given = draw()
    with pytest.raises(Exception, match=r"call stof.torch.from_block_mask\(block_mask\) before"):
        torch.compile(run, fullgraph=True, backend="eager")(*given)
    mask = stof.torch.from_block_mask(block_mask)
    expected = stof.torch.attention(*given, mask)
    for one in (block_mask, mask):  # a translation that is known is taken
        compiled = torch.compile(
            lambda q, k, v, m=one: stof.torch.attention(q, k, v, m), fullgraph=True, backend="eager"
        )
        torch.testing.assert_close(compiled(*given), expected)


def test_exported_with_dynamic_batch_and_length() -> None:
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=32)
    dims = [{0: batch, 2: length}] * 3
    program = torch.export.export(Model(), tuple(draw()), dynamic_shapes=tuple(dims))
    assert any(node.target == torch.ops.stof.attention.default for node in program.graph.nodes)
    given = draw(13, 3)
    torch.testing.assert_close(program.module()(*given), Model()(*given))


def test_checks_of_the_library_of_operators() -> None:
    q, k, v = (t.requires_grad_() for t in draw(5))
    table = torch.ones(4, 2, 2, dtype=torch.bool)
    arguments = (q, k, v, [table], "k <= q and table0[h, q // 4, k // 4]", "table0", 0.3, 1.0, "zero", False)
    torch.library.opcheck(torch.ops.stof.attention.default, arguments)


def test_fake_tensors_are_checked_like_real_ones() -> None:
    with torch.device("meta"):
        q, k, v = torch.empty(2, 4, 9, 8), torch.empty(2, 2, 11, 8), torch.empty(2, 2, 11, 6)
    output, lse = stof.torch.attention(q, k, v, MASK, return_lse=True)
    assert (output.shape, lse.shape, lse.dtype) == ((2, 4, 9, 6), (2, 4, 9), torch.float32)
    with pytest.raises(ArgumentError, match="k has shape"):
        stof.torch.attention(q, k[..., :4], v, MASK)
