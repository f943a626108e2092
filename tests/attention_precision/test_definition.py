# SPDX-License-Identifier: Apache-2.0
"""The definition with operands rounded to bf16 that nodes with --allow-bf16 are held to: against loops, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import precision_runs  # noqa: F401  (finds the folders of the models below)

# isort: split
import gqa_models
import numpy as np
import paged_models
import pytest
from onnx import TensorProto, helper

# isort: split
from stof.arguments.precisions import BF16, precision_of
from stof.attention.checks.site_comparison import compare_result, site_exactly
from stof.cached_attention.checks import site_checks
from stof.cached_attention.checks.oracle import CacheStep, CacheStepResult, compute_step
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.find import find_candidates
from stof.cached_attention.paged import checks as paged_checks
from stof.cached_attention.paged.emit import emit_pages
from stof.cached_attention.paged.oracle import PagedStep, PagedStepResult, compute_paged_step
from stof.graph.node_fields import plain_attributes_of
from stof.mask.site import AttentionSite, Layout, MaskTerm, Operand, TermKind
from stof.symbolic import Symbolic
from stof.verification.array_distance import relative_rms
from stof.verification.result import Comparison

H, G, S, T, D = 4, 2, 24, 40, 16
SCALE = 0.7  # sharp: scores differ by some units, so that rounding shows


def round_by_hand(x: float) -> float:
    """To 8 significant bits, ties to even: bf16 for numbers in its range."""
    if x == 0 or not math.isfinite(x):
        return x
    unit = 2.0 ** (math.frexp(x)[1] - 8)
    return round(x / unit) * unit


def attention_site(dtype: int = TensorProto.FLOAT) -> AttentionSite:
    operands = [Operand(n, Layout.BHSD) for n in "qkv"]
    return AttentionSite(
        name="s", index=0, softmax="softmax", query=operands[0], key=operands[1], value=operands[2], output="y",
        output_layout=Layout.BHSD, num_heads=H, kv_num_heads=G, head_size=D, value_head_size=D, scale=SCALE, dtype=dtype,
        terms=(MaskTerm(TermKind.ADD, "mask"),),
    )  # fmt: skip


def draw(seed: int = 0, sharpness: float = 1.0) -> dict[str, np.ndarray]:
    """Tensors of the site; ``sharpness`` multiplies scores."""
    rng = np.random.default_rng(seed)
    sizes = {"q": (2, H, S, D), "k": (2, G, T, D), "v": (2, G, T, D)}
    arrays = {n: rng.standard_normal(size).astype(np.float32) for n, size in sizes.items()}
    arrays["q"] *= np.float32(sharpness)
    allowed = np.arange(T)[None] <= np.arange(S)[:, None] + (T - S)
    arrays["mask"] = np.where(allowed, np.float32(0), np.float32(-np.inf))[None, None]
    arrays["y"] = site_exactly(attention_site(), {**arrays, "y": np.zeros((2, H, S, D))}).output.astype(np.float32)
    return arrays


def kernel(arrays: dict[str, np.ndarray], tile: int = 16) -> np.ndarray:
    """What a kernel computes, tile by tile: weights are relative to the largest score so far, and sums are rescaled."""
    q, k, v = (BF16.round(arrays[n]).astype(np.float64) for n in "qkv")
    output = np.zeros(arrays["y"].shape)
    for b in range(2):
        for h in range(H):
            scores = q[b, h] @ k[b, h // 2].T * SCALE + arrays["mask"][0, 0]
            top, total, summed = np.full((S, 1), -1e30), np.zeros((S, 1)), np.zeros((S, D))
            for begin in range(0, T, tile):
                part = scores[:, begin : begin + tile]
                raised = np.maximum(top, part.max(-1, keepdims=True))
                weights = np.exp(part - raised)
                total = total * np.exp(top - raised) + weights.sum(-1, keepdims=True)
                summed = summed * np.exp(top - raised) + BF16.round(weights) @ v[b, h // 2, begin : begin + tile]
                top = raised
            output[b, h] = summed / total
    return output.astype(np.float32)


def test_rounding() -> None:
    """Ties to even, both signs, both ends of the range; NaN and infinity stay."""
    rng = np.random.default_rng(0)
    numbers = np.concatenate(
        [
            rng.standard_normal(500) * 10.0 ** rng.integers(-20, 20, 500),
            [1 + 2.0**-8, 1 + 3 * 2.0**-8, -(1 + 2.0**-8), 0.0],
        ]
    ).astype(np.float32)
    np.testing.assert_array_equal(BF16.round(numbers), [np.float32(round_by_hand(float(x))) for x in numbers])
    assert np.isnan(BF16.round(np.array([np.nan]))).all()
    assert BF16.round(np.array([np.inf, -np.inf], np.float32)).tolist() == [np.inf, -np.inf]
    assert BF16.round(np.array([3.4e38, -3.4e38], np.float32)).tolist() == [np.inf, -np.inf]
    # Kernels take subnormal numbers as 0. The definition rounds them: the difference is below every check's slack.
    subnormal = np.float32(1e-39)
    assert abs(float(BF16.round(np.array([subnormal]))[0]) - float(subnormal)) <= 2.0**-134


def test_the_definition_against_loops() -> None:
    arrays = draw()
    found = site_exactly(attention_site(), arrays, precision=BF16).output
    for b, h, s in ((0, 0, 0), (1, 3, 5), (1, 1, S - 1)):
        g, keys = h // 2, s + T - S + 1
        q = [round_by_hand(float(x)) for x in arrays["q"][b, h, s]]
        scores = [
            SCALE * sum(x * round_by_hand(float(y)) for x, y in zip(q, arrays["k"][b, g, t], strict=True))
            for t in range(keys)
        ]
        weights = [math.exp(x - max(scores)) for x in scores]
        for d in (0, D - 1):
            wanted = sum(
                round_by_hand(w) * round_by_hand(float(arrays["v"][b, g, t, d])) for t, w in enumerate(weights)
            )
            assert found[b, h, s, d] == pytest.approx(wanted / sum(weights), rel=1e-12)


def compared(mine: np.ndarray, arrays: dict[str, np.ndarray], *, allowed: bool = True) -> Comparison:
    precision = BF16 if allowed else None
    return compare_result(attention_site(), mine, arrays, arrays["y"], False, has_all_policy=False, precision=precision)


@pytest.mark.parametrize("seed", range(4))
def test_a_kernel_that_rounds_is_right_where_it_may(seed: int) -> None:
    """And its relative RMS error is that against fp64 without rounding."""
    arrays = draw(seed)
    mine = kernel(arrays)
    found = compared(mine, arrays)
    assert found.ok, found.message()
    exact = site_exactly(attention_site(), arrays).output
    assert found.relative_rms == pytest.approx(np.sqrt(((mine - exact) ** 2).mean() / (exact**2).mean()), rel=1e-9)
    assert 1e-3 < found.relative_rms < 2e-2
    assert not compared(mine, arrays, allowed=False).ok


def test_full_precision_is_right_too() -> None:
    """Of a machine without the instructions, or few queries: farther from the rounded definition than its kernels may be."""
    arrays = draw(sharpness=16.0)
    rounded = site_exactly(attention_site(), arrays, precision=BF16).output
    assert np.abs(rounded - arrays["y"]).max() > 4 * BF16.slack * np.abs(arrays["v"]).max()
    found = compared(arrays["y"], arrays)
    assert found.ok
    assert found.relative_rms is not None
    assert found.relative_rms < 1e-6


@pytest.mark.parametrize(
    "fault",
    [
        lambda y, a: y[0, 0].__setitem__((3, 2), y[0, 0, 3, 2] + 0.05),
        lambda y, a: y[1, 2].__setitem__(7, 0.0),
        lambda y, a: y[1].__setitem__((0, 0, 0), np.nan),
        lambda y, a: y.__imul__(1.03),
    ],
    ids=["an element", "a row", "NaN", "the sum of rounded weights and more"],
)
def test_faults_are_seen(fault: Any) -> None:
    arrays = draw()
    mine = kernel(arrays)
    fault(mine, arrays)
    assert not compared(mine, arrays).ok


def cache_site(shape: gqa_models.Shape) -> tuple[Any, dict[str, Any]]:
    model = gqa_models.model_of(shape)
    (candidate,) = find_candidates(model, Symbolic(model), "cpu")
    (node,) = [n for n in emit_caches(model, [candidate.site]).graph.node if n.domain == "stof"]
    return candidate.site, plain_attributes_of(node)


@pytest.mark.parametrize(
    "shape",
    [
        gqa_models.Shape(scale=0.9),
        gqa_models.Shape(H=6, D=32, packed=True, rotary=16, sink=True, window=7, norms=True, scale=0.9),
        gqa_models.Shape(dtype="float16", rotary=16, scale=0.9),
        gqa_models.Shape(cache="int8", rotary=16, channels=(True, True), scale=0.9),
    ],
    ids=["plain", "everything", "fp16", "int8"],
)
def test_steps_over_caches(shape: gqa_models.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the operator computes the definition, in the site's own type."""
    site, attributes = cache_site(shape)
    step = gqa_models.draw_step(shape, [9, 4, 1], 9, 12)
    original = compute_step(step).output.astype(step.query.dtype)
    shift = [0.0]

    def run(given: Any, one: CacheStep) -> CacheStepResult:
        dtype = one.query.dtype
        exact = compute_step(one, np.float32, dtype)
        rounded = compute_step(replace(one, precision=BF16), np.float32, dtype)
        caches = [np.nan_to_num(x).astype(one.past_key.dtype) for x in (exact.key, exact.value)]  # type: ignore[union-attr]
        return CacheStepResult((rounded.output + shift[0]).astype(dtype), caches[0], caches[1])

    monkeypatch.setattr(site_checks, "run_step", run)
    allowed = site_checks.compare_cache_site(site, attributes | {BF16.attribute: 1}, step, original)
    assert allowed.ok, allowed.message()
    assert allowed.relative_rms is not None
    assert 5e-4 < allowed.relative_rms < 3e-2
    assert not site_checks.compare_cache_site(site, attributes, step, original).ok
    shift[0] = 0.2
    assert not site_checks.compare_cache_site(site, attributes | {BF16.attribute: 1}, step, original).ok


