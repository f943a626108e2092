# SPDX-License-Identifier: Apache-2.0
"""Random arrays of the kinds that inputs of Transformers hold: padding, documents, masks of a caller, slots, lengths."""

from __future__ import annotations

import math

import numpy as np

from stof.execution.case import Case, Padding

_UNBOUNDED = 1 << 30


def draw_padding(dims: list[int], case: Case, rng: np.random.Generator, least: bool) -> np.ndarray:
    """0 where a key is padded; ``least``: one key is left in every row.

    With holes, padding stands between the first token and the last one, in every second row behind the last one, too.
    """
    mask = np.ones(dims, np.int64)
    if case.padding is Padding.NONE or not dims or dims[-1] < 2:
        return mask
    for number, row in enumerate(mask.reshape(-1, dims[-1])[1 if len(mask) > 1 else 0 :]):
        count = int(rng.integers(1, max(2, dims[-1] // 2)))
        if case.padding is Padding.LEAST:
            count = 1 - number % 2
        elif number == 1:  # a third one has one key left, so that rows of a window have none
            count = dims[-1] - 1
        elif number == 2:  # a fourth one is all padding
            count = dims[-1] - least
        if case.padding is Padding.HOLES:
            last = dims[-1] - 1 - number % 2
            row[1:last] = rng.random(max(last - 1, 0)) < 0.5
            row[last + 1 :] = 0
            if last > 1:  # one hole at least
                row[last // 2] = 0
        elif case.padding is Padding.LEFT:
            row[:count] = 0
        else:
            row[dims[-1] - count :] = 0
    return mask


def draw_documents(dims: list[int], rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of documents that lie side by side in each row, and positions that begin again with each."""
    ids, places = np.zeros(dims, np.int64), np.zeros(dims, np.int64)
    length = dims[-1] if dims else 0
    if length:
        for row, at in zip(ids.reshape(-1, length), places.reshape(-1, length), strict=True):
            starts = np.union1d([0], rng.integers(0, length, int(rng.integers(1, 4))))
            row[:] = np.searchsorted(starts, np.arange(length), side="right") - 1
            at[:] = np.arange(length) - starts[row]
    return ids, places


def mask_entries(numbers: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Some entries the lowest number, and some rows all of them, but none of the first batch's first row."""
    masked = (rng.random(numbers.shape) < 0.3) | (rng.random((*numbers.shape[:-1], 1)) < 0.2)
    masked.reshape(-1, numbers.shape[-1])[:1] = False
    if numbers.dtype.kind != "f":  # bfloat16
        return numbers
    return np.where(masked, np.finfo(numbers.dtype).min, numbers).astype(numbers.dtype)


def draw_factors(dims: list[int], rng: np.random.Generator) -> np.ndarray:
    """Positive numbers near 1, as temperatures, speeds and scales are."""
    return rng.uniform(0.8, 1.25, dims)


def draw_indices(dims: list[int], low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    """Indices from ``low`` to ``high``."""
    return np.asarray(rng.integers(low, max(low, high), dims, endpoint=True))


def draw_slots(dims: list[int], low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    """Indices that differ where there are enough: which of two equal ones is written last depends on threads."""
    count = math.prod(dims)
    if high - low + 1 < count:
        return low + np.arange(count).reshape(dims) % max(1, high - low + 1)
    return low + rng.permutation(min(high - low + 1, max(count, 1 << 16)))[:count].reshape(dims)


def draw_lengths(dims: list[int], low: int, high: int, case: Case, rng: np.random.Generator) -> np.ndarray:
    """Lengths of rows: the first row has all, others have fewer where the case is padded."""
    lengths = np.full(dims, high, np.int64)
    if case.padding is not Padding.NONE and lengths.size > 1:
        lengths.reshape(-1)[1:] = rng.integers(min(low, high), high, lengths.size - 1, endpoint=True)
    return lengths


def reduce_integers(numbers: np.ndarray, factor: float, least: int | None) -> np.ndarray:
    """Integers that are smaller by a factor; none but zeros becomes 0, and none falls below ``least``."""
    reduced = np.trunc(factor * numbers).astype(np.int64)
    reduced = np.where((reduced == 0) & (numbers != 0), np.sign(numbers), reduced)
    return reduced if least is None else np.maximum(reduced, least)


def draw_positions(dims: list[int], low: int | None, high: int | None) -> np.ndarray:
    """Positions along the last axis, again from the start where the range ends."""
    first = 0 if low is None else low
    count = max(1, (_UNBOUNDED if high is None else high) - first + 1)
    return np.broadcast_to(first + np.arange(dims[-1]) % count if dims else np.asarray(first), dims)


def draw_next_positions(dims: list[int], low: int, high: int, rng: np.random.Generator) -> np.ndarray:
    """Positions one after the other along the last axis, from a random one on; again from ``low`` where ``high`` is passed."""
    span, count = max(1, high - low + 1), dims[-1] if dims else 1
    first = int(rng.integers(0, max(0, span - count), endpoint=True))
    return low + (first + draw_positions(dims, 0, None)) % span
