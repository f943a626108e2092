# SPDX-License-Identifier: Apache-2.0
"""Caches of int8 and fp8: the operator against fp64 NumPy and against ONNX Runtime's CPU kernel, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gqa_models import Shape, draw_step, feeds_of, model_of, run_shared, session
from onnx import TensorProto, helper

from stof.cached_attention.checks.oracle import CacheStep, compute_step
from stof.cached_attention.checks.quantized import count_steps, dequantize, quantize
from stof.cached_attention.checks.site_checks import run_step
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.find import find_candidates
from stof.cached_attention.site import OP
from stof.runtime.library import LibraryError, Op
from stof.symbolic import Symbolic

FP8 = np.dtype(helper.tensor_dtype_to_np_dtype(TensorProto.FLOAT8E4M3FN))
TOLERANCE = {"float32": 2e-5, "float16": 3e-3, "bfloat16": 3e-2}


def attributes_of(shape: Shape, mask: str = "") -> dict[str, Any]:
    return {
        "num_heads": shape.H,
        "kv_num_heads": shape.G,
        "mask": mask or (f"k <= q and q - k < {shape.window}" if shape.window else "k <= q"),
        "scale": shape.scale,
        "softcap": shape.softcap,
        "do_rotary": int(shape.rotary > 0),
        "rotary_interleaved": int(shape.interleaved),
        "sliding_window_cache": shape.window if shape.sliding else 0,
    }


def check(shape: Shape, step: CacheStep, mask: str = "") -> None:
    """Caches differ by one step of the quantizer at most, and outputs are those of the caches."""
    found = run_step(attributes_of(shape, mask), step)
    exact = compute_step(step, held=(found.key, found.value))
    held = np.arange(step.capacity)[None] < step.rows[:, None]
    for mine, wanted in ((found.key, exact.key), (found.value, exact.value)):
        steps = count_steps(mine.swapaxes(1, 2)[held], wanted.swapaxes(1, 2)[held])
        assert steps.max() <= 1
        assert np.count_nonzero(steps) <= 0.01 * steps.size
    away = np.abs(found.output.astype(np.float64) - exact.output)[~step.padded]
    assert away.max() <= TOLERANCE[shape.dtype] * np.abs(exact.output).max()


SHAPES = {
    "plain": Shape(),
    "per channel": Shape(channels=(True, True), rotary=16),
    "keys per channel": Shape(channels=(True, False), packed=True),
    "values per channel": Shape(channels=(False, True), H=8, D=64),
    "fp16": Shape(dtype="float16", channels=(True, True), rotary=16),
    "bf16": Shape(dtype="bfloat16", packed=True),
    "window": Shape(window=9, sink=True),
    "softcap": Shape(softcap=2.0, H=6, interleaved=True, rotary=8),
    "bias": Shape(bias=(1, 4), channels=(True, True)),
    "odd head": Shape(D=20, G=1, channels=(True, True)),
    "wide head": Shape(D=256, H=2, G=1),
    "norms": Shape(norms=True, rotary=16, channels=(True, True)),
}
# Valid keys of each sequence after the step, and its new tokens.
STEPS = {"one": ([70, 9, 41], 1), "three": ([66, 5], 3), "16": ([300, 17], 16), "prompt": ([20, 3, 11], 20)}


@pytest.mark.parametrize("cache", ["int8", "float8"])
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("name", SHAPES)
def test_against_fp64(name: str, steps: str, cache: str) -> None:
    shape = replace(SHAPES[name], cache=cache)
    lengths, queries = STEPS[steps]
    check(shape, draw_step(shape, lengths, queries, max(lengths) + 5))


@pytest.mark.parametrize("cache", ["int8", "float8"])
@pytest.mark.parametrize("past", [0, 100])
def test_long_prompts(cache: str, past: int) -> None:
    """The tiled kernel, with keys packed for each worker and for all."""
    shape = Shape(cache=cache, channels=(True, True), D=32)
    check(shape, draw_step(shape, [300 + past, 290 + past], 300, 300 + past))


@pytest.mark.parametrize("queries", [1, 5, 9])
@pytest.mark.parametrize("cache", ["int8", "float8"])
def test_sliding_window_caches(cache: str, queries: int) -> None:
    """Steps that drop rows, some of which their first tokens attend: these are staged in the cache's type."""
    shape = Shape(cache=cache, channels=(True, False), window=6, sliding=True, rotary=16)
    for total in (6 + queries, 23):
        check(shape, draw_step(shape, [total], queries, 8))