def test_steps_over_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = paged_models.Shape(scale=0.9, rotary=16)
    model = paged_models.model_of(shape)
    (candidate,) = find_candidates(model, Symbolic(model), "cpu")
    (node,) = emit_pages(model, [candidate.site]).graph.node  # type: ignore[list-item]
    step = paged_models.draw_step(shape, [20, 0], [3, 17])

    def run(given: Any, one: PagedStep) -> PagedStepResult:
        exact = compute_paged_step(one, np.float32)
        return replace(exact, output=compute_paged_step(replace(one, precision=BF16), np.float32).output)

    monkeypatch.setattr(paged_checks, "run_paged_step", run)
    attributes = plain_attributes_of(node)
    found = paged_checks.compare_paged_site(candidate.site, attributes | {BF16.attribute: 1}, step, None)  # type: ignore[arg-type]
    assert found.ok, found.message()
    assert found.relative_rms is not None
    assert 5e-4 < found.relative_rms < 3e-2
    assert not paged_checks.compare_paged_site(candidate.site, attributes, step, None).ok  # type: ignore[arg-type]


def test_which_precision_a_node_allows() -> None:
    assert precision_of({"allow_bf16": 1, "scale": 2.0}) is BF16
    assert precision_of({"allow_bf16": 0}) is None
    assert precision_of({}) is None
    node = helper.make_node("StofAttention", ["q"], ["y"], domain="stof", allow_bf16=1)
    assert precision_of(plain_attributes_of(node)) is BF16


def test_relative_rms() -> None:
    exact = np.array([3.0, 4.0])
    assert relative_rms(np.array([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert relative_rms(np.array([np.nan, 4.5]), exact) == pytest.approx(0.125)
    assert relative_rms(np.array([9.0, 4.5]), exact, np.array([False, True])) == pytest.approx(0.125)
    assert relative_rms(np.zeros(2), np.zeros(2)) is None
