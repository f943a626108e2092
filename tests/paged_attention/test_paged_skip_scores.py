# SPDX-License-Identifier: Apache-2.0
"""Attribute skip_threshold of StofPagedAttention: the bound against fp64, ragged batches, pages of several sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from paged_models import Shape, draw_step, run_operator
from tests.helpers.skip_scores import most_moved, set_levels

import stof
from stof.cached_attention.paged.oracle import compute_paged_step


@pytest.mark.parametrize("threshold", [1e-4, 0.3, 10.0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize(("past", "tokens"), [([700, 0, 150], [1, 1, 1]), ([400, 0, 30], [40, 600, 0])])
def test_outputs_are_within_the_bound(
    past: list[int], tokens: list[int], block: int, dtype: str, threshold: float
) -> None:
    shape = Shape(D=64, block=block, dtype=dtype)
    step = draw_step(shape, past, tokens, padding=1)
    rng = np.random.default_rng(1)
    query = step.query.reshape(-1, shape.H, 64).swapaxes(0, 1)
    assert step.key is not None
    # Levels by pages, whatever sequence they belong to, and of new tokens.
    for keys in (
        step.key_cache.reshape(-1, shape.G, 64).swapaxes(0, 1),
        step.key.reshape(-1, shape.G, 64).swapaxes(0, 1),
    ):
        set_levels(rng, query, keys)
    stof.reset_skip_counts()
    found = run_operator(shape, step, skip_threshold=threshold)
    counts = stof.skip_counts()
    exact = compute_paged_step(step).output
    moved = np.abs(found.astype(np.float64) - exact).max()
    largest = max(most_moved(threshold, x) for x in (step.value_cache, np.asarray(step.value)))
    assert moved <= largest + (2e-5 if dtype == "float32" else 3e-3)
    assert counts.scored > 0
    if threshold > 1:
        assert counts.skipped > 0
    np.testing.assert_array_equal(
        run_operator(shape, step, skip_threshold=0.0), run_operator(shape, step, skip_threshold=None)
    )


def test_an_error_names_the_value() -> None:
    shape = Shape(D=64)
    with pytest.raises(Exception, match=r"(?s)skip_threshold.*-3"):
        run_operator(shape, replace(draw_step(shape, [5], [1])), skip_threshold=-3.0)
