# SPDX-License-Identifier: Apache-2.0
"""FlexAttention's BlockMask as a mask of stof: expressions, tables, blocks, and the reasons where there is none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, create_mask, noop_mask, or_masks
from torch_oracle import attention_fp64

import stof.torch
from stof.errors import ArgumentError, UnsupportedError

H, S, T = 3, 100, 140
GENERATOR = torch.Generator().manual_seed(3)
BLOCKS = torch.randint(0, 2, (H, 7, 9), generator=GENERATOR).bool()
DOCUMENTS = torch.arange(T).div(37, rounding_mode="floor")
OFFSET = torch.tensor(5)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q - k < 20


def s2(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k <= q) & ((q // 16 - k // 16 < 2) | ((k // 16 + h) % 4 == 3))


FUNCTIONS: dict[str, tuple[Callable[..., Any], str]] = {
    "causal": (causal, "k <= q"),
    "all pairs": (noop_mask, ""),
    "window": (and_masks(causal, window), "k <= q and q - k <= 19"),
    "sinks": (and_masks(causal, or_masks(window, lambda b, h, q, k: k < 4)), "k <= q and (q - k <= 19 or k <= 3)"),
    "symmetric": (lambda b, h, q, k: (q - k).abs() <= 8, "abs(q - k) <= 8"),
    "s2": (s2, "k <= q and ((k // 16 + h) % 4 == 3 or q // 16 <= k // 16 + 1)"),
    "blocks": (lambda b, h, q, k: BLOCKS[h, q // 16, k // 16], "table0[h, q // 16, k // 16]"),
    "row of a table": (lambda b, h, q, k: BLOCKS[1][q // 16, k // 16], "table0[1, q // 16, k // 16]"),
    "documents": (lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k), "k <= q and table0[k] == table0[q]"),
    "captured number": (lambda b, h, q, k: q + OFFSET >= k, "k - q <= 5"),
    "negative index": (lambda b, h, q, k: BLOCKS[-1, q // 16, k // 16], "table0[2, q // 16, k // 16]"),
    "where": (lambda b, h, q, k: torch.where(h == 1, q >= k, k == 2), "h != 1 and k == 2 or k <= q and h == 1"),
    "not": (lambda b, h, q, k: ~((q < k) | (k % 7 == 0)), "k <= q and k % 7 != 0"),
    "exclusive or": (lambda b, h, q, k: (q >= k) ^ (k < 10), "k <= q and 10 <= k or q <= k - 1 and k <= 9"),
    "division that rounds": (
        lambda b, h, q, k: torch.div(q - k, 8, rounding_mode="floor") == 1,
        "(q - k) // 8 == 1",
    ),
    "clamp": (lambda b, h, q, k: torch.clamp(q - k, min=0, max=9) == 3, "min(max(q - k, 0), 9) == 3"),
    "minimum": (lambda b, h, q, k: torch.minimum(q, k) % 5 == 1, "min(q, k) % 5 == 1"),
}


def dense(block_mask: Any, heads: int = H) -> Any:
    """The pairs that FlexAttention computes: its function within partial blocks, all of full ones."""
    rows, columns = block_mask.seq_lengths
    pairs = create_mask(block_mask.mask_mod, 1, heads, rows, columns, device="cpu")
    shape = block_mask.kv_num_blocks.shape
    found = torch.zeros(shape[0], heads, rows, columns, dtype=torch.bool)
    m, n = block_mask.BLOCK_SIZE
    full = block_mask.full_kv_num_blocks
    for b in range(shape[0]):
        for h in range(heads):
            for row in range(shape[2]):
                at = (b, min(h, shape[1] - 1), row)
                for is_full, counts, lists in (
                    (False, block_mask.kv_num_blocks, block_mask.kv_indices),
                    (True, full, block_mask.full_kv_indices),
                ):
                    for i in range(0 if counts is None else int(counts[at])):
                        column = int(lists[at][i])
                        r, c = slice(row * m, row * m + m), slice(column * n, column * n + n)
                        found[b, h, r, c] = True if is_full else pairs[0, h, r, c]
    return found


def check(block_mask: Any, rows: int = S, columns: int = T) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, H, n, 8, generator=generator) for n in (rows, columns, columns))
    expected, _ = attention_fp64(q, k, v, dense(block_mask))
    found = stof.torch.attention(q, k, v, block_mask)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_become_expressions(name: str) -> None:
    function, text = FUNCTIONS[name]
    block_mask = create_block_mask(function, None, H, S, T, device="cpu")
    found = stof.torch.from_block_mask(block_mask)
    assert found.text == text
    assert not found.note
    check(block_mask)


def test_a_block_mask_of_one_head_serves_all() -> None:
    block_mask = create_block_mask(causal, None, None, S, T, device="cpu")
    assert stof.torch.from_block_mask(block_mask).text == "k <= q"
    check(block_mask)


def test_blocks_that_are_given_restrict_the_function() -> None:
    counts = torch.tensor([[[1, 2]]], dtype=torch.int32)
    lists = torch.tensor([[[[1, 0, 2], [2, 0, 1]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=(64, 32), seq_lengths=(100, 90))
    found = stof.torch.from_block_mask(block_mask)
    assert found.text == "table0[q // 64, k // 32]"
    assert found.tables["table0"].tolist() == [[False, True, False], [True, False, True]]
    check(block_mask, 100, 90)
    block_mask = BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=(64, 32), seq_lengths=(100, 90), mask_mod=causal)
    assert stof.torch.from_block_mask(block_mask).text == "table0[q // 64, k // 32] and k <= q"
    check(block_mask, 100, 90)


def test_full_blocks_are_full_whatever_the_function_says() -> None:
    counts = torch.tensor([[[1, 1]]], dtype=torch.int32)
    lists = torch.tensor([[[[0, 1, 2], [1, 0, 2]]]], dtype=torch.int32)
    full = torch.tensor([[[1, 0]]], dtype=torch.int32)
    full_lists = torch.tensor([[[[2, 0, 1], [0, 1, 2]]]], dtype=torch.int32)
    block_mask = BlockMask.from_kv_blocks(
        counts, lists, full, full_lists, BLOCK_SIZE=(64, 32), seq_lengths=(100, 90), mask_mod=causal
    )
    assert "or" in stof.torch.from_block_mask(block_mask).text
    check(block_mask, 100, 90)


def test_block_sizes_that_the_library_has_not() -> None:
    check(create_block_mask(s2, None, H, S, T, device="cpu", BLOCK_SIZE=(10, 20)))


def test_a_function_without_an_expression_becomes_a_table() -> None:
    block_mask = create_block_mask(lambda b, h, q, k: q.float().sqrt() >= k.float() / 9, None, H, S, T, device="cpu")
    found = stof.torch.from_block_mask(block_mask)
    assert found.text == "table0[h, q, k]"
    assert "a cast to torch.float32" in found.note
    check(block_mask)


def test_a_cast_of_a_whole_tensor_becomes_a_table() -> None:
    block_mask = create_block_mask(
        lambda b, h, q, k: BLOCKS.long()[h, q // 16, k // 16] == 1, None, H, S, T, device="cpu"
    )
    check(block_mask)


def test_functions_that_cannot_be_translated_say_why() -> None:
    traced = create_block_mask(causal, None, None, S, T, device="cpu")

    def branches(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q >= k if bool(h > 1) else k == q

    given = BlockMask.from_kv_blocks(traced.kv_num_blocks, traced.kv_indices, mask_mod=branches, seq_lengths=(S, T))
    with pytest.raises(UnsupportedError, match=r"branches on its indices .* nor can a table of its pairs be computed"):
        stof.torch.from_block_mask(given)

    def rounds(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q.float() >= k

    long = (1 << 15, 1 << 15)
    given = BlockMask.from_kv_blocks(traced.kv_num_blocks, traced.kv_indices, mask_mod=rounds, seq_lengths=long)
    with pytest.raises(UnsupportedError, match=r"a cast to torch.float32 .* would exceed 2\^28 elements"):
        stof.torch.from_block_mask(given)


def test_what_is_no_block_mask_is_refused() -> None:
    with pytest.raises(ArgumentError, match="block_mask is a str, expected a FlexAttention BlockMask"):
        stof.torch.from_block_mask("k <= q")


@pytest.mark.parametrize("where", ["grad", "vmap", "fake", "meta"])
@pytest.mark.filterwarnings("ignore")
def test_block_masks_that_cannot_be_read_are_refused_by_name(where: str) -> None:
    q = torch.randn(1, H, 9, 8, generator=torch.Generator().manual_seed(1))

    def run(offset: Any, tensor: Any = q, device: str = "cpu") -> Any:
        block_mask = create_block_mask(lambda b, h, q, k: k <= q + offset, None, None, 9, 9, device=device)
        return stof.torch.attention(tensor, tensor, tensor, block_mask)

    calls = {
        "grad": lambda: torch.func.grad(lambda q: run(torch.tensor(1), q).sum())(q),
        "vmap": lambda: torch.func.vmap(run)(torch.tensor([1, 2, 3])),
        "meta": lambda: run(0, q.to("meta"), "meta"),
        "fake": lambda: run(torch.tensor(1), torch.empty(1, H, 9, 8)),
    }
    message = r"a BlockMask holds a \w+ on \w+ that cannot be read: .* outside of transforms"
    with FakeTensorMode() if where == "fake" else nullcontext(), pytest.raises(UnsupportedError, match=message):
        calls[where]()


def test_block_masks_from_outside_of_a_transform() -> None:
    block_mask = create_block_mask(causal, None, None, 9, 9, device="cpu")
    q, k, v = (torch.randn(2, 1, H, 9, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    found = torch.func.vmap(lambda q, k, v: stof.torch.attention(q, k, v, block_mask))(q, k, v)
    for n in range(2):
        expected, _ = attention_fp64(q[n], k[n], v[n], torch.ones(9, 9, dtype=torch.bool).tril())
        torch.testing.assert_close(found[n].double(), expected, rtol=0, atol=1e-5)
