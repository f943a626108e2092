# SPDX-License-Identifier: Apache-2.0
"""The fp64 oracle of the contract gives what ONNX Runtime's own GroupQueryAttention gives."""

from __future__ import annotations

import numpy as np
import pytest
from gqa_models import Shape, draw_step, feeds_of, model_of, session

from stof.cached_attention.checks.oracle import compute_step
from stof.cached_attention.site import count_held_rows

SHAPES = {
    "plain": Shape(),
    "packed": Shape(packed=True),
    "one head": Shape(H=1, G=1, D=8),
    "multi-query": Shape(H=8, G=1, D=32),
    "window": Shape(window=5),
    "scale": Shape(scale=0.4),
    "softcap": Shape(softcap=1.5),
    "softcap, window": Shape(softcap=1.5, window=4),
    "rotary": Shape(rotary=16),
    "rotary of a part": Shape(D=32, rotary=16, packed=True),
    "rotary, interleaved": Shape(rotary=16, interleaved=True),
    "rotary, positions": Shape(rotary=16, positions=True),
    "bias": Shape(bias=(1, 4)),
    "bias of batch": Shape(bias=(2, 1)),
    "bias, softcap": Shape(bias=(1, 1), softcap=2.0),
    "sinks": Shape(sink=True),
    "sinks, window": Shape(sink=True, window=6),
    "smooth softmax": Shape(smooth=True),
    "everything": Shape(packed=True, D=32, rotary=16, sink=True, window=7, scale=0.3, H=6, G=2),
}
# Lengths after the step, queries, capacity: first prompts, single tokens, chunks; ONNX Runtime takes those of one row alone.
STEPS = {
    "prompt": ([9, 9], 9, 9),
    "padded prompt": ([9, 4, 1], 9, 12),
    "token": ([12, 7, 2], 1, 16),
    "token, cache grows": ([13, 13], 1, 12),
    "first token": ([1, 1], 1, 3),
    "chunk": ([15], 4, 20),
    "chunk, full": ([20], 7, 20),
}


# A bias of each row needs several.
PAIRS = [(n, s) for n in SHAPES for s in STEPS if SHAPES[n].bias[0] < 2 or len(STEPS[s][0]) > 1]


@pytest.mark.parametrize(("name", "steps"), PAIRS)
def test_oracle_is_the_runtime(name: str, steps: str) -> None:
    shape, (lengths, queries, capacity) = SHAPES[name], STEPS[steps]
    step = draw_step(shape, lengths, queries, capacity, seed=len(name) + queries)
    found = session(model_of(shape), library=False).run(None, feeds_of(shape, step))
    exact = compute_step(step)
    check(step, found, exact, 3e-6)


def check(step, found, exact, tolerance) -> None:  # type: ignore[no-untyped-def]
    rows = ~step.padded
    np.testing.assert_allclose(found[0][rows], exact.output[rows], atol=tolerance, rtol=tolerance)
    for cache, wanted in zip(found[1:], (exact.key, exact.value), strict=True):
        assert cache.shape == wanted.shape
        for b, count in enumerate(step.rows):
            assert not np.isnan(wanted[b, :, :count]).any()
            assert np.isnan(wanted[b, :, count:]).all()
            np.testing.assert_allclose(cache[b, :, :count], wanted[b, :, :count], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("capacity", [6, 9])
@pytest.mark.parametrize("shape", [Shape(window=6, sliding=True), Shape(window=6, sliding=True, rotary=16, sink=True)])
def test_sliding_window_caches(shape: Shape, capacity: int) -> None:
    """Step by step, beyond the capacity, with chunks: the runtime's cache and output are the oracle's."""
    made = session(model_of(shape), library=False)
    key = value = None
    length = 0
    for i, queries in enumerate([4, 1, 1, 3, 1, 8, 1, 1, 1, 13, 1, 1]):
        length += queries
        step = draw_step(shape, [length], queries, capacity, seed=i)
        if key is not None:
            step = type(step)(**{**vars(step), "past_key": key, "past_value": value})
        found = made.run(None, feeds_of(shape, step))
        check(step, found, compute_step(step), 3e-6)
        key, value = found[1:]


def test_held_rows_of_the_layout() -> None:
    """The rows that stay: all of them, then between the window and the capacity."""
    lengths = np.arange(1, 60)
    for capacity, window in ((6, 6), (9, 6), (22, 6)):
        rows = count_held_rows(lengths, capacity, window)
        assert (rows[lengths <= capacity] == lengths[lengths <= capacity]).all()
        beyond = rows[lengths > capacity]
        assert beyond.min() == window
        assert beyond.max() == capacity


def test_half_precision() -> None:
    """ONNX Runtime's fp16 kernel is within its own roundings of the oracle."""
    shape = Shape(dtype="float16", rotary=16, packed=True)
    step = draw_step(shape, [12, 7, 2], 1, 16)
    found = session(model_of(shape), library=False).run(None, feeds_of(shape, step))
    check(step, found, compute_step(step), 5e-3)
    check(step, found, compute_step(step, np.float32, np.dtype(np.float16)), 3e-3)
