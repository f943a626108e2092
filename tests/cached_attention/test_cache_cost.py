# SPDX-License-Identifier: Apache-2.0
"""What is estimated of one token: bytes of the cache that are read, no loss anywhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gqa_models import Shape, model_of
from sparse_models import SparseShape, candidates_of, sparse_model, strided

from stof.cached_attention.cost import estimate_gain
from stof.cached_attention.find import find_candidates
from stof.cached_attention.problem import CacheProblem
from stof.symbolic import Symbolic
from stof.targets import CPU, CUDA, Target


def gain_of(shape: Shape, target: Target = CPU, capacity: int | str = "C") -> tuple[float, int]:
    model = model_of(shape, capacity=capacity)
    (candidate,) = find_candidates(model, Symbolic(model), target.name)
    assert candidate.site is not None
    return estimate_gain(CacheProblem.of(candidate.site), target)


def test_dense_caches() -> None:
    """Gains grow with the heads that share a key; without sharing there is none on the CPU."""
    gains = [gain_of(Shape(H=8, G=g))[0] for g in (8, 4, 2, 1)]
    assert gains[0] == 1.0
    assert gains == sorted(gains)
    assert gains[-1] > 2


def test_windows() -> None:
    """The window's keys are read, not the cache's; a window beyond the cache changes nothing."""
    assert gain_of(Shape(window=1024))[0] > 3
    assert gain_of(Shape(window=1 << 20)) == gain_of(Shape())
    assert gain_of(Shape(window=64))[0] > gain_of(Shape(window=1024))[0]


@pytest.mark.parametrize(("capacity", "length"), [(100, 100), (1 << 20, 4096), ("C", 4096), (0, 4096)])
def test_length(capacity: int | str, length: int) -> None:
    assert gain_of(Shape(), capacity=capacity)[1] == length


def test_sliding_window_caches() -> None:
    """There is nothing outside of the window."""
    gain, length = gain_of(Shape(window=64, sliding=True), capacity=80)
    assert length == 80
    assert 1 < gain < 2


def test_cuda() -> None:
    """The runtime's kernels skip keys, too."""
    dense, window = (gain_of(Shape(window=w), CUDA)[0] for w in (0, 1024))
    assert 1 < dense < window < 1.5


HALF = Shape(H=32, G=8, D=128, dtype="float16")
ONE_KV_HEAD = replace(HALF, G=1)


@pytest.mark.parametrize(
    ("shape", "shapes", "gains"),
    [
        (HALF, {}, True),
        (ONE_KV_HEAD, {}, False),
        (replace(ONE_KV_HEAD, H=8), {}, True),
        (replace(ONE_KV_HEAD, H=8, D=256), {}, False),
        (replace(ONE_KV_HEAD, window=1024), {}, True),  # keys outside of a window are not read
        (HALF, {"B": (1, 32), "C": (1, 4096)}, False),  # half a GiB of keys and values
        (HALF, {"B": (1, 32), "C": (1, 1024)}, True),
        (HALF, {"B": (1, 1), "C": (1, 1 << 18)}, True),  # one sequence gains however long it is
        (replace(ONE_KV_HEAD, dtype="float32"), {}, True),  # the runtime has no such kernel for fp32
    ],
)
def test_losses_on_cuda(shape: Shape, shapes: dict[str, tuple[int, int]], gains: bool) -> None:
    """A node that is slower on the device stays; docs/results/comparisons/cached-layers-h200.json has the times."""
    model = model_of(shape)
    (candidate,) = find_candidates(model, Symbolic(model), "cuda")
    assert candidate.site is not None
    assert (estimate_gain(CacheProblem.of(candidate.site), CUDA, shapes)[0] >= 1) == gains
    assert estimate_gain(CacheProblem.of(candidate.site), CPU, shapes)[0] >= 1


def test_block_sparse() -> None:
    """The estimated gains are within a third of those that the constants were fitted to, at 4096 keys."""
    by_query = strided(64, 8, 16, 16)
    by_key = np.repeat(strided(64, 8, 16, 8, step=2), 4, axis=0)
    for layout, measured in ((by_query[:1], 14.6), (by_key, 6.3), (by_query, 5.4)):
        (candidate,) = candidates_of(sparse_model(SparseShape(layout, block=64, H=32, G=8, D=128)))
        assert candidate.site is not None
        gain, length = estimate_gain(CacheProblem.of(candidate.site), CPU)
        assert length == 4096
        assert 2 / 3 < gain / measured < 4 / 3
