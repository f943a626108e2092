# SPDX-License-Identifier: Apache-2.0
"""Element-wise steps from an input to a tensor, and the range of the input that keeps the tensor in a range."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stof.errors import UnsupportedError
from stof.symbolic.algebra.sizes import evaluate
from stof.symbolic.algebra.terms import Int

Range = tuple[int | None, int | None]


@dataclass(frozen=True)
class ValueStep:
    """One step, of elements x and a number n.

    Kinds: ``add`` (x + n), ``from`` (n - x), ``times`` (x * n), ``over`` (x // n), ``modulo`` (x % n), ``least`` (max(x, n)),
    ``most`` (min(x, n)), ``spread`` (x + any number from 0 below n), ``clip`` (to n and ``end``).
    """

    kind: str
    number: Int | None
    end: Int | None = None


def pull_back(steps: Sequence[ValueStep], low: int | None, high: int | None, sizes: Mapping[str, int]) -> Range:
    """The range of x for which all steps give numbers from ``low`` to ``high``; None is no end."""
    limits: Range = low, high
    for step in reversed(steps):
        try:
            limits = _before(step, *limits, sizes)
        except UnsupportedError:  # a number that depends on data
            continue
    return limits


def _before(step: ValueStep, low: int | None, high: int | None, sizes: Mapping[str, int]) -> Range:
    if step.kind == "clip":
        least, most = (None if n is None else evaluate(n, sizes) for n in (step.number, step.end))
        return _drop_ends(low, high, least, most)
    assert step.number is not None
    n = evaluate(step.number, sizes)
    match step.kind:
        case "add":
            return _shift(low, -n), _shift(high, -n)
        case "from":
            return (None if high is None else n - high), (None if low is None else n - low)
        case "spread":
            return low, _shift(high, 1 - max(1, n))
        case "times" if n > 0:
            return (None if low is None else -(-low // n)), (None if high is None else high // n)
        case "times" if n < 0:
            return (None if high is None else -(-high // n)), (None if low is None else low // n)
        case "over" if n > 0:
            return (None if low is None else low * n), (None if high is None else high * n + n - 1)
        case "modulo" if n > 0:
            covers = (low is None or low <= 0) and (high is None or high >= n - 1)
            return (None, None) if covers else (low, high)
        case "least":
            return _drop_ends(low, high, n, None)
        case "most":
            return _drop_ends(low, high, None, n)
    return None, None


def _shift(end: int | None, by: int) -> int | None:
    return None if end is None else end + by


def _drop_ends(low: int | None, high: int | None, least: int | None, most: int | None) -> Range:
    """The ends that a clip to ``least`` and ``most`` does not assure by itself."""
    is_low = low is None or (least is not None and least >= low)
    is_high = high is None or (most is not None and most <= high)
    return None if is_low else low, None if is_high else high
