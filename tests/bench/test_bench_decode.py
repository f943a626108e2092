# SPDX-License-Identifier: Apache-2.0
"""The CPU's decode grid: what its points count, and a record of a small one."""

from __future__ import annotations

import pytest

from bench.cpu import decode


@pytest.mark.parametrize(
    "point",
    [
        decode.DecodePoint(2, 40, 8, 4, 0, S=3),
        decode.DecodePoint(1, 40, 8, 32, 7, S=5),
        decode.DecodePoint(1, 40, 8, 32, 7, cache="int8"),
    ],
)
def test_points_count_pairs_and_bytes(point: decode.DecodePoint) -> None:
    """Against every pair and key, one by one."""
    past = point.T - point.S
    pairs = [
        (q, k) for q in range(past, point.T) for k in range(point.T) if k <= q and (not point.window or q - k < point.window)
    ]  # fmt: skip
    assert point.pairs == point.B * 32 * len(pairs)
    item = 1 if point.cache == "int8" else 4
    assert point.read_bytes == 2 * item * point.B * point.G * point.D * len({k for _, k in pairs})


def test_caches_of_all_layers_exceed_an_l3_cache() -> None:
    """No point of the grid keeps its caches in L3, or takes more than 2 GiB."""
    points = list(decode.points())
    assert len({(p.B, p.T, p.D, p.G, p.window, p.S, p.cache) for p in points}) == len(points)
    for point in points:
        assert 128 << 20 <= point.layers * point.cache_bytes <= 2 << 30, point


@pytest.mark.parametrize("cache", ["fp32", "int8"])
def test_a_point_is_checked_and_timed(cache: str) -> None:
    """Both candidates agree with fp64; the record has their times."""
    point = decode.DecodePoint(1, 64, 16, 1, 16, cache=cache)
    record = decode.measure_point(point, threads=1, rounds=1)
    assert set(record["peers"]) == {"stof", "ort-gqa"}
    assert all(peer["us"] > 0 and peer["gbps"] > 0 for peer in record["peers"].values())
    assert record["mask"] == "k <= q and q - k < 16"
    assert record["shape"]["T"] == 64
    assert "GroupQueryAttention" in decode.describe_record(point, record)
    assert record["key"][7:] == ([] if cache == "fp32" else ["int8"])
