# SPDX-License-Identifier: Apache-2.0
"""How far a model's outputs may differ from those of legal runs of the original."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stof.execution.case import Case
from stof.verification.result import Comparison, Coverage

MODEL_FACTOR = 4.0  # difference ≤ 4 × that of two legal runs + 1e-6 of the output's range, or 4 ulp
_ULPS = 4.0 * 2.0**-23  # of the largest number; numbers that are nearly the same have a small range
_ENOUGH = 64  # elements whose range tells how large an output is
_MOST_ALLOWED = 0.1  # of an output's spread: more allows anything, and compares nothing
_LEAST_SPREAD = 0.01  # of the largest number, of numbers that are nearly the same
_FLIPS = 0.01  # of a quantized cache's elements, which may be one step away
_BLOCK = 1 << 20  # elements that are looked at together, in fp64


def compare_outputs(
    case: Case,
    floor: float,
    name: str,
    plain: np.ndarray,
    legal: Sequence[np.ndarray],
    optimized: np.ndarray,
    expanded: Sequence[np.ndarray] = (),
    *,
    undefined: bool = False,
    padded: np.ndarray | None = None,
    held: np.ndarray | None = None,
) -> Comparison:
    """The optimized model's output beside the original's own runs.

    Args:
        case: the inputs.
        floor: what is allowed anyway, of the output's range.
        name: of the output.
        plain: the original's, without graph optimizations.
        legal: its other runs.
        optimized: the optimized model's.
        expanded: runs of another graph that means the same; how far they are from its first one is allowed as well.
        undefined: whether the optimized model may be finite where the original is NaN.
        padded: of [B, S], the queries that are padding. An output [B, S, ...] that differs is compared without them.
        held: of a KV cache [B, heads, rows, size], the rows [B, rows] that hold keys. Others are not compared.
    """
    if held is not None and held.shape == (plain.shape[0], plain.shape[2]) and optimized.shape == plain.shape:
        return _compare_cache(case, floor, name, plain, legal, optimized, expanded, undefined, held)
    everything = _compare(case, floor, name, plain, legal, optimized, expanded, undefined)
    shape = plain.shape
    if everything.ok or padded is None or shape[:2] != padded.shape or optimized.shape != shape or not padded.any():
        return everything
    rows = ~padded
    real = _compare(
        case,
        floor,
        name,
        plain[rows],
        [x[rows] for x in legal],
        optimized[rows],
        [x[rows] for x in expanded],
        undefined,
    )
    if not real.ok:
        return everything
    left_out = int(np.prod(shape[2:])) * int(padded.sum())
    # Batch rows are lost with the first two axes in one.
    return replace(real, coverage=replace(real.coverage, padded=left_out, rows=()))


def _compare_cache(
    case: Case,
    floor: float,
    name: str,
    plain: np.ndarray,
    legal: Sequence[np.ndarray],
    optimized: np.ndarray,
    expanded: Sequence[np.ndarray],
    undefined: bool,
    held: np.ndarray,
) -> Comparison:
    """The rows of a KV cache that hold keys."""

    def pick(array: np.ndarray) -> np.ndarray:
        return array.swapaxes(1, 2)[held] if array.shape == plain.shape else array

    if plain.dtype.kind != "f" and plain.dtype == optimized.dtype:
        some = _compare_quantized(case, name, pick(plain), list(map(pick, legal)), pick(optimized))
        return replace(some, coverage=replace(some.coverage, unused=plain.size - pick(plain).size))
    some = _compare(
        case, floor, name, pick(plain), list(map(pick, legal)), pick(optimized), list(map(pick, expanded)), undefined
    )
    unused = plain.size - pick(plain).size
    return replace(some, coverage=replace(some.coverage, unused=unused, rows=()))


def _compare_quantized(
    case: Case, name: str, plain: np.ndarray, legal: Sequence[np.ndarray], optimized: np.ndarray
) -> Comparison:
    """Rows of a quantized cache: elements between two steps of the quantizer may be rounded either way."""
    what = f"output {name!r}, {case}"
    others = [x for x in (plain, *legal) if x.shape == plain.shape]
    steps = [np.abs(optimized.astype(np.float64) - x.astype(np.float64)) for x in others]
    nearest = min(steps, key=lambda x: float(x.max(initial=0.0)))
    flips = int(np.count_nonzero(nearest))
    among = max(int(np.count_nonzero(plain != x)) for x in others)
    away = float(nearest.max(initial=0.0))
    allowed = 1.0 + max(float(np.abs(plain.astype(np.float64) - x).max(initial=0.0)) for x in others)
    ok = away <= allowed and flips <= 1 + max(_FLIPS * plain.size, MODEL_FACTOR * among)
    detail = "" if ok else f"{flips} of {plain.size} elements of a quantized cache differ, by up to {away:.0f} steps"
    return Comparison(what, away, allowed, ok, detail=detail, coverage=Coverage(plain.size))


def _compare(
    case: Case,
    floor: float,
    name: str,
    plain: np.ndarray,
    legal: Sequence[np.ndarray],
    optimized: np.ndarray,
    expanded: Sequence[np.ndarray],
    undefined: bool,
) -> Comparison:
    what = f"output {name!r}, {case}"
    shapes = f"shape {optimized.shape}, expected {plain.shape}" if optimized.shape != plain.shape else ""
    if any(x.shape != plain.shape for x in legal):
        detail = "; ".join(filter(None, (shapes, "runs of the original itself give outputs of other lengths")))
        return Comparison(what, 0.0, 0.0, True, detail=detail, comparable=False, flips=True, shapes=shapes)
    if shapes:
        return Comparison(what, np.inf, 0.0, False, detail=shapes, flips=True, shapes=shapes)
    if plain.dtype.kind != "f":
        return _compare_exactly(what, plain, legal, optimized)
    alone = np.isnan(plain) & np.isfinite(optimized) & undefined
    odd = (np.isfinite(optimized) != np.isfinite(plain)) & ~alone
    if odd.any():
        return Comparison(what, np.inf, 0.0, False, detail=describe_nonfinite(odd, optimized, plain))
    good = np.logical_and.reduce([np.isfinite(x) for x in (plain, *legal)])
    compared, only = int(good.sum()), int(alone.sum())
    rows = tuple(int(i) for i in np.unique(np.argwhere(alone)[:, 0])) if only and alone.ndim > 1 else ()
    equal_infinite = int((np.isinf(plain) & (optimized == plain)).sum())
    coverage = Coverage(
        compared, plain.size - compared - only, undefined=only, rows=rows, equal_infinite=equal_infinite
    )
    low, high = _extremes(plain, good)
    largest = max(abs(low), abs(high))
    # The range of a few numbers can be small by chance, and of one it is 0.
    span = high - low if compared >= _ENOUGH else largest
    # Of a few numbers, legal runs that happen to agree tell little.
    floor *= MODEL_FACTOR if compared < _ENOUGH else 1.0
    rounded_by = [_largest_difference(plain, x, good) for x in legal]
    for x in expanded[1:]:
        rounded_by.append(_largest_difference(expanded[0], x, good & np.isfinite(expanded[0]) & np.isfinite(x)))
    budget = max(MODEL_FACTOR * max(rounded_by, default=0.0) + floor * span, _ULPS * largest)
    # Any legal run may be the nearest one.
    difference = min(_largest_difference(optimized, x, good) for x in (plain, *legal))
    spread = max(_deviation(plain, good) if compared >= _ENOUGH else largest, _LEAST_SPREAD * largest)
    comparable = budget <= _MOST_ALLOWED * spread or not compared or not budget
    return Comparison(what, difference, budget, difference <= budget, coverage=coverage, comparable=comparable)


def _compare_exactly(what: str, plain: np.ndarray, legal: Sequence[np.ndarray], optimized: np.ndarray) -> Comparison:
    """Numbers that rounding cannot change; where it does, in runs of the original, as many of them may change here."""
    coverage = Coverage(plain.size)
    if any(np.array_equal(optimized, x) for x in (plain, *legal)):
        return Comparison(what, 0.0, 0.0, True, coverage=coverage)
    flips = max((int((plain != x).sum()) for x in legal), default=0)
    if not flips:
        return Comparison(what, np.inf, 0.0, False, coverage=coverage, flips=True)
    changed = min(int((optimized != x).sum()) for x in (plain, *legal))
    detail = f"{changed} of {plain.size} elements change, {flips} between runs of the original"
    allowed = MODEL_FACTOR * flips
    ok = changed <= allowed
    return Comparison(what, changed, allowed, ok, detail=detail, comparable=False, coverage=coverage, flips=True)


def _blocks(good: np.ndarray, *arrays: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Chosen elements in fp64, some at a time: copies of whole outputs would be several times as large as these."""
    flat = [x.reshape(-1) for x in arrays]
    chosen = good.reshape(-1)
    for start in range(0, chosen.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        yield [x[part][chosen[part]].astype(np.float64) for x in flat]


def _largest_difference(one: np.ndarray, other: np.ndarray, good: np.ndarray) -> float:
    return max((float(np.abs(a - b).max(initial=0.0)) for a, b in _blocks(good, one, other)), default=0.0)


def _extremes(array: np.ndarray, good: np.ndarray) -> tuple[float, float]:
    ends = [(float(x.min()), float(x.max())) for (x,) in _blocks(good, array) if x.size]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else (0.0, 0.0)


def _deviation(array: np.ndarray, good: np.ndarray) -> float:
    """The standard deviation."""
    count = max(1, int(good.sum()))
    mean = sum(float(x.sum()) for (x,) in _blocks(good, array)) / count
    return float(np.sqrt(sum(float(np.square(x - mean).sum()) for (x,) in _blocks(good, array)) / count))


def find_undefined_outputs(by_case: Sequence[Sequence[Comparison]], names: Sequence[str]) -> list[Comparison]:
    """A failure for each output with NaN of the original alone of which no case compared most elements.

    Args:
        by_case: the comparisons of all outputs, case by case.
        names: of the outputs.
    """
    failures = []
    for i, name in enumerate(names):
        covered = [comparisons[i].coverage for comparisons in by_case]
        if any(c.undefined for c in covered) and not any(2 * c.compared > c.elements for c in covered):
            detail = (
                "NaN in the original alone, which inputs without a query that has no key should end; but of no inputs half of "
                "the elements could be compared"
            )
            failures.append(Comparison(f"output {name!r}", np.inf, 0.0, False, detail=detail))
    return failures


def describe_nonfinite(odd: np.ndarray, optimized: np.ndarray, original: np.ndarray, axes: str = "") -> str:
    """Of elements that are finite in one of the two: how many, and the first one."""
    where = tuple(int(i) for i in np.argwhere(odd)[0])
    return (
        f"inf or NaN in one of the two in {int(odd.sum())} of {odd.size} elements, first at {axes}{where}: {optimized[where]}, "
        f"where the original has {original[where]}"
    )
