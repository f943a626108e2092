# SPDX-License-Identifier: Apache-2.0
"""One point of the CPU attention grid: checks every candidate on the same inputs, then times them in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.core.candidate import Runner, Unavailable
from bench.core.case import AttentionCase
from bench.cpu.baselines import CANDIDATES, CpuCandidate
from bench.cpu.problem import TOLERANCE, CpuProblem
from stof.bench import measure
from stof.bench.results import Record

_RESERVE = 2 << 30


def measure_point(
    case: AttentionCase, threads: int, candidates: Sequence[CpuCandidate] = CANDIDATES, rounds: int = measure.ROUNDS
) -> Record:
    """Measures one case. Candidates that cannot run are listed with the reason."""
    problem = CpuProblem(case)
    rows: dict[str, dict[str, Any]] = {}
    ready: list[tuple[CpuCandidate, Runner]] = []
    for candidate in candidates:
        try:
            ready.append((candidate, _prepare(candidate, problem, threads, rows)))
        except Unavailable as reason:
            rows[candidate.name] = {"label": candidate.label, "missing": str(reason)}
    before = measure.rates(threads)
    timings = measure.interleave([runner.run for _, runner in ready], rounds)
    rates = measure.best_rates(before, measure.rates(threads))
    roof = max(problem.bytes / rates["read_gbps"], problem.tile_flops / rates["fma_gflops"]) * 1e-9
    for (candidate, _), timing in zip(ready, timings, strict=True):
        rows[candidate.name].update(
            us=round(timing.best * 1e6, 1),
            median_us=round(timing.median * 1e6, 1),
            worst_us=round(timing.worst * 1e6, 1),
            useful_gflops=round(problem.useful_flops / timing.best * 1e-9, 2),
            gbps=round(problem.bytes / timing.best * 1e-9, 2),
            roofline=round(roof / timing.best, 3),
        )
    density = problem.density
    return {
        "key": [case.name, case.shape, threads],
        "grid": "attention",
        "mask": case.mask or "True",
        "mask_name": case.name,
        "shape": {"B": case.B, "H": case.H, "G": case.G, "S": case.S, "D": case.D, "dtype": "fp32"},
        "density": {"element": round(density.element, 5), "tile": round(density.tile, 5), "tile_shape": "48x64"},
        "machine": {**measure.machine(threads), **rates},
        "rounds": rounds,
        "peers": rows,
    }


def _prepare(candidate: CpuCandidate, problem: CpuProblem, threads: int, rows: dict[str, dict[str, Any]]) -> Runner:
    need = candidate.score_bytes(problem.case) + _RESERVE
    if candidate.score_tensors and need > measure.available_bytes():
        raise Unavailable(f"needs {need >> 30} GiB of memory beside the others")
    try:
        runner = candidate.build(problem, threads)
        error = problem.error(runner.output())
    except Unavailable:
        raise
    except Exception as failure:  # baselines raise types of their own; that one refuses a problem is a result, too
        raise Unavailable(f"{type(failure).__name__}: {str(failure).strip()[:200]}") from failure
    if not error <= TOLERANCE:
        raise Unavailable(f"wrong result: differs from fp64 by {error:.1e} of the largest value")
    rows[candidate.name] = {"label": candidate.label, "error": float(f"{error:.1e}")}
    return runner


def describe_record(record: Record) -> list[str]:
    """The record as text."""
    machine, density = record["machine"], record["density"]
    found = [
        f"{record['key'][1]}, mask {record['mask']} (elements {density['element']:.1%}, tiles {density['tile']:.1%}), "
        f"{machine['threads']} thread(s); FMA {machine['fma_gflops']:.0f} GFLOP/s, read {machine['read_gbps']:.1f} GB/s"
    ]
    own = record["peers"].get("stof", {}).get("us")
    for row in record["peers"].values():
        if "missing" in row:
            found.append(f"  {row['label']:42s} missing: {row['missing']}")
            continue
        ratio = f"{row['us'] / own:8.2f}x" if own else ""
        found.append(
            f"  {row['label']:42s} {row['us']:12.1f} us  {row['useful_gflops']:7.1f} GFLOP/s  "
            f"{row['roofline']:5.0%} of roof {ratio}  error {row['error']:.0e}"
        )
    return found