PATTERNS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "q - k < 4 or k % 3 == 0": lambda h, q, k: (q - k < 4) | (k % 3 == 0) | (h < 0),
    "k <= q and k % 4 >= h": lambda h, q, k: (k <= q) & (k % 4 >= h),
}


@pytest.mark.parametrize("mask", PATTERNS)
def test_patterns(mask: str) -> None:
    """Masks of their own for each head: the operator's pairs are those of a bias of -inf."""
    shape = Shape(cache="int8", channels=(True, True))
    queries = 2
    step = draw_step(shape, [150, 40], queries, 160)
    found = run_step(attributes_of(shape, mask), step)
    q = step.before[:, None, None, None] + np.arange(queries)[None, None, :, None]
    allowed = PATTERNS[mask](np.arange(4)[None, :, None, None], q, np.arange(step.total))
    biased = replace(step, bias=np.where(allowed, 0, -np.inf).astype(np.float32))
    exact = compute_step(biased, held=(found.key, found.value))
    assert np.abs(found.output - exact.output).max() <= 2e-5


ORIGINALS = {
    "plain": Shape(cache="int8"),
    "channels": Shape(cache="int8", channels=(True, True), rotary=16, packed=True),
    "fp16": Shape(cache="int8", channels=(True, True), dtype="float16", rotary=16),
    "window, sink": Shape(cache="int8", window=5, sink=True, softcap=3.0),
    "sliding": Shape(cache="int8", window=6, sliding=True, channels=(True, True), rotary=16, D=32),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", ORIGINALS)
def test_against_onnxruntime(name: str, shared: bool) -> None:
    """Steps of its GroupQueryAttention beside those of the operator, through the runtime: caches and outputs."""
    shape = ORIGINALS[name]
    model = model_of(shape)
    (candidate,) = find_candidates(model, Symbolic(model), "cpu")
    assert candidate.site is not None, candidate.reason
    emitted = emit_caches(model, [candidate.site])
    original, own = session(model, library=False), session(emitted, library=True)
    for lengths, queries in (([20], 7), ([9, 31], 1), ([12, 12], 12)):
        step = draw_step(shape, lengths, queries, 8 if shape.sliding else max(lengths) + 2, seed=len(lengths))
        feeds = feeds_of(shape, step)
        wanted = original.run(None, feeds)
        found = run_shared(own, feeds) if shared else own.run(None, feeds)
        held = np.arange(step.capacity)[None] < step.rows[:, None]
        for mine, theirs in zip(found[1:], wanted[1:], strict=True):
            steps = count_steps(mine.swapaxes(1, 2)[held], theirs.swapaxes(1, 2)[held])
            assert steps.max() <= 1
            assert np.count_nonzero(steps) <= 0.01 * steps.size
            assert shape.rotary or not steps.any()
        limit = 4 * TOLERANCE[shape.dtype] * np.abs(wanted[0]).max()
        assert np.abs(found[0].astype(np.float64) - wanted[0])[~step.padded].max() <= limit


def test_the_function_body_is_the_original() -> None:
    """Without the library the model runs the node that was replaced."""
    shape = ORIGINALS["channels"]
    model = model_of(shape, replace(shape, window=7))
    sites = [c.site for c in find_candidates(model, Symbolic(model), "cpu")]
    emitted = emit_caches(model, [s for s in sites if s is not None])
    step = draw_step(shape, [9, 31], 1, 33)
    feeds = {k: v for i in range(2) for k, v in feeds_of(shape, step, f"layer{i}/").items()}
    for mine, theirs in zip(
        session(emitted, library=False).run(None, feeds), session(model, library=False).run(None, feeds), strict=True
    ):
        assert mine.dtype == theirs.dtype
        assert np.array_equal(mine, theirs)


NUMBERS = np.array(
    [0.25, 0.75, -0.25, -0.75, 1.25, 1000, -1000, 63.6, 63.75, -64.2, -64.25, np.nan, np.inf, -np.inf, 1e-30, 0.0],
    np.float32,
)
INT8 = [0, 2, 0, -2, 2, 127, -128, 127, 127, -128, -128, 127, 127, -128, 0, 0]


def appended(cache: str, scale: float, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What the cache holds of one value, and the output of the step that appends it."""
    shape = Shape(H=1, G=1, D=16, cache=cache)
    step = draw_step(shape, [1], 1, 4)
    scales = np.full(1, scale, np.float32)
    step = replace(step, value=numbers.reshape(1, 1, -1), key_scale=scales, value_scale=scales)
    found = run_step(attributes_of(shape), step)
    return found.value[0, 0, 0], found.output[0, 0]


def test_rounding_to_int8() -> None:
    """Ties to even, saturation, NaN as 127: what ONNX Runtime 1.31 stores, too."""
    assert list(appended("int8", 0.5, NUMBERS)[0]) == INT8
    assert list(quantize(NUMBERS, np.float32(0.5), np.dtype(np.int8))) == INT8  # type: ignore[arg-type]


def test_rounding_to_fp8() -> None:
    """Every fp8 value, the middles between neighbours, and what lies beside them."""
    values = np.arange(0, 0x7F, dtype=np.uint8).view(FP8).astype(np.float32)
    middles = (values[1:] + values[:-1]) / 2
    numbers = np.concatenate([values, middles, np.nextafter(middles, 0), np.nextafter(middles, 1e9), [1e9, np.inf]])
    numbers = np.concatenate([numbers, -numbers, np.zeros(-2 * len(numbers) % 16)]).astype(np.float32)
    for row in numbers.reshape(-1, 16):
        wanted = np.clip(row, -448, 448).astype(FP8)
        assert np.array_equal(appended("float8", 1.0, row)[0].view(np.uint8), wanted.view(np.uint8))
    nan = np.full(16, np.nan, np.float32)
    stored, output = appended("float8", 1.0, nan)
    assert np.isnan(stored.astype(np.float32)).all()
    assert np.isnan(output).all()


def test_every_fp8_value_is_read() -> None:
    """One key: the output is its value."""
    values = np.arange(256, dtype=np.uint8).view(FP8)
    for row in values.reshape(-1, 16):
        stored, output = appended("float8", 1.0, row.astype(np.float32))
        assert np.array_equal(stored.astype(np.float32), row.astype(np.float32), equal_nan=True)
        assert np.array_equal(output, row.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize(
    ("scale", "stored", "read"),
    [
        (0.0, [1, -3, 127], [0.0, 0.0, 0.0]),
        (-0.5, [-2, 6, -128], [1.0, -3.0, 64.0]),
        (np.nan, [127, 127, 127], [np.nan] * 3),
        (np.inf, [0, 0, 0], [np.nan] * 3),
    ],
)
def test_hostile_scales(scale: float, stored: list[int], read: list[float]) -> None:
    """What is stored is what ONNX Runtime 1.31 stores; nothing crashes, and what cannot be read is NaN."""
    numbers = np.resize(np.array([0.75, -3.2, 700], np.float32), 16)
    cache, output = appended("int8", scale, numbers)
    assert list(cache[:3]) == stored
    assert np.array_equal(output[:3], np.array(read, np.float32), equal_nan=True)


def test_rows_behind_the_keys_may_hold_anything() -> None:
    shape = Shape(cache="float8")
    step = draw_step(shape, [20, 9], 1, 64)
    assert step.past_key is not None
    assert step.past_value is not None
    for b, length in enumerate(step.lengths):
        for past in (step.past_key, step.past_value):
            past[b, :, length:] = np.nan
    check(shape, step)


def run_raw(
    past: Any, k_scale: np.ndarray | None, v_scale: np.ndarray | None, present: Any = None, query: Any = np.float32
) -> None:
    """A step with caches and scales of any type and shape: H 4 on G 2, D 16."""
    x = np.zeros((1, 1, 64), query)
    inputs = [x, x[..., :32].copy(), x[..., :32].copy(), past, past, np.zeros(1, np.int32), np.array(1, np.int32)]
    inputs += [None] * 5 + [k_scale, v_scale]
    cache = np.zeros((1, 2, 4, 16), np.int8 if present is None else present)
    Op(OP, {"num_heads": 4, "kv_num_heads": 2, "mask": "k <= q"}).run(inputs, [x.copy(), cache, cache.copy()])


INT8_CACHE = np.zeros((1, 2, 4, 16), np.int8)
ONE = np.ones(1, np.float32)
ERRORS: dict[str, tuple[tuple[Any, ...], str]] = {
    "no k_scale": ((INT8_CACHE, None, ONE), "k_scale is missing, expected it beside caches of data type 3"),
    "no v_scale": ((INT8_CACHE, ONE, None), "v_scale is missing"),
    "a scale of a head": ((INT8_CACHE, np.ones(16, np.float32), ONE), r"k_scale has shape \[16\]"),
    "a scale a head": ((INT8_CACHE, ONE, np.ones((1, 2, 1, 1), np.float32)), r"v_scale has shape \[1, 2, 1, 1\]"),
    "transposed": (
        (INT8_CACHE, np.ones((16, 2), np.float32), ONE),
        r"expected fp32 and one element, or \[1, 2, 1, 16\]",
    ),
    "many axes": ((INT8_CACHE, np.ones((1,) * 5, np.float32), ONE), r"k_scale has shape \[1, 1, 1, 1, 1\]"),
    "no element": ((INT8_CACHE, np.ones(0, np.float32), ONE), r"k_scale has shape \[0\]"),
    "fp16 scales": ((INT8_CACHE, ONE.astype(np.float16), ONE), "k_scale has shape .* and data type 10"),
    "scales of plain caches": (
        (np.zeros((1, 2, 4, 16), np.float32), ONE, ONE, np.float32),
        "k_scale is given, expected none: the caches have the type of query",
    ),
    "uint8 caches": ((INT8_CACHE.astype(np.uint8), ONE, ONE, np.uint8), "data type 1, int8 or fp8 e4m3fn"),
    "no past": ((None, ONE, ONE, np.float32), "k_scale is given, expected none"),
    "another present": ((INT8_CACHE, ONE, ONE, np.float32), "present_key has"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    arguments, words = ERRORS[name]
    with pytest.raises(LibraryError, match=words):
        run_raw(*arguments)


@pytest.mark.parametrize("shape", [(1,), (), (1, 1, 1, 1), (32,), (2, 16), (2, 1, 16), (1, 2, 1, 16)])
def test_shapes_of_scales(shape: tuple[int, ...]) -> None:
    scale = np.ones(shape, np.float32)
    run_raw(INT8_CACHE, scale, ONE)
    run_raw(INT8_CACHE.astype(FP8), ONE, scale, FP8)
    run_raw(INT8_CACHE, scale, scale, query=np.float16)


def test_types_that_nodes_are_registered_for() -> None:
    """The runtime picks the kernel by query and past; the outputs have the cache's type, also without value_info."""
    for cache in ("int8", "float8"):
        for dtype in ("float32", "float16"):
            shape = Shape(cache=cache, dtype=dtype)
            model = model_of(shape)
            (candidate,) = find_candidates(model, Symbolic(model), "cpu")
            assert candidate.site is not None
            emitted = emit_caches(model, [candidate.site])
            del emitted.graph.value_info[:]
            made = session(emitted, library=True)
            stored = {"int8": "tensor(int8)", "float8": "tensor(float8e4m3fn)"}[cache]
            assert [o.type for o in made.get_outputs()][1:] == [stored] * 2


def test_dequantized_numbers() -> None:
    """The oracle's own arithmetic: what is stored times its scale."""
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((2, 5, 8)), rng.uniform(0.01, 0.05, (2, 1, 8)).astype(np.float32)
    read = dequantize(quantize(x, scale, np.dtype(np.int8)), scale, np.float64)
    assert (np.abs(read - np.clip(x, -128 * scale, 127 * scale)) <= scale / 2 * (1 + 1e-6)).all()
