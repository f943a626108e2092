# SPDX-License-Identifier: Apache-2.0
"""What a candidate of the GPU's grids is, and what several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stof.bench.core.runner import Unavailable
from stof.bench.gpu.cases import Case
from stof.bench.gpu.problem import Problem

# Elements of a mask that is held in full, and of the scores that unfused attention writes.
_MOST_MASK = 1 << 29
_MOST_SCORES = 1 << 30
_LONGEST_DENSE = 8192


@dataclass
class Candidate:
    """``call(i)`` queues a run on the i-th set of inputs; ``output()`` is what call(0) wrote, as [B, H, S, D].

    ``bind`` is called whenever the problem's sets were made anew, before the first call; ``release`` gives up what refers to
    them.
    """

    call: Callable[[int], Any]
    output: Callable[[], Any]
    bind: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None
    keep: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Peer:
    """A candidate by name: what it is called in tables, and how it is built on a stream."""

    name: str
    label: str
    build: Callable[[Problem, Any], Candidate]
    grids: tuple[str, ...] = ("paper", "long", "decode")


def window(case: Case) -> tuple[int, int] | None:
    """(keys to the left, to the right) of a mask that is a window around the query; -1 is no end."""
    return case.expression.window()


def need_dense(problem: Problem) -> None:
    """Refuses what would hold, or walk, too large a mask in full.

    Raises:
        Unavailable: with the size.
    """
    case = problem.case
    size = (case.H if problem.by_head else 1) * case.S * case.T
    if size > _MOST_MASK or (case.S > 1 and case.S > _LONGEST_DENSE):
        raise Unavailable(
            f"reads the mask in full: timed up to S = {_LONGEST_DENSE} and {_MOST_MASK >> 20} Mi elements"
        )


def need_scores(problem: Problem) -> None:
    """Refuses what writes too many scores, and all but one batch: it is far behind the fused operators anyway.

    Raises:
        Unavailable: with the reason.
    """
    case = problem.case
    if case.B > 1 or case.B * case.H * case.S * case.T > _MOST_SCORES:
        raise Unavailable(f"writes all scores: timed with B = 1 and up to {_MOST_SCORES >> 20} Mi of them")


def once(problem: Problem, layout: str, call: Callable[[Any, Any, Any], Any]) -> Candidate:
    """A candidate whose function takes (q, k, v) in a layout and gives an output in the same one."""
    held: list[Any] = []

    def run(i: int) -> None:
        found = call(*problem.sets(layout)[i])
        if i == 0:
            held[:] = [found]

    def output() -> Any:
        return held[0] if layout == "BHSD" else held[0].transpose(1, 2)

    return Candidate(run, output, release=held.clear)
