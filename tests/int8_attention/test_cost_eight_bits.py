# SPDX-License-Identifier: Apache-2.0
"""Estimates of attention with 8-bit operands: what quantization costs has to be paid back by key tiles that are read often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stof.arguments.precisions import INT8, INT8_FP8
from stof.attention.decide.cost_eight_bits import AttentionSizes, estimate_gain

LONG = AttentionSizes(batch=1, heads=32, kv_heads=32, queries=8192, keys=8192, head_size=128)


def test_long_dense_attention_gains() -> None:
    assert 1.0 < estimate_gain(LONG, INT8) < estimate_gain(LONG, INT8_FP8) < 1.6


@pytest.mark.parametrize("precision", [INT8, INT8_FP8])
def test_windows_and_short_sequences_lose(precision: object) -> None:
    assert estimate_gain(replace(LONG, density=0.03), precision) < 1.0  # type: ignore[arg-type]
    assert estimate_gain(replace(LONG, queries=256, keys=256), precision) < 1.0  # type: ignore[arg-type]


def test_shared_keys_are_quantized_once() -> None:
    assert estimate_gain(replace(LONG, kv_heads=4), INT8_FP8) > estimate_gain(LONG, INT8_FP8)


def test_longer_sequences_gain_more() -> None:
    gains = [estimate_gain(replace(LONG, queries=n, keys=n), INT8_FP8) for n in (1024, 4096, 16384, 65536)]
    assert gains == sorted(gains)
    assert gains[-1] < 868 / 735


@pytest.mark.parametrize("precision", [INT8, INT8_FP8])
def test_heads_of_64_elements_lose(precision: object) -> None:
    assert estimate_gain(replace(LONG, head_size=64, queries=32768, keys=32768), precision) < 1.0  # type: ignore[arg-type]


# H200, microseconds in bf16 and in int8_fp8 with quantization.
@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({}, 1477 / 1418),
        ({"queries": 32768, "keys": 32768, "density": 0.502}, 12403 / 10587),
        ({"queries": 32768, "keys": 32768, "density": 0.121}, 3109 / 2990),
        ({"head_size": 64, "heads": 16, "kv_heads": 16}, 486 / 563),
    ],
)
def test_estimates_are_near_measurements(changes: dict[str, float], measured: float) -> None:
    assert estimate_gain(replace(LONG, **changes), INT8_FP8) == pytest.approx(measured, rel=0.06)  # type: ignore[arg-type]
