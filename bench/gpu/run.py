# SPDX-License-Identifier: Apache-2.0
"""``python -m bench attention --device cuda``: builds, times, stores and sums up the points of the GPU grids."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.case import AttentionCase
from bench.gpu import summary
from bench.gpu.worker_pool import PointPlan, WorkerPool, now
from stof.bench.results import Record, store_all
from stof.runtime.library import build_info
from stof.terminal import say

_WORKERS = 16
_STORED = 25
_MOST_MEMORY = 64 << 30  # bytes of the device that all workers hold while they build
_COPIES = 3  # of keys and values that a worker holds then


def run(cases: Sequence[AttentionCase], plan: PointPlan, results: Path, limit: float | None, again: int = 0) -> int:
    """Measures the points in order and prints each; 0 when all of them were measured.

    Args:
        cases: the points.
        plan: what is measured of each.
        results: the folder of the JSON files, one a grid.
        limit: seconds after which no further point begins; the others are listed.
        again: how often points at which a baseline is faster are timed again, after all others. The run of the median ratio
            is kept, with the ratios of all.
    """
    if not cases:
        raise ValueError("no point of the grids is left by --masks, --lengths and --batches")
    start = time.monotonic()
    largest = max(4 * c.B * c.G * c.T * c.D for c in cases)  # bytes of keys and values
    workers = max(1, min(_WORKERS, os.cpu_count() or 1, len(cases), _MOST_MEMORY // (_COPIES * largest)))
    pool = WorkerPool(workers, plan)
    records: dict[int, Record] = {}
    lost: list[str] = []
    try:
        failed = pool.build(cases, say)
        lost += [f"{cases[n]}: {reason}" for n, reason in failed.items()]
        built = time.monotonic() - start
        say(f"{len(cases) - len(failed)} points built and checked by {workers} processes in {built:.0f} s")
        shapes = sorted({(c.D, c.dtype) for c in cases if c.grid != "cached"})
        anchors = [pool.anchors(shapes)]
        for number, case in enumerate(cases):
            if number in failed:
                continue
            if limit is not None and time.monotonic() - start > limit:
                lost.append(f"{case}: the time was over")
                continue
            found = pool.time(number)
            if isinstance(found, str):
                lost.append(f"{case}: {found}")
                continue
            records[number] = _complete(found, anchors)
            say(*summary.lines(records[number]))
            if len(records) % _STORED == 0:
                _store(results, list(records.values()))
        if again:
            _time_again(pool, records, anchors, again)
        anchors.append(pool.anchors(shapes))
    finally:
        pool.close()
        _store(results, list(records.values()))
    done = [_complete(r, anchors) for r in records.values()]
    _store(results, done)
    say("", *summary.summary(done))
    for text in lost:
        say(f"not measured: {text}")
    say(f"{len(done)} of {len(cases)} points in {time.monotonic() - start:.0f} s")
    return 3 if lost else 0


def _time_again(pool: WorkerPool, records: dict[int, Record], anchors: Sequence[dict[str, Any]], times: int) -> None:
    """Times the points at which a baseline is faster again, in turns, and keeps the run of the median ratio."""
    losing = [n for n, r in records.items() if (summary.ratio(r) or 1) < 1]
    runs = {n: [records[n]] for n in losing}
    for _ in range(times):
        for number in losing:
            found = pool.time(number)
            if not isinstance(found, str):
                runs[number].append(_complete(found, anchors))
    for number, some in runs.items():
        some.sort(key=lambda r: summary.ratio(r) or 0)
        ratios = [round(summary.ratio(r) or 0, 4) for r in some]
        records[number] = {**some[(len(some) - 1) // 2], "ratios": ratios}
        say(f"again: {summary.name(records[number])}: {', '.join(f'{r:.3f}' for r in ratios)}")


def _store(results: Path, records: Sequence[Record]) -> None:
    for grid in {r["grid"] for r in records}:
        store_all(results / f"attention-cuda-{grid}.json", [r for r in records if r["grid"] == grid])


def ceilings(anchors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best of the measurements before and after: launch, copy and read rates, and the time of a full tile by D and dtype.

    Raises:
        RuntimeError: when nothing was measured.
    """
    rates = [a["rates"] for a in anchors if isinstance(a["rates"], dict)]
    if not rates:
        raise RuntimeError(f"the machine's rates could not be measured: {anchors[0]['rates']}")
    found: dict[str, Any] = {
        "device": rates[0]["device"],
        "versions": rates[0]["versions"],
        "launch_us": round(min(r["launch"] for r in rates) * 1e6, 3),
        "copy_gbps": round(max(r["copy"] for r in rates) * 1e-9, 1),
        "read_gbps": round(max(r["read"] for r in rates) * 1e-9, 1),
        "tile_ns": {},
        "dense_us": {},
    }
    for anchor in anchors:
        for name, record in anchor["tiles"].items():
            if isinstance(record, str):
                continue
            for candidate, row in record["peers"].items():
                if "us" not in row:
                    continue
                known = found["dense_us"].setdefault(name, {})
                known[candidate] = min(row["us"], known.get(candidate, row["us"]))
                tile = row["us"] * 1e3 / record["density"]["tiles"]
                found["tile_ns"][name] = round(min(tile, found["tile_ns"].get(name, tile)), 4)
    return found


def _complete(record: Record, anchors: Sequence[dict[str, Any]]) -> Record:
    """The record with the machine and the roofline: launch + max(bytes / rate, tiles × time of a full tile).

    The rate is that of a copy. Steps of a decoder (cached, s2) have that of reads, and their share of it: read_share.
    """
    machine = ceilings(anchors)
    name = f"D{record['shape']['D']} {record['shape']['dtype']}"
    tile = machine["tile_ns"].get(name)
    # A step of a decoder writes next to nothing.
    is_step = record["grid"] in ("cached", "s2") and record["shape"]["S"] == 1
    rate = machine["read_gbps" if is_step else "copy_gbps"]
    memory = record["bytes"] / rate * 1e-3
    compute = record["density"]["tiles"] * tile * 1e-3 if tile is not None else 0.0
    if record["shape"]["S"] == 1:
        compute = 0.0  # one row of a tile: only its bytes count
    roof = machine["launch_us"] + max(memory, compute)
    rows = {n: {**r, "roofline": round(roof / r["us"], 4)} if "us" in r else r for n, r in record["peers"].items()}
    if is_step:
        rows = {n: {**r, "read_share": round(memory / r["us"], 4)} if "us" in r else r for n, r in rows.items()}
    info = build_info()
    kept = {"library": info["build_id"], "compiler": info["compiler"], "architectures": info["cuda_architectures"]}
    date = record.get("machine", {}).get("date", now())
    return {
        **record,
        "peers": rows,
        "roof_us": round(roof, 3),
        "bound": "memory" if memory >= compute else "compute",
        "machine": {**machine, **kept, "date": date},
    }
