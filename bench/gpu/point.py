# SPDX-License-Identifier: Apache-2.0
"""A point of a GPU grid: besides the candidates, every kernel and dense kernels take turns with stof."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.core.case import AttentionCase
from bench.core.point import Point, TimedTurns, describe_failure
from bench.gpu.candidates import ANCHORS, each_kernel
from bench.gpu.device import GpuDevice
from bench.gpu.device_runner import DeviceRunner, GpuCandidate
from bench.gpu.problem import LONG_ROWS, GpuProblem
from bench.gpu.summary import OWN
from bench.gpu.timing import CapturedLaunches, interleave_launches
from stof.bench.results import Record

_KERNEL_ROUNDS = 5
_DENSE_ROUNDS = 21


class GpuPoint(Point[GpuProblem, DeviceRunner]):
    """A case with its candidates. Between checking and timing, compiled candidates are kept and data is freed.

    Two more kinds of candidates are timed in turns with stof, since the board's power changes its clock between runs.
    Dense kernels without the mask, where all tiles of a long mask are full or empty: what a full tile costs them. And stof
    without the mask, in the bits grid.

    Args:
        case: the problem.
        candidates: what is timed.
        stream: the torch stream.
        kernels: whether every kernel that the selector could take is timed, too.
    """

    device: GpuDevice

    def __init__(
        self, case: AttentionCase, candidates: Sequence[GpuCandidate], stream: Any, kernels: bool = False
    ) -> None:
        problem = GpuProblem(case)
        problem.check_mask()
        super().__init__(problem, candidates, GpuDevice(stream))
        self.case = case
        self._kernels: list[tuple[str, DeviceRunner]] = []
        self._wrong: list[str] = []
        self._dense: list[tuple[GpuCandidate, DeviceRunner]] = []
        has_stof = any(c.name == "stof" for c, _ in self._ready)
        if kernels and has_stof:
            self._add_kernels()
        self.plain = GpuProblem(replace(case, mask="", tables={}))
        if has_stof and case.S >= LONG_ROWS and problem.full_tiles:
            self._add_dense([c for c in candidates if c.name in ANCHORS and c.name not in OWN])
        elif has_stof and case.grid == "bits":
            self._add_dense([c for c in candidates if c.name == "stof"])
        self._release()

    def _add_dense(self, candidates: Sequence[GpuCandidate]) -> None:
        for candidate in candidates:
            try:
                runner = self.device.build(candidate, self.plain)
                self._check(runner, self.plain, candidate.name)
                self._dense.append((candidate, runner))
            except Exception as failure:  # as of the candidates with the mask
                self.rows[candidate.name]["dense"] = describe_failure(failure)

    def _add_kernels(self) -> None:
        for kernel, runner in each_kernel(self.problem, self.device.stream):
            try:
                self._check(runner, self.problem, "stof")
                self._kernels.append((kernel, runner))
            except Exception as failure:  # a kernel that fails is reported; the others are timed
                self._wrong.append(f"{kernel}: {describe_failure(failure)}")

    def _release(self) -> None:
        for _, runner in (*self._ready, *self._dense, *self._kernels):
            runner.release()
        for problem in (self.problem, self.plain):
            problem.release()
            for name in ("dense", "additive", "_reference"):
                problem.__dict__.pop(name, None)
        self.problem.torch.cuda.empty_cache()

    def measure(self, rounds: int) -> Record:
        """Times the candidates on rotated inputs; the record lacks the machine's facts. May be called again."""
        record = super().measure(rounds)
        self._release()
        return record

    def _time_more(self, turns: TimedTurns) -> Record:
        names = [candidate.name for candidate, _ in self._ready]
        chosen = turns.launches.get(names.index("stof")) if "stof" in names else None
        if chosen is None:
            return {}
        with self.problem.torch.cuda.stream(self.device.stream):
            return self._time_kernels(chosen) | self._time_dense(chosen)

    def _time_kernels(self, chosen: CapturedLaunches) -> Record:
        """Times every kernel in turns with the selector's choice."""
        if not self._kernels:
            return {}
        timed = [self.device.capture(runner, self.problem) for _, runner in self._kernels]
        first, *others = interleave_launches([chosen, *timed], _KERNEL_ROUNDS, plain_rounds=0)
        rows = [
            {"name": name, "us": round(t.median * 1e6, 3)} for (name, _), t in zip(self._kernels, others, strict=True)
        ]
        return {"kernels": {"chosen_us": round(first.median * 1e6, 3), "each": rows, "wrong": self._wrong}}

    def _time_dense(self, chosen: CapturedLaunches) -> Record:
        """Times dense kernels without the mask in turns with the selector's choice with it."""
        timed: list[tuple[GpuCandidate, CapturedLaunches]] = []
        for candidate, runner in self._dense:
            try:
                if not timed:
                    self.plain.rotate()
                timed.append((candidate, self.device.capture(runner, self.plain)))
            except Exception as failure:  # as where the candidates are captured
                self.rows[candidate.name]["dense"] = f"not captured: {describe_failure(failure)}"
        if not timed:
            return {}
        all_timed = [chosen, *[one for _, one in timed]]
        first, *others = interleave_launches(all_timed, _DENSE_ROUNDS, plain_rounds=0, slow_rounds=_DENSE_ROUNDS)
        dense = {candidate.name: round(t.median * 1e6, 3) for (candidate, _), t in zip(timed, others, strict=True)}
        kind = "bits" if self.case.grid == "bits" else "full_tiles"
        return {kind: {"stof_us": round(first.median * 1e6, 3), "dense_us": dense}}
