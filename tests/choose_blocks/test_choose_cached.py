# SPDX-License-Identifier: Apache-2.0
"""Attribute block_threshold of StofCachedAttention in ONNX Runtime: prompts and chunks over ragged caches."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.attention_sessions import CACHED, CAPACITY, D, G, H, draw_cached
from tests.helpers.attention_sessions import run_cached as run
from tests.helpers.chosen_blocks import attend, choose, set_levels

import stof


@pytest.mark.parametrize("mask", ["k <= q", "k <= q and q - k < 300", "k <= q and k % 5 != 2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("S", "past"), [(128, [860, 130]), (200, [700, 100]), (600, [0, 0])])
def test_outputs_are_those_of_the_definition(S: int, past: list[int], dtype: str, mask: str) -> None:
    x = draw_cached(set_levels, S, past, dtype)
    stof.reset_skip_counts()
    found = run(x.feeds, mask, block_threshold=0.1).reshape(len(past), S, H, D)
    counts = stof.skip_counts()
    counted = skipped = 0
    for b, n in enumerate(x.lengths):
        q, k = np.arange(n - S, n)[:, None], np.arange(n)
        allowed = (k <= q) & (q - k < (300 if "300" in mask else CAPACITY)) & ((k % 5 != 2) | ("5" not in mask))
        chosen = choose(x.query[b], x.key[b, :, :n], allowed, 0.1, position=n - S)
        exact = attend(x.query[b], x.key[b, :, :n], x.value[b, :, :n], chosen.kept)
        moved = np.abs(found[b].swapaxes(0, 1).astype(np.float64) - exact).max(-1)
        assert np.isfinite(moved).all()
        assert moved[~chosen.near].max() <= (2e-5 if dtype == "float32" else 4e-3)
        assert chosen.near.mean() < 0.25
        counted, skipped = counted + chosen.counted, skipped + chosen.skipped
    assert 0.9 * counted <= counts.scored <= counted  # tiles have fewer rows than a query block
    assert counts.skipped >= 0.9 * skipped > 0
    np.testing.assert_array_equal(run(x.feeds, mask, block_threshold=0.0), run(x.feeds, mask))


def test_a_padded_first_prompt_and_steps() -> None:
    S = 300
    rng = np.random.default_rng(2)
    x, k, v = (rng.standard_normal((2, n, S, D)).astype(np.float32) for n in (H, G, G))
    set_levels(rng, x, k)
    lengths = np.array([S, 170])
    flat = [y.swapaxes(1, 2).reshape(2, S, -1) for y in (x, k, v)]
    cache = np.full((2, G, CAPACITY, D), np.nan, np.float32)
    feeds = dict(zip(CACHED, [*flat, cache, cache, (lengths - 1).astype(np.int32), np.array(S, np.int32)], strict=True))
    stof.reset_skip_counts()
    found = run(feeds, "k <= q", block_threshold=0.5).reshape(2, S, H, D).swapaxes(1, 2)
    assert stof.skip_counts().skipped > 0
    q = np.arange(S)[:, None]
    for b, n in enumerate(lengths):
        chosen = choose(x[b], k[b, :, :n], np.arange(n) <= q, 0.5)
        moved = np.abs(found[b] - attend(x[b], k[b, :, :n], v[b, :, :n], chosen.kept)).max(-1)
        assert moved[~chosen.near].max() <= 2e-5
    # A step has few queries: all blocks.
    past = np.concatenate([k, np.full((2, G, CAPACITY - S, D), np.nan, np.float32)], 2)
    step = {n: y[:, :1] for n, y in zip(CACHED[:3], flat, strict=True)}
    step |= {"past_key": past, "past_value": past, "seqlens_k": lengths.astype(np.int32),
             "total_sequence_length": np.array(S + 1, np.int32)}  # fmt: skip
    stof.reset_skip_counts()
    np.testing.assert_array_equal(run(step, "k <= q", block_threshold=1.0), run(step, "k <= q"))
    assert stof.skip_counts() == stof.SkipCounts(0, 0)
