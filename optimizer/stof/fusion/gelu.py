# SPDX-License-Identifier: Apache-2.0
"""Recognizes GELU written as primitives, as exporters for older opsets and fp16 conversions write it."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache

_MOST_FACTORS, _MOST_STEPS = 6, 48  # longer expressions are no GELU
_MOST_POWER = 3
_ROOT_HALF, _ROOT_TWO_OVER_PI, _CUBE = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715

Terms = Sequence[tuple[str, tuple[object, ...]]]


def match_gelu(terms: Terms, factors: tuple[int, int], allow_fp16_rounding: bool) -> tuple[str, int] | None:
    """The GELU that the product of two terms computes.

    0.5 x (1 + erf(x / sqrt(2))), or 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), with factors in any order. x is not
    a product itself.

    Args:
        terms: the pool's terms.
        factors: the two terms.
        allow_fp16_rounding: constants may have been rounded to fp16. Results then differ by 3.2e-5 at most, an eighth of
            the rounding of an fp16 number near 1.

    Returns:
        The function's name in the format and its argument; None where the product is no GELU.
    """
    factored = _factors(terms, factors)
    if factored is None:
        return None
    scale, rest = factored
    if len(rest) != 2 or scale != 0.5:
        return None
    for x, other in (rest, rest[::-1]):
        inner = _plus_one(terms, other)
        if inner is None:
            continue
        op, args = terms[inner]
        if op not in ("erf", "tanh") or not isinstance(args[0], int):
            continue
        powers = _powers(terms, args[0], x, {})
        if (
            op == "erf"
            and powers is not None
            and set(powers) == {1}
            and _is_constant(powers[1], _ROOT_HALF, allow_fp16_rounding)
        ):
            return "gelu", x
        if op == "tanh" and powers is not None and set(powers) == {1, 3}:
            root, cube = powers[1], powers[3] / (powers[1] or math.nan)
            if _is_constant(root, _ROOT_TWO_OVER_PI, allow_fp16_rounding) and _is_constant(
                cube, _CUBE, allow_fp16_rounding
            ):
                return "gelu_tanh", x
    return None


def _is_constant(value: float, exact: float, allow_fp16_rounding: bool) -> bool:
    """Whether a number is this constant, or the constant rounded to fp16."""
    near = (exact, _round_to_fp16(exact), 1 / _round_to_fp16(1 / exact)) if allow_fp16_rounding else (exact,)
    return any(math.isclose(value, n, rel_tol=1e-6) for n in near)


@cache
def _round_to_fp16(value: float) -> float:
    return float(struct.unpack("<e", struct.pack("<e", value))[0])


def _number(terms: Terms, term: int) -> float | None:
    op, args = terms[term]
    return args[0] if op == "num" and isinstance(args[0], float) else None


def _factors(terms: Terms, pending: Sequence[int]) -> tuple[float, list[int]] | None:
    """A product as a number times other terms; None where there are too many of them."""
    scale, others, unread, steps = 1.0, [], list(pending), 0
    while unread:
        term, steps = unread.pop(), steps + 1
        op, args = terms[term]
        number = _number(terms, term)
        if number is not None:
            scale *= number
        elif op == "mul":
            unread += [a for a in args if isinstance(a, int)]
        elif op == "div" and isinstance(args[1], int) and _number(terms, args[1]):
            scale /= _number(terms, args[1]) or 1.0
            unread += [a for a in args[:1] if isinstance(a, int)]
        else:
            others.append(term)
        if len(others) > _MOST_FACTORS or steps > _MOST_STEPS or not math.isfinite(scale):
            return None
    return scale, others


def _plus_one(terms: Terms, term: int) -> int | None:
    op, args = terms[term]
    if op != "add":
        return None
    for one, other in (args, args[::-1]):
        if isinstance(one, int) and isinstance(other, int) and _number(terms, one) == 1.0:
            return other
    return None


_Powers = dict[int, float]


def _powers(terms: Terms, term: int, x: int, memo: dict[int, _Powers | None]) -> _Powers | None:
    """A term as a polynomial of x: coefficients by power. None where it is none, too long, or of a higher degree than 3."""
    if term == x:
        return {1: 1.0}
    if term not in memo:
        memo[term] = None  # counts as one step while its arguments are visited
        memo[term] = _polynomial(terms, term, x, memo) if len(memo) <= _MOST_STEPS else None
    return memo[term]


def _polynomial(terms: Terms, term: int, x: int, memo: dict[int, _Powers | None]) -> _Powers | None:
    op, args = terms[term]
    number = _number(terms, term)
    if number is not None:
        return {0: number}
    if op not in ("add", "mul", "div", "pow"):
        return None
    left, right = (_powers(terms, a, x, memo) if isinstance(a, int) else None for a in args)
    if left is None or right is None:
        return None
    if op == "add":
        return {p: left.get(p, 0.0) + right.get(p, 0.0) for p in sorted({*left, *right})}
    if op == "mul":
        return _multiply(left, right)
    if set(right) != {0} or right[0] == 0.0:
        return None
    if op == "div":
        return {p: c / right[0] for p, c in left.items()}
    if right[0] not in (2.0, 3.0):
        return None
    power: _Powers | None = left
    for _ in range(int(right[0]) - 1):
        power = None if power is None else _multiply(power, left)
    return power


def _multiply(left: _Powers, right: _Powers) -> _Powers | None:
    powers: _Powers = {}
    for p, c in left.items():
        for q, d in right.items():
            if p + q > _MOST_POWER:
                return None
            powers[p + q] = powers.get(p + q, 0.0) + c * d
    return powers
