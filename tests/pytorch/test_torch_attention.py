# SPDX-License-Identifier: Apache-2.0
"""The forward pass of stof.torch.attention on the CPU, against fp64."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch_oracle import attention_fp64, pairs

import stof.torch
from stof.errors import ArgumentError
from stof.runtime.library import LibraryError
from stof.torch.kernel import HANDLES, HandleCache

S2 = "k <= q and (q // 4 - k // 4 < 2 or (k // 4 + h) % 3 == 2)"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float64: 1e-12}


def draw(
    B: int = 2, H: int = 4, G: int = 2, S: int = 19, T: int = 23, D: int = 16, Dv: int = 24, dtype: Any = torch.float32
) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(B * 1000 + S * 10 + T)
    return tuple(
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((B, H, S, D), (B, G, T, D), (B, G, T, Dv))
    )  # type: ignore[return-value]


def compare(found: Any, expected: Any, dtype: Any) -> None:
    assert found.shape == expected.shape
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("text", ["", "k <= q", S2, "k < q and k != 3 and (h > 0 or q != 7)"])
def test_output_and_lse_are_those_of_the_formula(text: str, dtype: Any) -> None:
    q, k, v = draw(dtype=dtype)
    output, lse = stof.torch.attention(q, k, v, text, softcap=1.5, scale=0.4, return_lse=True)
    expected, expected_lse = attention_fp64(q, k, v, pairs(text, 2, 4, 19, 23), 0.4, 1.5)
    assert output.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    compare(output, expected, dtype)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("empty_rows", ["zero", "nan", "mean", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fully_masked_rows_give_what_was_asked_for(empty_rows: str, dtype: Any) -> None:
    q, k, v = draw(dtype=dtype)
    text = "k < q and (h != 2 or q > 9)"
    output, lse = stof.torch.attention(q, k, v, text, empty_rows=empty_rows, return_lse=True)
    expected, expected_lse = attention_fp64(q, k, v, pairs(text, 2, 4, 19, 23), empty_rows=empty_rows)
    compare(output, expected, dtype)
    assert torch.isneginf(lse[:, 2, :10]).all()
    assert torch.equal(torch.isneginf(lse), torch.isneginf(expected_lse))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_run_time_operands(dtype: Any) -> None:
    q, k, v = draw(dtype=dtype)
    given = {
        "pad": torch.rand(2, 23, generator=torch.Generator().manual_seed(1)) < 0.7,
        "segment_q": torch.arange(19).div(5, rounding_mode="floor").expand(1, 19),
        "segment_k": torch.arange(23).div(5, rounding_mode="floor").expand(2, 23),
        "lengths": torch.tensor([17, 23]),
    }
    text = "pad[b, k] and segment_q[b, q] == segment_k[b, k] and k < lengths[b]"
    found = stof.torch.attention(q, k, v, text, **given)
    compare(found, attention_fp64(q, k, v, pairs(text, 2, 4, 19, 23, **given))[0], dtype)


@pytest.mark.parametrize("table_dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_tables(table_dtype: Any) -> None:
    q, k, v = draw()
    table = torch.randint(0, 2, (4, 5, 6), generator=torch.Generator().manual_seed(2)).to(table_dtype)
    text = "table0[h, q // 4, k // 4]" + ("" if table_dtype == torch.bool else " != 0")
    expected = attention_fp64(q, k, v, pairs(text, 2, 4, 19, 23, table0=table))[0]
    compare(stof.torch.attention(q, k, v, text, tables={"table0": table}), expected, torch.float32)
    compare(stof.torch.attention(q, k, v, text, tables={"table0": table.numpy()}), expected, torch.float32)
    table.copy_(1 - table.to(torch.uint8))  # in place: the operator must not be the one of the old content
    expected = attention_fp64(q, k, v, pairs(text, 2, 4, 19, 23, table0=table))[0]
    compare(stof.torch.attention(q, k, v, text, tables={"table0": table}), expected, torch.float32)


def test_queries_at_the_end() -> None:
    q, k, v = draw(S=5, T=23)
    found = stof.torch.attention(q, k, v, "k <= q and q - k < 7", query_offset=True)
    compare(found, attention_fp64(q, k, v, pairs("k <= q and q - k < 7", 2, 4, 5, 23, 18))[0], torch.float32)


@pytest.mark.parametrize("view", ["transposed", "sliced", "expanded", "permuted"])
def test_tensors_that_are_not_contiguous(view: str) -> None:
    q, k, v = draw()
    if view == "transposed":  # [B, S, H, D], as models have them
        given = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    elif view == "sliced":
        given = [torch.cat([t, t], -1)[..., : t.shape[-1]] for t in (q, k, v)]
    elif view == "permuted":
        given = [t.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for t in (q, k, v)]
    else:
        q, k, v = q, k[:, :1].expand(-1, 2, -1, -1), v
        given = [q, k, v]
    assert view == "expanded" or not any(t.is_contiguous() for t in given)
    found = stof.torch.attention(*given, S2)
    compare(found, attention_fp64(q, k, v, pairs(S2, 2, 4, 19, 23))[0], torch.float32)
    assert found.is_contiguous()


@pytest.mark.parametrize(("S", "T"), [(0, 3), (3, 0), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_short_tensors(S: int, T: int, dtype: Any) -> None:
    q, k, v = draw(S=S, T=T, dtype=dtype)
    output, lse = stof.torch.attention(q, k, v, "k <= q", return_lse=True)
    assert output.shape == (2, 4, S, 24)
    assert torch.isneginf(lse).all() if T == 0 else torch.isfinite(lse).all()
    if T == 0:
        assert not output.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(4, 19, 16)}, r"q has shape \[4, 19, 16\], expected four axes \[B, H, S, D\]"),
        ({"k": torch.zeros(2, 23, 16)}, r"k has shape \[2, 23, 16\], expected four axes"),
        ({"k": torch.zeros(2, 2, 23, 8)}, r"k has shape \[2, 2, 23, 8\], expected \[2, G, T, 16\]"),
        ({"v": torch.zeros(2, 2, 22, 16)}, r"v has shape \[2, 2, 22, 16\], expected \[2, 2, 23, Dv\]"),
        (
            {"k": torch.zeros(2, 3, 23, 16), "v": torch.zeros(2, 3, 23, 16)},
            "q has 4 heads and k has 3, expected a multiple",
        ),
        ({"k": torch.zeros(2, 2, 23, 16).half()}, "k has type torch.float16, expected that of q, torch.float32"),
        ({"q": torch.zeros(2, 4, 19, 16, dtype=torch.int64)}, "q has type torch.int64, expected fp32"),
        ({"v": torch.zeros(2, 2, 23, 16, device="meta")}, "v is on meta, expected that of q, cpu"),
        ({"empty_rows": "none"}, "empty_rows is 'none', expected zero, nan, mean, all"),
        ({"softcap": -1.0}, "softcap is -1.0, expected 0 or more"),
        ({"scale": float("nan")}, "scale is nan, expected a finite number"),
        ({"mask": 3}, "mask is a int, expected a mask expression, a BlockMask or None"),
        (
            {"query_offset": True, "q": torch.zeros(2, 4, 30, 16)},
            "q has 30 rows and k has 23, expected at most as many",
        ),
        ({"pad": torch.ones(2, 22)}, r"pad has shape \[2, 22\], expected \[2, 23\], or 1 in place of the batch"),
        ({"lengths": torch.ones(2)}, "lengths has type torch.float32, expected one of int32, int64"),
        ({"segment_q": torch.ones(2, 23, dtype=torch.int32)}, r"segment_q has shape \[2, 23\], expected \[2, 19\]"),
        ({"tables": {"t": torch.ones(2)}}, "tables has the name 't', expected table0"),
        ({"tables": {"table0": torch.ones(2)}}, "table0 has type torch.float32, expected one of bool"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    q, k, v = draw(Dv=16)
    arguments = {"q": q, "k": k, "v": v, "mask": "k <= q", **changes}
    with pytest.raises(ArgumentError, match=message):
        stof.torch.attention(**arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k <=", "mask is 'k <=': .*column 5: unexpected end"),
        ("k <= q and row[k]", "mask is 'k <= q and row.k.': .*column 15: unknown name 'row'"),
        ("table0[k] > 2", "table0"),
        ("pad[b, k]", r"mask is 'pad\[b, k\]' and reads pad, which is not given: pad=\.\.\."),
        ("k < lengths[b]", "reads lengths, which is not given"),
    ],
)
def test_wrong_masks(text: str, message: str, dtype: Any) -> None:
    with pytest.raises(ArgumentError, match=message):
        stof.torch.attention(*draw(dtype=dtype), text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masks_that_do_not_fit_the_operands(dtype: Any) -> None:
    given = draw(dtype=dtype)
    with pytest.raises(ArgumentError, match="pad is given, and mask, 'k <= q', does not read it"):
        stof.torch.attention(*given, "k <= q", pad=torch.ones(2, 23))
    with pytest.raises(ArgumentError, match="table0 has 2 indices"):
        stof.torch.attention(*given, "table0[q, k]", tables={"table0": torch.ones(23, dtype=torch.bool)})
    error = ArgumentError if dtype == torch.float64 else LibraryError
    for text, size in (("table0[k]", 22), ("table0[k - 1]", 23)):  # PyTorch takes index -1 for the last element
        with pytest.raises(error, match="index 0 of table0"):
            stof.torch.attention(*given, text, tables={"table0": torch.ones(size, dtype=torch.bool)})


def test_handles_are_shared_and_bounded() -> None:
    q, k, v = draw()
    stof.torch.attention(q, k, v, "k <= q and q - k < 11")
    count = len(HANDLES)
    stof.torch.attention(q[:, :, :7], k, v, "k <= q and q - k < 11")
    assert len(HANDLES) == count
    cache = HandleCache(3)
    first = [cache.get(i, {"mask": f"k <= q + {i}"}, [], i == 0) for i in range(9)]
    assert len(cache) == 4  # the captured one stays beside the last three
    assert cache.get(0, {}, [], False) is first[0]
    assert cache.get(8, {}, [], False) is first[8]
    assert cache.get(1, {"mask": "k <= q"}, [], False) is not first[1]


def test_importing_stof_does_not_import_pytorch() -> None:
    code = "import sys, stof, stof.options; assert 'torch' not in sys.modules; import stof.torch; import torch; torch.ones(1)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_threads_give_the_same_result() -> None:
    q, k, v = draw(S=300, T=300)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = stof.torch.attention(q, k, v, S2)
        torch.set_num_threads(2)
        two = stof.torch.attention(q, k, v, S2)
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(one, two, atol=1e-6)


def test_a_missing_pytorch_is_named() -> None:
    code = "import sys; sys.modules['torch'] = None; import stof.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: stof.torch needs PyTorch 2.7 or later: pip install" in done.stderr
