# SPDX-License-Identifier: Apache-2.0
"""One point of a grid: every candidate built and checked (``Point``), later timed in turns (``Point.measure``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stof.bench.gpu.candidate import Candidate, Peer
from stof.bench.gpu.cases import Case
from stof.bench.gpu.problem import TILE, TOLERANCE, Problem
from stof.bench.gpu.timing import Timed, interleave
from stof.bench.results import Record
from stof.bench.runner import Unavailable

_TEXT = 200


def _words(failure: BaseException) -> str:
    text = " ".join(str(failure).split())
    return f"{type(failure).__name__}: {text}"[:_TEXT]


class Point:
    """A case with its candidates. Between checking and timing only what took long to make is kept, no data."""

    def __init__(self, case: Case, peers: Sequence[Peer], stream: Any) -> None:
        self.case = case
        self._stream = stream
        self.problem = Problem(case)
        self.rows: dict[str, dict[str, Any]] = {}
        self._ready: list[tuple[Peer, Candidate]] = []
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
        self._drop()

    def _check(self, candidate: Candidate) -> float:
        """Runs once on the first set and compares.

        Raises:
            Unavailable: when the result is wrong.
        """
        candidate.bind()
        candidate.call(0)
        self._stream.synchronize()
        error = self.problem.error(candidate.output())
        if not error <= TOLERANCE[self.case.dtype]:
            raise Unavailable(f"wrong result: differs from fp64 by {error:.1e} of the largest value")
        return float(f"{error:.1e}")

    def _drop(self) -> None:
        problem = self.problem
        for _, candidate in self._ready:
            candidate.release()
        problem.release()
        for name in ("dense", "additive", "_reference"):
            problem.__dict__.pop(name, None)
        problem.torch.cuda.empty_cache()

    def measure(self, rounds: int) -> Record:
        """Times the candidates on rotated inputs; the record lacks what the machine adds."""
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
        }  # fmt: skip
        timed.clear()
        self._drop()
        self._ready.clear()
        return record
