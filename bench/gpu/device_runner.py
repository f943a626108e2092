# SPDX-License-Identifier: Apache-2.0
"""A candidate that is ready to run on the device, and refusals that several candidates share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bench.core.candidate import Candidate, Unavailable
from bench.core.case import AttentionCase
from bench.gpu.problem import GpuProblem

_MOST_MASK = 1 << 29  # elements of a mask that is held in full
_MOST_SCORES = 1 << 30  # elements of the scores that unfused attention writes
_LONGEST_DENSE = 8192  # queries, where a mask is read in full


@dataclass
class DeviceRunner:
    """A candidate that is ready to run on the device.

    Attributes:
        call: queues a run on the i-th set of inputs.
        output: what ``call(0)`` wrote, as [B, H, S, D].
        bind: takes new sets of inputs; runs before the first call.
        release: frees everything that refers to the inputs.
        keep: objects that the others need.
        error: the difference of an output from what this candidate computes; None: from the problem's.
    """

    call: Callable[[int], Any]
    output: Callable[[], Any]
    bind: Callable[[], None] = lambda: None
    release: Callable[[], None] = lambda: None
    keep: tuple[Any, ...] = ()
    error: Callable[[Any], float] | None = None


GpuCandidate = Candidate[GpuProblem, Any, DeviceRunner]  # built on a torch stream


def window(case: AttentionCase) -> tuple[int, int] | None:
    """Keys to the left and to the right of the query, where the mask is a window; -1 is unlimited."""
    return case.expression.window()


def need_dense(problem: GpuProblem) -> None:
    """Refuses a case whose mask is too large to be held and read in full.

    Raises:
        Unavailable: with the size.
    """
    case = problem.case
    size = (case.H if problem.by_head else 1) * case.S * case.T
    if size > _MOST_MASK or (case.S > 1 and case.S > _LONGEST_DENSE):
        raise Unavailable(
            f"reads the mask in full: timed up to S = {_LONGEST_DENSE} and {_MOST_MASK >> 20} Mi elements"
        )


def need_scores(problem: GpuProblem) -> None:
    """Refuses a case with more than one batch, or with too many scores, for candidates that write them.

    They are far slower than fused operators anyway.

    Raises:
        Unavailable: with the reason.
    """
    case = problem.case
    if case.B > 1 or case.B * case.H * case.S * case.T > _MOST_SCORES:
        raise Unavailable(f"writes all scores: timed with B = 1 and up to {_MOST_SCORES >> 20} Mi of them")


def runner_of(problem: GpuProblem, layout: str, call: Callable[[Any, Any, Any], Any]) -> DeviceRunner:
    """A runner of a function that takes (q, k, v) in a layout and returns an output in the same one."""
    held: list[Any] = []

    def run(i: int) -> None:
        found = call(*problem.sets(layout)[i])
        if i == 0:
            held[:] = [found]

    def output() -> Any:
        return held[0] if layout == "BHSD" else held[0].transpose(1, 2)

    return DeviceRunner(run, output, release=held.clear)
