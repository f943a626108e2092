# SPDX-License-Identifier: Apache-2.0
"""One point of a GPU grid: builds and checks every candidate, later times them in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bench.core.candidate import Unavailable
from bench.core.case import AttentionCase
from bench.gpu.candidates import ANCHORS, OWN, each_kernel
from bench.gpu.device_runner import DeviceRunner, GpuCandidate
from bench.gpu.problem import LONG_ROWS, TILE, TOLERANCE, GpuProblem
from bench.gpu.timing import CapturedLaunches, interleave_launches
from stof.bench.results import Record

_TEXT = 200
_KERNEL_ROUNDS = 5
_DENSE_ROUNDS = 21


def _words(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text}"[:_TEXT]


class Point:
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

    def __init__(
        self, case: AttentionCase, candidates: Sequence[GpuCandidate], stream: Any, kernels: bool = False
    ) -> None:
        self.case = case
        self._stream = stream
        self.problem = GpuProblem(case)
        self.rows: dict[str, dict[str, Any]] = {}
        self._ready: list[tuple[GpuCandidate, DeviceRunner]] = []
        self._kernels: list[tuple[str, DeviceRunner]] = []
        self._wrong: list[str] = []
        self._dense: list[tuple[GpuCandidate, DeviceRunner]] = []
        torch = self.problem.torch
        self.problem.check_mask()
        for candidate in candidates:
            row: dict[str, Any] = {"label": candidate.label}
            self.rows[candidate.name] = row
            try:
                with torch.cuda.stream(stream):
                    runner = candidate.build(self.problem, stream)
                    row["error"] = self._check(runner)
                self._ready.append((candidate, runner))
            except Unavailable as reason:
                row["missing"] = str(reason)
            except (
                Exception
            ) as failure:  # baselines raise types of their own; that one refuses a problem is a result, too
                row["missing"] = _words(failure)
        if kernels and any(c.name == "stof" for c, _ in self._ready):
            self._add_kernels()
        self.plain = GpuProblem(replace(case, mask="", tables={}))
        if any(c.name == "stof" for c, _ in self._ready):
            if case.S >= LONG_ROWS and self.problem.full_tiles:
                self._add_dense([c for c in candidates if c.name in ANCHORS and c.name not in OWN])
            elif case.grid == "bits":
                self._add_dense([c for c in candidates if c.name == "stof"])
        self._release()

    def _add_dense(self, candidates: Sequence[GpuCandidate]) -> None:
        for candidate in candidates:
            try:
                with self.problem.torch.cuda.stream(self._stream):
                    runner = candidate.build(self.plain, self._stream)
                    self._check(runner, self.plain)
                self._dense.append((candidate, runner))
            except Exception as failure:  # as above
                self.rows[candidate.name]["dense"] = _words(failure)

    def _add_kernels(self) -> None:
        for kernel, runner in each_kernel(self.problem, self._stream):
            try:
                with self.problem.torch.cuda.stream(self._stream):
                    self._check(runner)
                self._kernels.append((kernel, runner))
            except Exception as failure:  # a kernel that fails is reported; the others are timed
                self._wrong.append(f"{kernel}: {_words(failure)}")

    def _check(self, runner: DeviceRunner, problem: GpuProblem | None = None) -> float:
        """Runs once on the first set and compares.

        Raises:
            Unavailable: when the result is wrong.
        """
        runner.bind()
        runner.call(0)
        self._stream.synchronize()
        error = (runner.error or (problem or self.problem).error)(runner.output())
        if not error <= TOLERANCE[self.case.dtype]:
            raise Unavailable(f"wrong result: differs from fp64 by {error:.1e} of the largest value")
        return float(f"{error:.1e}")

    def _release(self) -> None:
        for some in (self._ready, self._dense):
            for _, runner in some:
                runner.release()
        for _, runner in self._kernels:
            runner.release()
        for problem in (self.problem, self.plain):
            problem.release()
            for name in ("dense", "additive", "_reference"):
                problem.__dict__.pop(name, None)
        self.problem.torch.cuda.empty_cache()

    def measure(self, rounds: int) -> Record:
        """Times the candidates on rotated inputs; the record lacks the machine's facts. May be called again."""
        problem, torch = self.problem, self.problem.torch
        problem.rotate()
        timed: list[tuple[GpuCandidate, CapturedLaunches]] = []
        with torch.cuda.stream(self._stream):
            for candidate, runner in self._ready:
                try:
                    runner.bind()
                    one = CapturedLaunches(runner.call, problem.count, self._stream)
                    one.capture()
                    timed.append((candidate, one))
                except Exception as failure:  # a baseline may allocate or synchronize, each with an error of its own
                    self.rows[candidate.name]["missing"] = f"not captured: {_words(failure)}"
            timings = interleave_launches([one for _, one in timed], rounds)
            chosen = next((one for candidate, one in timed if candidate.name == "stof"), None)
            more = self._time_kernels(chosen) | self._time_dense(chosen)
        for (candidate, one), found in zip(timed, timings, strict=True):
            self.rows[candidate.name].update(
                us=round(found.median * 1e6, 3),
                best_us=round(found.best * 1e6, 3),
                worst_us=round(found.worst * 1e6, 3),
                plain_us=round(found.plain * 1e6, 2),
                launches=one.launches,
                useful_tflops=round(problem.useful_flops / found.median * 1e-12, 2),
                gbps=round(problem.bytes / found.median * 1e-9, 1),
            )
        case, density = self.case, problem.density
        record: Record = {
            "key": case.key,
            "grid": case.grid,
            "mask": case.mask or "True",
            "mask_name": case.name,
            "shape": {
                "B": case.B, "H": case.H, "G": case.G, "S": case.S, "T": case.T, "D": case.D, "dtype": case.dtype,
            },
            "density": {
                "element": round(density.element, 6), "tile": round(density.tile, 6),
                "tile_shape": f"{TILE}x{TILE}", "tiles": density.tiles,
            },
            "bytes": problem.bytes,
            "rotated": problem.count,
            "rounds": rounds,
            "peers": self.rows,
            **more,
        }  # fmt: skip
        timed.clear()
        self._release()
        return record

    def _time_kernels(self, chosen: CapturedLaunches | None) -> dict[str, Any]:
        """Times every kernel in turns with the selector's choice."""
        if not self._kernels or chosen is None:
            return {}
        timed = []
        for _, runner in self._kernels:
            runner.bind()
            timed.append(CapturedLaunches(runner.call, self.problem.count, self._stream))
            timed[-1].capture()
        first, *others = interleave_launches([chosen, *timed], _KERNEL_ROUNDS, plain_rounds=0)
        rows = [
            {"name": name, "us": round(t.median * 1e6, 3)} for (name, _), t in zip(self._kernels, others, strict=True)
        ]
        return {"kernels": {"chosen_us": round(first.median * 1e6, 3), "each": rows, "wrong": self._wrong}}

    def _time_dense(self, chosen: CapturedLaunches | None) -> dict[str, Any]:
        """Times dense kernels without the mask in turns with the selector's choice with it."""
        if not self._dense or chosen is None:
            return {}
        timed: list[tuple[GpuCandidate, CapturedLaunches]] = []
        for candidate, runner in self._dense:
            try:
                if not timed:
                    self.plain.rotate()
                runner.bind()
                one = CapturedLaunches(runner.call, self.plain.count, self._stream)
                one.capture()
                timed.append((candidate, one))
            except Exception as failure:  # as in measure()
                self.rows[candidate.name]["dense"] = f"not captured: {_words(failure)}"
        if not timed:
            return {}
        all_timed = [chosen, *[one for _, one in timed]]
        first, *others = interleave_launches(all_timed, _DENSE_ROUNDS, plain_rounds=0, slow_rounds=_DENSE_ROUNDS)
        dense = {candidate.name: round(t.median * 1e6, 3) for (candidate, _), t in zip(timed, others, strict=True)}
        kind = "bits" if self.case.grid == "bits" else "full_tiles"
        return {kind: {"stof_us": round(first.median * 1e6, 3), "dense_us": dense}}
