# SPDX-License-Identifier: Apache-2.0
"""Attribute block_threshold of StofPagedAttention in ONNX Runtime: ragged batches, pages of several sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.helpers.chosen_blocks import attend, choose, set_levels
from tests.paged_attention.paged_models import Shape, draw_step, run_operator

import stof
from stof.cached_attention.paged.oracle import PagedStep


def rows_of(shape: Shape, step: PagedStep, b: int, pages: np.ndarray, new: Any) -> np.ndarray:
    """All keys, or values, of a sequence: [G, T, D]."""
    past, (first, last) = int(step.past[b]), step.cumulative[b : b + 2]
    positions = np.arange(past)
    held = pages[step.table[b, positions // shape.block], positions % shape.block]  # [past, G, D]
    return np.concatenate([held, new[first:last].reshape(-1, shape.G, shape.D)]).swapaxes(0, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("block", [16, 256])
@pytest.mark.parametrize(("past", "tokens"), [([400, 0, 30], [140, 600, 1]), ([0, 300], [300, 300])])
def test_outputs_are_those_of_the_definition(past: list[int], tokens: list[int], block: int, dtype: str) -> None:
    shape = Shape(D=64, block=block, dtype=dtype)
    step = draw_step(shape, past, tokens, padding=1)
    rng = np.random.default_rng(1)
    query = step.query.reshape(-1, shape.H, 64).swapaxes(0, 1)
    assert step.key is not None
    for keys in (
        step.key_cache.reshape(-1, shape.G, 64).swapaxes(0, 1),
        step.key.reshape(-1, shape.G, 64).swapaxes(0, 1),
    ):
        set_levels(rng, query, keys)
    stof.reset_skip_counts()
    found = run_operator(shape, step, block_threshold=0.1).reshape(-1, shape.H, 64)
    counts = stof.skip_counts()
    counted = skipped = 0
    for b, (n, S) in enumerate(zip(past, tokens, strict=True)):
        rows = slice(*step.cumulative[b : b + 2])
        q, key, value = (query[:, rows], rows_of(shape, step, b, step.key_cache, step.key),
                         rows_of(shape, step, b, step.value_cache, step.value))  # fmt: skip
        allowed = np.arange(n + S) <= np.arange(n, n + S)[:, None]
        chosen = choose(q, key, allowed, 0.1, position=n)
        kept = chosen.kept if S >= 128 else np.broadcast_to(allowed, chosen.kept.shape)
        moved = np.abs(found[rows].swapaxes(0, 1).astype(np.float64) - attend(q, key, value, kept)).max(-1)
        assert np.isfinite(moved).all()
        assert moved[~chosen.near].max(initial=0) <= (2e-5 if dtype == "float32" else 4e-3)
        if S >= 128:
            counted, skipped = counted + chosen.counted, skipped + chosen.skipped
    assert 0.9 * counted <= counts.scored <= counted  # tiles have fewer rows than a query block
    assert counts.skipped >= 0.9 * skipped > 0
    np.testing.assert_array_equal(
        run_operator(shape, step, block_threshold=0.0), run_operator(shape, step, block_threshold=None)
    )


def test_an_error_names_the_value() -> None:
    shape = Shape(D=64)
    with pytest.raises(Exception, match=r"(?s)block_threshold.*-3"):
        run_operator(shape, replace(draw_step(shape, [5], [1])), block_threshold=-3.0)
