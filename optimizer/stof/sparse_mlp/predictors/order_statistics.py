# SPDX-License-Identifier: Apache-2.0
"""Exact quantiles of many values that are given in chunks, in memory that does not depend on their number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

CHUNK_VALUES = 1 << 21  # values that are copied at a time: 8 MiB of fp32
_LARGEST = float(np.finfo(np.float32).max)
_HALF = 1 << 16
Chunks = Callable[[], Iterable[npt.NDArray[np.float32]]]


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows of an array [rows, columns], each of about ``CHUNK_VALUES`` values."""
    step = max(1, CHUNK_VALUES // max(1, columns))
    for first in range(0, rows, step):
        yield slice(first, min(rows, first + step))


def threshold_above(chunks: Chunks, most: int) -> float:
    """The smallest of the values above which at most ``most`` values lie, so that ``value > threshold`` selects them.

    Two passes count the high and the low halves of the values as sorted integers. NaN counts as above all values.

    Args:
        chunks: gives the same fp32 values in each call.
        most: how many values may lie above; 0 or more.

    Returns:
        A finite value; minus the largest fp32 value where all values may lie above.
    """
    counts = np.zeros(_HALF, np.int64)
    for chunk in chunks():
        counts += np.bincount(_to_ordered_bits(chunk) >> np.uint32(16), minlength=_HALF)
    rank = int(counts.sum()) - most - 1  # of the threshold, from 0 in ascending order
    if rank < 0:
        return -_LARGEST
    high, before = _bin_of(counts, rank)
    counts = np.zeros(_HALF, np.int64)
    for chunk in chunks():
        bits = _to_ordered_bits(chunk)
        counts += np.bincount(bits[bits >> np.uint32(16) == high] & np.uint32(_HALF - 1), minlength=_HALF)
    low, _ = _bin_of(counts, rank - before)
    return limit_to_fp32(_value(high << 16 | low))


def limit_to_fp32(value: float) -> float:
    """The value, limited to finite fp32 ones; NaN becomes the largest one."""
    return _LARGEST if np.isnan(value) else float(np.clip(value, -_LARGEST, _LARGEST))


def _bin_of(counts: npt.NDArray[np.int64], rank: int) -> tuple[int, int]:
    """The bin that holds a rank, and how many values lie in the bins before it."""
    ends = np.cumsum(counts)
    index = int(np.searchsorted(ends, rank, "right"))
    return index, int(ends[index] - counts[index])


def _to_ordered_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint32]:
    """Integers in the order of the values; NaN of either sign is the largest one."""
    flat = np.ascontiguousarray(values, np.float32).reshape(-1)
    bits = flat.view(np.uint32)
    bits = np.where(bits >> np.uint32(31) == 1, ~bits, bits | np.uint32(1 << 31))
    bits[np.isnan(flat)] = np.uint32(0xFFFFFFFF)
    return np.asarray(bits, np.uint32)


def _value(bits: int) -> float:
    """The value with these sorted bits."""
    raw = bits & 0x7FFFFFFF if bits >> 31 else ~bits & 0xFFFFFFFF
    return float(np.array(raw, np.uint32).view(np.float32))
