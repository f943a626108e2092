# SPDX-License-Identifier: Apache-2.0
"""StofPagedAttention, and PagedAttention in standard ONNX, against the contract in NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import helper
from paged_models import Shape, draw_step, feeds_of, model_of, run_shared, session

from stof.cached_attention.find import find_candidates
from stof.cached_attention.paged.checks import run_paged_step
from stof.cached_attention.paged.emit import emit_pages
from stof.cached_attention.paged.expand import expand_pages
from stof.cached_attention.paged.oracle import PagedStep, compute_paged_step
from stof.cached_attention.paged.site import PagedSite
from stof.runtime.library import LibraryError, Op
from stof.symbolic import Symbolic

SHAPES = {
    "plain": Shape(),
    "packed, one key head": Shape(H=6, G=1, D=24, packed=True),
    "window": Shape(window=9),
    "rotary": Shape(rotary=16),
    "part of a head, interleaved": Shape(rotary=6, rotary_offset=8, interleaved=True),
    "norms, sinks, softcap, scale": Shape(norms=True, sink=True, softcap=3.0, scale=0.4, rotary=8),
    "slots and bounds": Shape(slots=True, metadata=True, block=64),
}


def site_of(shape: Shape) -> PagedSite:
    model = model_of(shape)
    (candidate,) = find_candidates(model, Symbolic(model), "cpu")
    assert isinstance(candidate.site, PagedSite), candidate.reason
    return candidate.site


def largest(one: np.ndarray, other: np.ndarray) -> float:
    assert one.shape == other.shape
    return float(np.abs(one.astype(np.float64) - other.astype(np.float64)).max(initial=0.0))


def attributes_of(shape: Shape) -> dict[str, int | float | str]:
    site = site_of(shape)
    (node,) = emit_pages(model_of(shape), [site]).graph.node
    found = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {n: v.decode() if isinstance(v, bytes) else v for n, v in found.items()}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("past", "tokens"), [([20, 0, 70], [3, 0, 5]), ([0, 33], [40, 40]), ([0, 5, 17], [1, 1, 1])])
def test_standard_nodes_compute_the_contract(name: str, past: list[int], tokens: list[int]) -> None:
    shape = SHAPES[name]
    step = draw_step(shape, past, tokens, padding=2)
    expanded = expand_pages(model_of(shape), [site_of(shape)])
    found = session(expanded, library=False).run(None, feeds_of(shape, step))
    exact = compute_paged_step(step)
    for mine, wanted in zip(found, (exact.output, exact.key_cache, exact.value_cache), strict=True):
        assert largest(mine, wanted) < 3e-6


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("past", "tokens"), [([20, 0, 70], [3, 0, 5]), ([0, 517], [40, 40]), ([0, 1, 300], [1, 1, 1])])
def test_operator_computes_the_contract(name: str, past: list[int], tokens: list[int], dtype: str) -> None:
    shape = replace(SHAPES[name], dtype=dtype)
    step = draw_step(shape, past, tokens, seed=1, padding=1)
    found = run_paged_step(attributes_of(shape), step)
    exact = compute_paged_step(step)
    unit = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    for field in ("output", "key_cache", "value_cache"):
        mine, wanted = getattr(found, field), getattr(exact, field)
        assert largest(mine, wanted) <= 4 * unit * max(1.0, float(np.abs(wanted).max()))


@pytest.mark.parametrize("shares", [False, True])
def test_model_runs_on_the_cpu(shares: bool) -> None:
    shape = Shape(dtype="float16", rotary=16, window=20, metadata=True)
    model = emit_pages(model_of(shape), [site_of(shape)])
    step = draw_step(shape, [90, 3], [2, 9])
    made = session(model, library=True)
    feeds = feeds_of(shape, step)
    found = run_shared(made, feeds) if shares else made.run(None, feeds)
    exact = compute_paged_step(step)
    for mine, wanted in zip(found, (exact.output, exact.key_cache, exact.value_cache), strict=True):
        assert largest(mine, wanted) < 0.02


def run_with(shape: Shape, step: PagedStep, **changed: int | float | str) -> np.ndarray:
    return run_paged_step({**attributes_of(shape), **changed}, step).output


def test_declared_pattern() -> None:
    """A mask that the runtime's node cannot have: local keys, and every fourth block."""
    shape = Shape(D=32)
    step = draw_step(shape, [200, 40], [3, 50])
    mask = "k <= q and (q - k < 24 or k // 16 % 4 == h % 2)"
    found = run_with(shape, step, mask=mask)
    exact = compute_paged_step(step).output
    assert largest(found, exact) > 1e-2
    for b, before in enumerate(step.past):
        begin, end = step.cumulative[b : b + 2]
        rows = step.rows_of(b, int(before) + end - begin)
        after = compute_paged_step(step)
        key, value = (x.reshape(-1, shape.G, shape.D)[rows] for x in (after.key_cache, after.value_cache))
        for t in range(begin, end):
            q, k = int(before) + t - begin, np.arange(len(rows))
            for h in range(shape.H):
                allowed = (k <= q) & ((q - k < 24) | (k // 16 % 4 == h % 2))
                query = step.query[t].reshape(shape.H, shape.D)[h].astype(np.float64)
                scores = np.where(allowed, key[:, h // 2] @ query / np.sqrt(shape.D), -np.inf)
                weights = np.exp(scores - scores.max())
                wanted = weights @ value[:, h // 2] / weights.sum()
                assert largest(found[t].reshape(shape.H, shape.D)[h], wanted) < 3e-6


def test_table_of_a_mask_by_head() -> None:
    shape = Shape()
    step = draw_step(shape, [64], [4])
    reach = np.array([4, 8, 16, 68], np.int32)
    inputs = [
        step.query,
        step.key,
        step.value,
        step.key_cache,
        step.value_cache,
        step.cumulative,
        step.past,
        step.table,
    ]
    given = [*inputs, *[None] * 9, reach]
    outputs = [np.zeros_like(x) for x in (step.query, step.key_cache, step.value_cache)]
    attributes = {**attributes_of(shape), "mask": "q - k < table0[h]"}
    Op("StofPagedAttention", attributes).run(given, outputs)
    for h, window in enumerate(reach):
        wanted = compute_paged_step(replace(step, window=int(window))).output.reshape(4, shape.H, shape.D)[:, h]
        assert largest(outputs[0].reshape(4, shape.H, shape.D)[:, h], wanted) < 3e-6


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ("k <= q and b == 0", "the mask reads b"),
        ("k < S", "the mask reads S"),
        ("k < T", "the mask reads T"),
        ("pad[b, k]", "run-time operand"),
        ("k <", "mask"),
    ],
)
def test_masks_that_are_refused(mask: str, reason: str) -> None:
    shape = Shape()
    with pytest.raises(LibraryError, match=reason):
        run_with(shape, draw_step(shape, [3], [1]), mask=mask)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"kv_num_heads": 3}, "multiple of kv_num_heads"),
        ({"rotary_offset": 12}, "rotary_offset is 12"),
        ({"rotary_offset": -8}, "rotary_offset is -8"),
        ({"scale": float("inf")}, "scale is not finite"),
        ({"sliding_window_cache": 5}, "sliding_window_cache is given"),
        ({"do_rotary": 2}, "do_rotary is 2"),
    ],
)
def test_attributes_that_are_refused(changed: dict[str, int | float], reason: str) -> None:
    shape = Shape()
    with pytest.raises(LibraryError, match=reason):
        run_with(shape, draw_step(shape, [3], [1]), **changed)
