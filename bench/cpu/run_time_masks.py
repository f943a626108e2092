# SPDX-License-Identifier: Apache-2.0
"""Run-time masks on a CPU: skip-scores, choose-blocks and choose-pages beside the same operator that computes every key.

A known share of the keys decides: their scores are 24 nats above all others. So what is left out changes no digit that is
compared, and a mask that loses such a key is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bench.core import run_time
from bench.core.candidate import Candidate, Runner
from bench.core.case import AttentionCase
from bench.cpu import decode
from bench.cpu.baselines_ort import stof_in_ort
from bench.cpu.decode import DecodeProblem
from bench.cpu.problem import CpuProblem
from stof.bench.results import Record
from stof.runtime.skip_counts import reset_skip_counts, skip_counts

SKIP_SCORES, CHOOSE_BLOCKS, CHOOSE_PAGES = KINDS = ("skip-scores", "choose-blocks", "choose-pages")
_GRID = "run-time-masks"
_THRESHOLDS = {SKIP_SCORES: run_time.SKIP_SCORES, CHOOSE_BLOCKS: run_time.CHOOSE_BLOCKS}
_LENGTHS = {SKIP_SCORES: (2048, 8192), CHOOSE_BLOCKS: (2048, 8192), CHOOSE_PAGES: (8192, 32768)}
_SHARES = {SKIP_SCORES: (0.1, 0.25, 0.5), CHOOSE_BLOCKS: (0.1, 0.25, 0.5), CHOOSE_PAGES: (0.05, 0.25)}
_ROWS = (16, 64)
_ALWAYS = 3  # pages at the end of a cache that every step may attend


@dataclass(frozen=True)
class MaskPoint:
    """A point of the grid.

    Attributes:
        kind: of ``KINDS``.
        length: queries and keys of a prompt; of choose-pages the keys of a step.
        share: of the blocks that decide; of the pages that are chosen.
        rows: of a page.
    """

    kind: str
    length: int
    share: float
    rows: int = 0

    def problem(self) -> PromptWithFewKeys | StepWithFewPages:
        """The problem in the sizes of the grid."""
        if self.kind == CHOOSE_PAGES:
            return StepWithFewPages(decode.step(1, self.length, 128, 8), self)
        sizes = (1, 12, 12, self.length, self.length, 64)
        return PromptWithFewKeys(AttentionCase(_GRID, "causal", "k <= q", *sizes, "float32"), self)


def grid(
    kinds: Sequence[str] | None,
    lengths: Sequence[int] | None,
    shares: Sequence[float] | None,
    rows: Sequence[int] | None,
) -> Iterator[MaskPoint]:
    """The points; None: those of the grid.

    Args:
        kinds: of ``KINDS``.
        lengths: of prompts and caches.
        shares: of blocks and pages.
        rows: of pages.
    """
    for kind in kinds or KINDS:
        for length in lengths or _LENGTHS[kind]:
            for share in shares or _SHARES[kind]:
                for page_rows in (rows or _ROWS) if kind == CHOOSE_PAGES else (0,):
                    yield MaskPoint(kind, length, share, page_rows)


class PromptWithFewKeys(CpuProblem):
    """A prompt, of whose key blocks a share decides, the first among them.

    Args:
        case: causal.
        point: the kind and the share.
        gap: how far the scores of other keys are below, in nats.

    Attributes:
        skipped: the share of pairs of queries and keys that a candidate left out, by its name.
    """

    def __init__(self, case: AttentionCase, point: MaskPoint, gap: float = run_time.GAP) -> None:
        super().__init__(case)
        self.point = point
        self.skipped: dict[str, float] = {}
        blocks = -(-case.T // run_time.BLOCK)
        decides = np.zeros(blocks, bool)
        others = np.random.default_rng(2).permutation(np.arange(1, blocks))
        decides[[0, *others[: max(0, round(point.share * blocks) - 1)]]] = True
        self.q[..., 0] = run_time.lift(case.D, gap)
        self.k[..., 0] = np.where(decides.repeat(run_time.BLOCK)[: case.T], run_time.lift(case.D, gap), 0)

    def describe(self, threads: int) -> Record:
        """Key, mask, shape and densities."""
        found = {**super().describe(threads), **_facts(self.point)}
        return {**found, "key": [self.point.kind, self.case.shape, self.point.share, threads]}

    def figures(self, candidate: str, seconds: float, rates: Mapping[str, float]) -> dict[str, float]:
        """Those of dense attention, and the share that is skipped."""
        return {**super().figures(candidate, seconds, rates), "skipped": self.skipped[candidate]}


class StepWithFewPages(DecodeProblem):
    """A decode step over caches of which few pages decide.

    Args:
        case: of a step.
        point: the pages' rows, and the share of them that is chosen.
        gap: how far the scores of other keys are below, in nats.

    Attributes:
        skipped: the share of pairs of queries and keys that a candidate left out, by its name.
        chosen: pages of each KV head that a step attends besides those that it always attends.
    """

    def __init__(self, case: AttentionCase, point: MaskPoint, gap: float = run_time.GAP) -> None:
        super().__init__(case)
        self.point = point
        self.skipped: dict[str, float] = {}
        self._gap = gap
        self.pages = -(-case.T // point.rows)
        self.chosen = max(1, round(point.share * self.pages))

    @cached_property
    def feeds(self) -> dict[str, np.ndarray]:
        """The inputs of the node but for the caches, by name."""
        case, feeds = self.case, dict(super().feeds)
        query = feeds["query"].reshape(case.B, case.S, case.H, case.D).copy()
        query[..., 0] = run_time.lift(case.D, self._gap)
        return feeds | {"query": query.reshape(feeds["query"].shape)}

    @cached_property
    def caches(self) -> list[list[np.ndarray]]:
        """Keys and values [B, G, T, D] of each layer; of each KV head up to four pages decide."""
        case, found, rng = self.case, super().caches, np.random.default_rng(2)
        decisive = min(self.chosen, 4)
        for keys, _ in found:
            keys[..., 0] = 0
            for head in keys.reshape(-1, case.T, case.D):
                for page in rng.choice(np.arange(1, self.pages - _ALWAYS), decisive, replace=False):
                    head[page * self.point.rows : (page + 1) * self.point.rows, 0] = run_time.lift(case.D, self._gap)
        return found

    def describe(self, threads: int) -> Record:
        """Key, mask, shape and layers."""
        found = {
            **super().describe(threads),
            **_facts(self.point),
            "chosen_pages": self.chosen,
            "page_rows": self.point.rows,
        }
        return {**found, "key": [CHOOSE_PAGES, self.case.shape, self.point.share, self.point.rows, threads]}

    def figures(self, candidate: str, seconds: float, rates: Mapping[str, float]) -> dict[str, float]:
        """The share that is skipped."""
        del seconds, rates
        return {"skipped": self.skipped[candidate]}


AnyProblem = PromptWithFewKeys | StepWithFewPages
Build = Callable[[AnyProblem, int], Runner]


def _facts(point: MaskPoint) -> Record:
    return {"grid": _GRID, "kind": point.kind, "share": point.share}


def _dense(problem: AnyProblem, threads: int) -> Runner:
    if isinstance(problem, StepWithFewPages):
        return decode.stof_step(problem, threads)
    return stof_in_ort(problem, threads)


def _masked(problem: AnyProblem, threads: int) -> Runner:
    if isinstance(problem, StepWithFewPages):
        return decode.stof_step(problem, threads, chosen_pages=problem.chosen, page_rows=problem.point.rows)
    return stof_in_ort(problem, threads, **_THRESHOLDS[problem.point.kind])


def _counted(name: str, build: Build) -> Build:
    """Builds a candidate whose checked run tells the problem how much it leaves out."""

    def built(problem: AnyProblem, threads: int) -> Runner:
        runner = build(problem, threads)

        def output() -> np.ndarray:
            reset_skip_counts()
            found = runner.output()
            problem.skipped[name] = round(skip_counts().share, 4)
            return found

        return Runner(runner.run, output, runner.keep)

    return built


CANDIDATES: tuple[Candidate[AnyProblem, int, Runner], ...] = (
    Candidate("stof", "stof, run-time mask", _counted("stof", _masked)),
    Candidate("stof-dense", "stof, every key", _counted("stof-dense", _dense)),
)


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    own, dense = record["peers"]["stof"], record["peers"]["stof-dense"]
    pages = f" of {record['page_rows']} rows" if "page_rows" in record else ""
    what = f"{record['kind']} {record['key'][1]}, {record['share']:.0%}{pages}"
    head = f"{what:52s} {record['machine']['threads']} thread(s): "
    if missing := [f"{row['label']} missing: {row['missing']}" for row in (own, dense) if "us" not in row]:
        return [head + "; ".join(missing)]
    return [
        f"{head}{own['us']:10.1f} us, {own['skipped']:4.0%} of the pairs skipped; every key {dense['us']:10.1f} us, "
        f"{dense['us'] / own['us']:5.2f}x"
    ]
