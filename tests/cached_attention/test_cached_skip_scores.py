# SPDX-License-Identifier: Apache-2.0
"""Attribute skip_threshold of StofCachedAttention in ONNX Runtime: prompts, chunks and steps over ragged caches."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.attention_sessions import CAPACITY, D, H, draw_cached
from tests.helpers.attention_sessions import run_cached as run
from tests.helpers.skip_scores import attend_exactly, most_moved, set_levels

import stof


@pytest.mark.parametrize("threshold", [1e-4, 0.3, 10.0])
@pytest.mark.parametrize("mask", ["k <= q", "k <= q and q - k < 300", "k <= q and k % 5 != 2"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("S", "past"), [(1, [900, 130]), (3, [900, 30]), (200, [700, 100]), (600, [0, 0])])
def test_outputs_are_within_the_bound(S: int, past: list[int], dtype: str, mask: str, threshold: float) -> None:
    x = draw_cached(set_levels, S, past, dtype)
    stof.reset_skip_counts()
    found = run(x.feeds, mask, skip_threshold=threshold).reshape(len(past), S, H, D)
    counts = stof.skip_counts()
    assert counts.scored > 0
    if threshold > 1 and S >= 200 and mask == "k <= q":
        assert counts.share > 0.1
    for b, n in enumerate(x.lengths):
        q, k = np.arange(n - S, n)[:, None], np.arange(n)
        allowed = (k <= q) & (q - k < (300 if "300" in mask else CAPACITY)) & ((k % 5 != 2) | ("5" not in mask))
        exact = attend_exactly(x.query[b], x.key[b, :, :n], x.value[b, :, :n], allowed)
        limit = most_moved(threshold, x.value[b]) + (2e-5 if dtype == "float32" else 3e-3)
        assert np.abs(found[b].swapaxes(0, 1).astype(np.float64) - exact).max() <= limit
    np.testing.assert_array_equal(run(x.feeds, mask, skip_threshold=0.0), run(x.feeds, mask))
