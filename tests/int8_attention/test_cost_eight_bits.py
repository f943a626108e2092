# SPDX-License-Identifier: Apache-2.0
"""Estimates of attention with 8-bit operands: what quantization costs has to be paid back by key tiles that are read often."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stof.arguments.precisions import INT8, INT8_FP8
from stof.attention.decide.cost_eight_bits import _FULL, _INT8_FP8, AttentionSizes, estimate_gain

LONG = AttentionSizes(batch=1, heads=32, kv_heads=32, queries=8192, keys=8192, head_size=128)


def test_an_h200_at_its_power_limit_gains_nothing() -> None:
    for length in (8192, 131072):
        long = replace(LONG, queries=length, keys=length)
        assert 0.85 < estimate_gain(long, INT8_FP8) < estimate_gain(long, INT8) <= 1.0


@pytest.mark.parametrize("precision", [INT8, INT8_FP8])
def test_windows_and_short_sequences_lose(precision: object) -> None:
    assert estimate_gain(replace(LONG, density=0.03), precision) < 1.0  # type: ignore[arg-type]
    assert estimate_gain(replace(LONG, queries=256, keys=256), precision) < 1.0  # type: ignore[arg-type]


def test_shared_keys_are_quantized_once() -> None:
    assert estimate_gain(replace(LONG, kv_heads=4), INT8_FP8) > estimate_gain(LONG, INT8_FP8)


def test_longer_sequences_gain_more() -> None:
    gains = [estimate_gain(replace(LONG, queries=n, keys=n), INT8_FP8) for n in (1024, 4096, 16384, 65536)]
    assert gains == sorted(gains)
    assert gains[-1] < _INT8_FP8[128] / _FULL[128]


@pytest.mark.parametrize("precision", [INT8, INT8_FP8])
def test_heads_of_64_elements_lose(precision: object) -> None:
    assert estimate_gain(replace(LONG, head_size=64, queries=32768, keys=32768), precision) < 1.0  # type: ignore[arg-type]


# H200, D 128 and 64: microseconds in bf16, int8_fp8 and int8 with quantization, other kernels between the calls
# (docs/results/comparisons/attention-8-bit-h200.json). Short windows are estimated too slow.
_D64 = {"head_size": 64, "heads": 16, "kv_heads": 16}
_LONG = {"queries": 32768, "keys": 32768}
MEASURED = [
    ({}, (1437, 1594, 1427), 0.08),
    ({"kv_heads": 8}, (1436, 1537, 1386), 0.08),
    ({"density": 0.508}, (723, 869, 759), 0.08),
    ({"density": 0.132}, (213, 361, 302), 0.15),
    (_LONG, (22778, 22888, 23532), 0.04),
    ({**_LONG, "density": 0.502}, (10931, 12171, 11966), 0.08),
    ({**_LONG, "density": 0.121}, (2699, 3457, 3001), 0.08),
    (_D64, (480, 629, 592), 0.05),
    ({**_D64, **_LONG}, (7631, 8728, 9048), 0.05),
]


@pytest.mark.parametrize(("changes", "times", "most"), MEASURED)
def test_estimates_are_near_measurements(
    changes: dict[str, float], times: tuple[float, float, float], most: float
) -> None:
    sizes = replace(LONG, **changes)  # type: ignore[arg-type]
    for precision, time in zip((INT8_FP8, INT8), times[1:], strict=True):
        assert estimate_gain(sizes, precision) == pytest.approx(times[0] / time, rel=most)
