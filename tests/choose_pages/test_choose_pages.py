# SPDX-License-Identifier: Apache-2.0
"""StofCachedAttention with ``chosen_pages`` in ONNX Runtime on the CPU: loops of steps against the definition in fp64."""

from __future__ import annotations

import numpy as np
import pytest
from tests.choose_pages.page_decoder import PageDecoder
from tests.choose_pages.pages_oracle import Mask

MASKS: dict[str, tuple[str, Mask]] = {
    "causal": ("k <= q", lambda h, q, k: k <= q),
    "window": ("k <= q and q - k < 300", lambda h, q, k: q - k < 300),
    "strided": ("k <= q and (q - k < 40 or k // 32 % 3 == 0)", lambda h, q, k: (q - k < 40) | (k // 32 % 3 == 0)),
    "columns": ("k <= q and (q - k < 40 or k % 100 == 0)", lambda h, q, k: (q - k < 40) | (k % 100 == 0)),
    "heads": ("k <= q and (q - k < 40 or k // 64 % 4 != h)", lambda h, q, k: (q - k < 40) | (k // 64 % 4 != h)),
}


def decode(decoder: PageDecoder, past: list[int], steps: list[int]) -> None:
    """Steps behind so many keys of each sequence, whose key bounds are not known."""
    decoder.fill(past)
    for length in steps:
        decoder.step(length)
    assert decoder.near_ties <= decoder.compared // 20


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("capacity", [0, 1000])
def test_steps_behind_ragged_caches(rows: int, capacity: int, dtype: str) -> None:
    decoder = PageDecoder(np.random.default_rng(rows), rows=rows, chosen=3, capacity=capacity, dtype=dtype)
    decode(decoder, [900, 517], [1, 5, 16, 1])


@pytest.mark.parametrize("rows", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_steps_after_prompts(rows: int, dtype: str) -> None:
    decoder = PageDecoder(np.random.default_rng(rows), rows=rows, chosen=1, dtype=dtype, heads=2, groups=1)
    decoder.step(4 * rows + 5, [4 * rows + 5, 3 * rows])
    for length in (1, 40, rows, 1, 16):
        decoder.step(length)


@pytest.mark.parametrize(("heads", "groups"), [(2, 2), (6, 2), (8, 1), (16, 1)])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_heads_and_sizes(heads: int, groups: int, size: int, dtype: str) -> None:
    rng = np.random.default_rng(size)
    decoder = PageDecoder(rng, heads=heads, groups=groups, size=size, chosen=2, rows=32, capacity=512, dtype=dtype)
    decode(decoder, [400, 333], [1, 2, 16, 1])


@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_masks(name: str, rows: int, length: int) -> None:
    rng = np.random.default_rng(length)
    decoder = PageDecoder(rng, rows=rows, chosen=2, capacity=1024, mask=MASKS[name])
    decode(decoder, [640, 390], [length, 1, length])


@pytest.mark.parametrize("rows", [16, 32, 128])
@pytest.mark.parametrize("capacity", [0, 700])
def test_rewinding(rows: int, capacity: int) -> None:
    decoder = PageDecoder(np.random.default_rng(3), rows=rows, chosen=2, capacity=capacity)
    decode(decoder, [500, 460], [1, 7])
    for lengths in ([490, 470], [rows * 3, rows * 2 + 1], [rows * 2 - 1, 7], [0, 0]):
        decoder.rewind([min(n, int(m)) for n, m in zip(lengths, decoder.lengths, strict=True)])
        if max(lengths) == 0:
            decoder.step(400, [400, 16])
        for length in (1, 16, 3):
            decoder.step(length)
    assert decoder.near_ties <= decoder.compared // 20


@pytest.mark.parametrize("capacity", [0, 900])
def test_bounds_that_are_not_known(capacity: int) -> None:
    decoder = PageDecoder(np.random.default_rng(4), chosen=2, capacity=capacity, rows=32)
    decode(decoder, [600, 333], [1, 4])
    decoder.forget_bounds()
    for length in (1, 16, 1):
        decoder.step(length)


def test_negative_scale_and_equal_bounds() -> None:
    decoder = PageDecoder(np.random.default_rng(5), chosen=2, capacity=512, rows=16, scale=-0.2)
    decode(decoder, [400, 390], [1, 2])
    tied = PageDecoder(np.random.default_rng(6), batch=1, chosen=3, capacity=512, rows=16)
    page = tied.draw(tied.groups, 16, tied.size)
    tied.fill([256])
    tied.keys[0] = np.concatenate([page] * 16, 1)  # all pages have one score: the first pages are taken
    tied.cache["key"][0, :, :256] = tied.keys[0]
    tied.step(1, is_checked=False)
    query = tied.feeds["query"].reshape(1, tied.heads, tied.size)[0].astype(np.float64)
    keys, values = (np.repeat(x[0].astype(np.float64), 2, 0) for x in (tied.keys, tied.values))
    attended = np.isin(np.arange(257) // 16, [0, 1, 2, 3, 15, 16])
    scores = np.where(attended, np.einsum("hd,hkd->hk", query, keys) * tied.scale, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    expected = np.einsum("hk,hkd->hd", weights / weights.sum(-1, keepdims=True), values)
    np.testing.assert_allclose(tied.output.reshape(tied.heads, tied.size), expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("length", [1, 16])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_pages_are_the_dense_attention(length: int, dtype: str) -> None:
    decoder = PageDecoder(np.random.default_rng(7), chosen=100, capacity=800, dtype=dtype)
    decode(decoder, [700, 650], [length])
    dense = decoder.run_dense()
    np.testing.assert_array_equal(decoder.output, dense)
    prompt = PageDecoder(np.random.default_rng(8), chosen=1, capacity=800, dtype=dtype)
    prompt.fill([600, 550])
    prompt.step(17)  # longer than a step that chooses
    np.testing.assert_array_equal(prompt.output, prompt.run_dense())


@pytest.mark.parametrize("length", [1, 5])
def test_results_do_not_depend_on_threads(length: int) -> None:
    outputs = []
    for threads in (1, 2, 5):
        decoder = PageDecoder(
            np.random.default_rng(9), chosen=4, capacity=4000, heads=8, groups=2, rows=16, threads=threads
        )
        decoder.fill([3000, 2900])
        decoder.step(length)
        outputs.append(decoder.output)
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


def test_a_nan_key_is_attended() -> None:
    decoder = PageDecoder(np.random.default_rng(10), batch=1, chosen=1, capacity=600, rows=32, groups=1)
    decoder.fill([500])
    decoder.cache["key"][0, 0, 200, 5] = np.nan
    decoder.step(1, is_checked=False)  # the oracle has no NaN
    assert np.isnan(decoder.output).all()
    assert np.isnan(decoder.cache["bounds"][0, 0, 6, :, 5]).all()
    assert np.isfinite(decoder.cache["bounds"][0, 0, :15]).sum() == 15 * 2 * 64 - 2
