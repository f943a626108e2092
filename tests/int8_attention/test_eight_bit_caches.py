# SPDX-License-Identifier: Apache-2.0
"""--attention-precision for attention over KV caches: which operators get the attribute, and their errors in fp64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from eight_bit_caches import SHAPE, write_decoder, write_prompts
from gqa_models import Shape
from test_attention_precision import precisions_of, run, simulate_gains

from stof.arguments.precisions import INT8, INT8_FP8
from stof.attention.checks.eight_bit_model import SCORES_ALONE, KeyValueHead, Scheme
from stof.attention.decide.cost_cpu import mask_tile_density
from stof.cached_attention.checks.eight_bit_error import measure_eight_bits_of_step
from stof.cached_attention.checks.oracle import CacheStep
from stof.mask.expression import MaskExpression

LENGTH = 150


@pytest.mark.parametrize(("option", "attribute", "bound"), [("int8", "int8", 0.015), ("fp8", "int8_fp8", 0.045)])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_operators_get_the_attribute(
    dtype: str, option: str, attribute: str, bound: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes = (replace(SHAPE, dtype=dtype), replace(SHAPE, dtype=dtype, window=40, sink=True))
    model = write_decoder(tmp_path / "model.onnx", *shapes)
    status, target, report = run(tmp_path, model, option, *write_prompts(tmp_path / "prompts.npy", LENGTH))
    assert status == 0
    assert precisions_of(target) == [attribute, attribute]
    found = report["attention_precision"]
    assert found["measured_rows"] == found["all_rows"] == 2 * 4 * LENGTH
    for row in found["layers"]:
        assert row["op"] == "StofCachedAttention"
        assert bound / 10 < row["relative_rms"] < bound
        assert row["length"] == LENGTH
        assert 0 < row["predicted_gain"] < 1
    text = capsys.readouterr().out
    assert "in steps of more than 16 tokens; others stay in full precision" in text
    onnx.checker.check_model(onnx.load(target))


REASONS = [
    (replace(SHAPE, dtype="float32"), "its inputs are fp32, expected fp16 or bf16"),
    (replace(SHAPE, D=32, rotary=32), "its head size is 32 / 32, expected 64 or 128, the same of queries and values"),
    (replace(SHAPE, softcap=30.0), "its scores have a softcap (30)"),
    (replace(SHAPE, cache="int8"), "its cache is quantized (int8), expected one of the type of its inputs"),
    (replace(SHAPE, bias=(1, 1)), "its scores have terms besides products of queries and keys (attention_bias)"),
]


@pytest.mark.parametrize(("shape", "reason"), REASONS)
def test_caches_that_kernels_do_not_take(shape: Shape, reason: str, tmp_path: Path) -> None:
    status, target, report = run(tmp_path, write_decoder(tmp_path / "model.onnx", shape), "int8")
    assert status == 0
    (row,) = report["attention_precision"]["layers"]
    assert row["op"] == "StofCachedAttention"
    assert row["reason"] == reason
    assert precisions_of(target) == [""]


def test_few_tokens_have_no_error(tmp_path: Path) -> None:
    """Decode kernels compute them: what a few tokens of a prompt lose says nothing."""
    model = write_decoder(tmp_path / "model.onnx", SHAPE)
    status, target, report = run(tmp_path, model, "int8", *write_prompts(tmp_path / "prompts.npy", 16))
    assert status == 0
    assert precisions_of(target) == ["int8"]
    assert report["attention_precision"]["layers"][0]["relative_rms"] is None
    assert any(
        "every step over its cache had 16 queries or fewer; give longer prompts" in words
        for words in report["attention_precision"]["warnings"]
    )


def test_auto_takes_what_gains_within_its_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_decoder(tmp_path / "model.onnx", SHAPE)
    prompts = write_prompts(tmp_path / "prompts.npy", LENGTH)
    status, target, report = run(tmp_path, model, "auto", *prompts)
    assert status == 0
    assert precisions_of(target) == [""]
    assert f"no gain is estimated at {LENGTH} keys" in report["attention_precision"]["layers"][0]["reason"]
    simulate_gains(monkeypatch, 1.2, 1.4)
    assert precisions_of(run(tmp_path, model, "auto", *prompts)[1]) == ["int8_fp8"]
    sharp = write_decoder(tmp_path / "sharp.onnx", SHAPE, gain=6.0)
    _, target, report = run(tmp_path, sharp, "auto", *prompts, "--max-error", "1e-9")
    assert precisions_of(target) == [""]
    assert "its relative RMS error is" in report["attention_precision"]["layers"][0]["reason"]


def test_the_loss_on_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of prompts alone: decode steps compute in full precision. The gate holds it."""
    model = write_decoder(tmp_path / "model.onnx", SHAPE)
    prompts = write_prompts(tmp_path / "prompts.npy", LENGTH)
    losses = []
    for option in ("int8", "fp8"):
        status, _, report = run(tmp_path, model, option, *prompts)
        assert status == 0
        found = report["attention_precision"]
        losses.append(found["loss"]["kl"])
        assert found["decode_loss"]["kl"] < 1e-10
    assert 1e-8 < 3 * losses[0] < losses[1] < 0.1
    status, target, _ = run(tmp_path, model, "fp8", *prompts, "--max-kl", "1e-9")
    assert status == 2
    assert not target.exists()
    assert "--attention-precision fp8 changes outputs too much: KL divergence" in capsys.readouterr().err


