# SPDX-License-Identifier: Apache-2.0
"""The inputs on which ``--time`` runs: a few lengths in use, up to the longest for which time and memory suffice."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stof.execution.case import Case, Padding
from stof.execution.inputs import InputMaker
from stof.symbolic.algebra.sizes import evaluate_or_none
from stof.system.memory import free_memory

LENGTHS = (2048, 1024, 512, 256, 128)  # of which the longest that runs fast enough is timed
_PARTS = (16, 4)  # shorter lengths are these parts of it: short inputs are where a model may lose
_LEAST = 32  # below that a length says little, unless --shape states it
_FLOPS = 6e10  # a second, of two cores
_COPIES = 2  # of weights in a session: as they are, and in the layout of kernels
_SCORES = 3  # tensors of the size of scores that unfused attention holds at a time

_PADDED_LENGTH, _PADDED_TEXTS = 256, (8, 4, 2, 1)  # positions of padded texts at most, and how many there are

Shapes = Mapping[str, tuple[int, int]]


class NotTimedError(Exception):
    """Why models are not timed, for a note of the report."""


@dataclass(frozen=True)
class TimedCase:
    """One set of inputs to time.

    Attributes:
        case: its sizes.
        keys: of the longest attention, or the longest named dimension; 0: neither is known.
        length: the one that was asked for, of which dimensions have their part.
    """

    case: Case
    keys: int
    length: int


def choose_cases(maker: InputMaker, shapes: Shapes, weights: int, seconds: float, runs: int) -> list[TimedCase]:
    """Up to three lengths, the longest one last.

    Args:
        maker: draws the inputs.
        shapes: the ranges in use of the inputs' dimensions, by name.
        weights: bytes of both models.
        seconds: for all runs.
        runs: of both models at each length.

    Raises:
        NotTimedError: when memory suffices for no length.
    """
    tokens = seconds / runs * _FLOPS / (2 * max(1, weights // 8))  # 4 bytes a weight, in two files
    memory = 0
    least = 1 if set(shapes) - maker.dimensions.batch_names else _LEAST
    for length in LENGTHS:
        last = case_of(maker, shapes, length)
        shorter = [case_of(maker, shapes, _common_length(maker, shapes, length) // part) for part in _PARTS]
        cases = _drop_repetitions(maker, [*(c for c in shorter if least <= c.keys < last.keys), last])
        cost = sum(c.keys for c in cases) * _rows(maker, last.case)
        if cost > tokens and length != LENGTHS[-1]:
            continue
        memory = _COPIES * weights + _SCORES * 4 * _score_elements(maker, last.case)
        if memory <= (free_memory() or 1 << 62) // 2:  # 0: nothing tells
            return cases if cost <= tokens else cases[-1:]
    raise NotTimedError(f"two sessions need about {memory >> 20} MiB, more than half of the memory that is free")


def case_of(maker: InputMaker, shapes: Shapes, length: int) -> TimedCase:
    """One sequence of a length, with the dimensions in use within their ranges."""
    prompt = maker.prompt_case(max(1, length))
    batches = maker.dimensions.batch_names
    limited = {n: min(max(low, length), high) for n, (low, high) in shapes.items() if n not in batches}
    stated = {n: size for n, size in limited.items() if size != length}
    stated |= {n: high for n, (_, high) in shapes.items() if n in batches}
    case = replace(prompt, other=tuple({**dict(prompt.other), **stated}.items()))
    return TimedCase(case, _find_longest_keys(maker, case), length)


def choose_padded_case(maker: InputMaker, shapes: Shapes, length: int, fits: Callable[[int], bool]) -> TimedCase | None:
    """A batch of padded texts; None where memory or time suffice for not even one.

    Args:
        maker: draws the inputs.
        shapes: the ranges in use of the inputs' dimensions, by name. They go before the usual number of texts.
        length: positions of a text, at most so many.
        fits: whether there is time for so many positions, those of all texts together.
    """
    timed = case_of(maker, shapes, min(length, _PADDED_LENGTH))
    for texts in _PADDED_TEXTS:
        case = replace(timed.case, batch=texts, padding=Padding.RIGHT)
        needed = _SCORES * 4 * _score_elements(maker, case)
        if needed <= (free_memory() or 1 << 62) // 2 and fits(_rows(maker, case) * max(1, timed.keys)):
            return replace(timed, case=case)
    return None


def _common_length(maker: InputMaker, shapes: Shapes, length: int) -> int:
    """The length of which shorter ones are parts: the most in use where that is less, and each dimension has its range."""
    names = set(maker.sizes(maker.prompt_case(length))) - maker.dimensions.batch_names
    ends = [shapes[n][1] for n in names if n in shapes]
    return min(length, *ends) if ends and names <= set(shapes) else length


def _drop_repetitions(maker: InputMaker, cases: list[TimedCase]) -> list[TimedCase]:
    """One case of the same sizes: where these are fixed, lengths change nothing."""
    return list({tuple(sorted(maker.sizes(c.case).items())): c for c in cases}.values())


def _rows(maker: InputMaker, case: Case) -> int:
    """Rows of a batch."""
    sizes = maker.sizes(case)
    return max([case.batch, *(sizes[n] for n in maker.dimensions.batch_names if n in sizes)])


def _find_longest_keys(maker: InputMaker, case: Case) -> int:
    """The number of keys of the longest attention; the longest named dimension where none is known, or 0."""
    if lengths := _evaluate_scores(maker, case, lambda dims: dims[-1]):
        return max(lengths)
    names = maker.sizes(case).items()
    return max((size for name, size in names if name not in maker.dimensions.batch_names), default=0)


def _score_elements(maker: InputMaker, case: Case) -> int:
    """Elements of the largest scores at a case; 0 where they are not known."""
    return max(_evaluate_scores(maker, case, math.prod), default=0)


def _evaluate_scores(maker: InputMaker, case: Case, of_shape: Callable[[list[int]], int]) -> list[int]:
    """What is computed from the shape of each scores at a case; none of shapes that are not known."""
    sizes = maker.sizes(case)
    shapes = ([evaluate_or_none(d, sizes) for d in shape] for shape in maker.dimensions.scores)
    return [of_shape([n for n in dims if n is not None]) for dims in shapes if None not in dims]
