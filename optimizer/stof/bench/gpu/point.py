# SPDX-License-Identifier: Apache-2.0
"""One point of a grid: every candidate built and checked (``Point``), later timed in turns (``Point.measure``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from stof.bench.core.results import Record
from stof.bench.core.runner import Unavailable
from stof.bench.gpu.candidate import Candidate, Peer
from stof.bench.gpu.candidates import ANCHORS, OWN, each_kernel
from stof.bench.gpu.cases import Case
from stof.bench.gpu.problem import LONG_ROWS, TILE, TOLERANCE, Problem
from stof.bench.gpu.timing import Timed, interleave

_TEXT = 200
_KERNEL_ROUNDS = 5
_DENSE_ROUNDS = 21


def _words(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text}"[:_TEXT]


class Point:
    """A case with its candidates. Between checking and timing only what took long to make is kept, no data.

    With ``kernels``, every kernel that the selector could have taken is checked and timed, too. Where a mask has full tiles
    alone, and many of them, so are dense kernels on the same shape without it: what a tile costs them is only comparable in the
    same turns, for the board's power moves its clock. In the grid of bits, so is stof without the mask.
    """

    def __init__(self, case: Case, peers: Sequence[Peer], stream: Any, kernels: bool = False) -> None:
        self.case = case
        self._stream = stream
        self.problem = Problem(case)
        self.rows: dict[str, dict[str, Any]] = {}
        self._ready: list[tuple[Peer, Candidate]] = []
        self._kernels: list[tuple[str, Candidate]] = []
        self._wrong: list[str] = []
        self._dense: list[tuple[Peer, Candidate]] = []
        torch = self.problem.torch
        self.problem.check_mask()
        for peer in peers:
            row: dict[str, Any] = {"label": peer.label}
            self.rows[peer.name] = row
            try:
                with torch.cuda.stream(stream):
                    candidate = peer.build(self.problem, stream)
                    row["error"] = self._check(candidate)
                self._ready.append((peer, candidate))
            except Unavailable as reason:
                row["missing"] = str(reason)
            except Exception as failure:
                # What a peer refuses is a result, too.
                row["missing"] = _words(failure)
        if kernels and any(peer.name == "stof" for peer, _ in self._ready):
            self._add_kernels()
        self.plain = Problem(replace(case, mask="", tables={}))
        if any(peer.name == "stof" for peer, _ in self._ready):
            if case.S >= LONG_ROWS and self.problem.full_tiles:
                self._add_dense([peer for peer in peers if peer.name in ANCHORS and peer.name not in OWN])
            elif case.grid == "bits":
                self._add_dense([peer for peer in peers if peer.name == "stof"])
        self._drop()

    def _add_dense(self, peers: Sequence[Peer]) -> None:
        for peer in peers:
            try:
                with self.problem.torch.cuda.stream(self._stream):
                    candidate = peer.build(self.plain, self._stream)
                    self._check(candidate, self.plain)
                self._dense.append((peer, candidate))
            except Exception as failure:
                self.rows[peer.name]["dense"] = _words(failure)

    def _add_kernels(self) -> None:
        for kernel, candidate in each_kernel(self.problem, self._stream):
            try:
                with self.problem.torch.cuda.stream(self._stream):
                    self._check(candidate)
                self._kernels.append((kernel, candidate))
            except Exception as failure:
                self._wrong.append(f"{kernel}: {_words(failure)}")

    def _check(self, candidate: Candidate, problem: Problem | None = None) -> float:
        """Runs once on the first set and compares.

        Raises:
            Unavailable: when the result is wrong.
        """
        candidate.bind()
        candidate.call(0)
        self._stream.synchronize()
        error = (problem or self.problem).error(candidate.output())
        if not error <= TOLERANCE[self.case.dtype]:
            raise Unavailable(f"wrong result: differs from fp64 by {error:.1e} of the largest value")
        return float(f"{error:.1e}")

    def _drop(self) -> None:
        for some in (self._ready, self._dense):
            for _, candidate in some:
                candidate.release()
        for _, candidate in self._kernels:
            candidate.release()
        for problem in (self.problem, self.plain):
            problem.release()
            for name in ("dense", "additive", "_reference"):
                problem.__dict__.pop(name, None)
        self.problem.torch.cuda.empty_cache()

    def measure(self, rounds: int) -> Record:
        """Times the candidates on rotated inputs; the record lacks what the machine adds. May be called again."""
        problem, torch = self.problem, self.problem.torch
        problem.rotate()
        timed: list[tuple[Peer, Timed]] = []
        with torch.cuda.stream(self._stream):
            for peer, candidate in self._ready:
                try:
                    candidate.bind()
                    one = Timed(candidate.call, problem.count, self._stream)
                    one.capture()
                    timed.append((peer, one))
                except Exception as failure:
                    self.rows[peer.name]["missing"] = f"not captured: {_words(failure)}"
            timings = interleave([one for _, one in timed], rounds)
            chosen = next((one for peer, one in timed if peer.name == "stof"), None)
            more = self._time_kernels(chosen) | self._time_dense(chosen)
        for (peer, one), found in zip(timed, timings, strict=True):
            self.rows[peer.name].update(
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
        self._drop()
        return record

    def _time_kernels(self, chosen: Timed | None) -> dict[str, Any]:
        """Every kernel in turns with the selector's choice."""
        if not self._kernels or chosen is None:
            return {}
        timed = []
        for _, candidate in self._kernels:
            candidate.bind()
            timed.append(Timed(candidate.call, self.problem.count, self._stream))
            timed[-1].capture()
        first, *others = interleave([chosen, *timed], _KERNEL_ROUNDS, plain_rounds=0)
        rows = [
            {"name": name, "us": round(t.median * 1e6, 3)} for (name, _), t in zip(self._kernels, others, strict=True)
        ]
        return {"kernels": {"chosen_us": round(first.median * 1e6, 3), "each": rows, "wrong": self._wrong}}

    def _time_dense(self, chosen: Timed | None) -> dict[str, Any]:
        """Dense kernels without the mask in turns with the selector's choice with it."""
        if not self._dense or chosen is None:
            return {}
        timed: list[tuple[Peer, Timed]] = []
        for peer, candidate in self._dense:
            try:
                if not timed:
                    self.plain.rotate()
                candidate.bind()
                one = Timed(candidate.call, self.plain.count, self._stream)
                one.capture()
                timed.append((peer, one))
            except Exception as failure:
                self.rows[peer.name]["dense"] = f"not captured: {_words(failure)}"
        if not timed:
            return {}
        all_timed = [chosen, *[one for _, one in timed]]
        first, *others = interleave(all_timed, _DENSE_ROUNDS, plain_rounds=0, slow_rounds=_DENSE_ROUNDS)
        dense = {peer.name: round(t.median * 1e6, 3) for (peer, _), t in zip(timed, others, strict=True)}
        kind = "bits" if self.case.grid == "bits" else "full_tiles"
        return {kind: {"stof_us": round(first.median * 1e6, 3), "dense_us": dense}}