def test_a_loss_that_no_model_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sliding-window caches: the report says so, and a gate that the user asks for is refused."""
    model = write_decoder(tmp_path / "model.onnx", replace(SHAPE, window=32, sliding=True))
    prompts = write_prompts(tmp_path / "prompts.npy", 60)
    status, target, report = run(tmp_path, model, "int8", *prompts)
    assert status == 0
    assert precisions_of(target) == ["int8"]
    assert report["attention_precision"]["loss"] is None
    assert "keeps a window of its cache, and no model rounds it to 8 bits" in capsys.readouterr().out
    status, target, _ = run(tmp_path, model, "int8", *prompts, "--max-kl", "0.5")
    assert status == 2
    assert not target.exists()


def test_a_plan_is_replayed(tmp_path: Path) -> None:
    model, plan = write_decoder(tmp_path / "model.onnx", SHAPE, SHAPE), tmp_path / "plan.json"
    assert run(tmp_path, model, "int8", "--save-plan", str(plan))[0] == 0
    status, target, _ = run(tmp_path, model, "int8", "--plan", str(plan))
    assert status == 0
    assert precisions_of(target) == ["int8", "int8"]


def draw_step(lengths: list[int], queries: int, past: int, **given: object) -> CacheStep:
    """A step of 4 heads on 2 in fp16 behind pasts of different lengths; rows without a key hold NaN."""
    rng = np.random.default_rng(3)
    batch, heads, groups, size = len(lengths), 4, 2, 64

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float16)

    caches = [draw(batch, groups, past + 5, size) for _ in range(2)] if past else [None, None]
    total = queries if not past else max(lengths)
    for b, length in enumerate(lengths):
        for cache in caches:
            if cache is not None:
                cache[b, :, length - queries :] = np.nan
    return CacheStep(
        num_heads=heads,
        kv_num_heads=groups,
        query=draw(batch, queries, heads * size),
        key=draw(batch, queries, groups * size) + np.float16(3),
        value=draw(batch, queries, groups * size),
        past_key=caches[0],
        past_value=caches[1],
        lengths=np.array(lengths),
        total=total,
        **given,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("lengths", "queries", "past", "given"),
    [
        ([150, 150], 150, 0, {}),
        ([150, 31, 90], 150, 0, {"window": 40}),
        ([170, 333, 64], 64, 300, {}),
        ([170, 333], 64, 300, {"window": 100, "sink": np.array([0.5, -1.0, 2.0, 0.0], np.float16)}),
    ],
)
def test_errors_of_steps(lengths: list[int], queries: int, past: int, given: dict[str, object]) -> None:
    """Those of attention row by row in fp64: each sequence has its own keys, their mean and their tiles."""
    step = draw_step(lengths, queries, past, **given)
    found = measure_eight_bits_of_step(step, (INT8, INT8_FP8))
    window, sink = int(str(given.get("window", 0))), given.get("sink")
    squares, wanted, rows = {"int8": 0.0, "int8_fp8": 0.0}, 0.0, 0
    schemes = {"int8": replace(SCORES_ALONE, weight_type=np.dtype(np.float16)), "int8_fp8": Scheme()}
    assert step.key is not None
    assert step.value is not None
    for b, length in enumerate(lengths):
        before = length - queries if past else 0
        tokens = min(queries, length - before)
        for h in range(4):
            g, keys, values = h // 2, np.zeros((length, 64)), np.zeros((length, 64))
            for array, cache, new in ((keys, step.past_key, step.key), (values, step.past_value, step.value)):
                if cache is not None:
                    array[:before] = cache[b, g, :before]
                array[before:] = new[b, :tokens, 64 * g : 64 * g + 64]
            heads = {name: KeyValueHead.of(keys, values, scheme) for name, scheme in schemes.items()}
            for i in range(tokens):
                q = step.query[b, i, 64 * h : 64 * h + 64].astype(np.float64)
                allowed = np.arange(length) <= before + i
                allowed &= (np.arange(length) > before + i - window) if window else True
                logit = None if not isinstance(sink, np.ndarray) else float(sink[h])
                scores = np.where(allowed, keys @ q / 8, -np.inf)
                top = max(scores.max(), -np.inf if logit is None else logit)
                weights = np.exp(scores - top)
                exact = weights @ values / (weights.sum() + (0.0 if logit is None else np.exp(logit - top)))
                wanted += float(np.square(exact).sum())
                rows += 1
                for name, head in heads.items():
                    output = head.attend(q[None], None, allowed[None], logit)[0].astype(np.float16).astype(np.float64)
                    squares[name] += float(np.square(output - exact).sum())
    assert found.rows == found.all_rows == rows
    assert found.sizes == (len(lengths), 4, 2, queries, max(lengths), 64)
    for name, error in found.relative_rms.items():
        # Another order of sums takes a few numbers to the other side of a rounding.
        assert error == pytest.approx(np.sqrt(squares[name] / wanted), rel=1e-4)
    assert 0 < found.relative_rms["int8"] < 0.015
    assert found.relative_rms["int8"] < found.relative_rms["int8_fp8"] < 0.045


@pytest.mark.parametrize(("text", "length", "queries"), [("k <= q", 1024, 256), ("k <= q and q - k < 200", 900, 300)])
def test_the_density_of_the_last_queries(text: str, length: int, queries: int) -> None:
    """Against the mask itself, tile by tile."""
    first = length - queries
    q, k = np.arange(length)[:, None], np.arange(length)[None]
    allowed = (k <= q) & ((q - k < 200) | ("200" not in text))
    tiles = [
        allowed[i : i + 128, j : j + 128].any()
        for i in range(first // 128 * 128, length, 128)
        for j in range(0, length, 128)
    ]
    found = mask_tile_density(MaskExpression.parse(text), {}, 4, length, (128, 128), first)
    assert found == pytest.approx(np.mean(tiles))
