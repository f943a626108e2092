#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits the constants of the attention kernels' selector for 9.0 to stored times, and says how much its choices lose.

    cmake --build --preset dev --target stof_ort stof_plan_times
    STOF_LIBRARY=build/dev/libstof_ort.so PYTHONPATH=. tools/fit_selector.py [--head D] [--fit SECONDS] [RESULTS...]

RESULTS are files of ``python -m bench attention --device cuda --kernels``; every point that has times of at least two kernels
counts. --store FILE keeps these points, and nothing else of the files; docs/results/h100/selector.json, which is read where
no RESULTS are given, was made so. The model is that of cuda/attention/select.cc: tile schedules are made by
cuda/schedule/tile_schedule.cc itself, through a library of its own (--planner). The constants are read from d64.cu and d128.cu in
cuda/attention/sm90/instantiations/. Without --fit only the regret of these is printed; with it, constants are sought for that
long from those that are there, and printed as the tables want them. No GPU is needed, nor a library with CUDA kernels.

Regret is the time of the kernel that the model chooses over that of the fastest, the 8.0 and the row-wise kernel among them.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import math
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from bench.core.case import named_mask
from stof.bench.results import read
from stof.files import strict_json, write_text
from stof.mask.expression import MaskExpression
from stof.mask.expression_nodes import Binary, Constant, K, Q
from stof.runtime.library import LibraryError, Mask

HERE = Path(__file__).resolve().parent.parent
SM_COUNT = 132
L2_BYTES = 50 << 20
LAUNCH = 2.0  # microseconds of a launch, beside the makespan
UNSURE = 0.012  # relative excess time at which a kernel counts 1 / e in the loss
MOVED = 0.001  # weight of changed cost ratios beside the regret
HEAT = 0.0003  # initial temperature of annealing
_TYPES = (np.int32,) * 5 + (np.uint32,)  # of a block mask's arrays
_ENTRY = re.compile(
    r"MakeKernel<T, Head<(\d+)>, Tile<(\d+), (\d+)>, Stages<\d+>, QueryStages<\d+>, Pipelines<(\d+)>(?:, Splits<(\d+)>)?"
    r"(?:, ScoreMod::kNone(?:, k\w+)+)?>\( ?((?:\w+\{\d+\}(?:, )?)+)\)"
)
# The names of a kernel's costs in the table, in its order.
_COSTS = {
    "RowNs": "row",
    "FullNs": "full",
    "PartialNs": "partial",
    "NsPerMib": "ns_per_mib",
    "SoloPct": "solo_speed_pct",
}


@dataclass(frozen=True)
class Kernel:
    """A row of a kernel table. Costs are nanoseconds of a tile row, a full and a partial KV tile, and a MiB of keys and
    values; solo_speed_pct is the speed of a CTA alone on its SM (TileCost in cuda/schedule/tile_schedule.h).
    """

    rows: int
    keys: int
    pipelines: int
    split: int
    row: float
    full: float
    partial: float
    ns_per_mib: float = 0.0
    solo_speed_pct: float = 100.0

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of the tile schedule that share an SM."""
        return self.pipelines // self.split

    @property
    def can_split_rows(self) -> bool:
        """Whether a tile row may be split along the keys over CTAs."""
        return self.rows == 64 and self.split == 1

    @property
    def half_tile_pct(self) -> int:
        """Cost of a half tile in percent of its tile row; 0: the kernel has none."""
        if self.rows != 128 or self.split != 1:
            return 0
        return kernel_constant("kHalfTilePct" if self.pipelines == 1 else "kHalfTileSharedPct")

    @property
    def name(self) -> str:
        """The name in results."""
        return f"sm90-{self.rows}x{self.keys}x{self.ctas_per_sm}"

    def __str__(self) -> str:
        costs = [round(getattr(self, field)) for field in _COSTS.values()]
        for usual in (100, 0):
            if costs[-1] == usual:
                costs.pop()
        return f"{self.name:18s} ({', '.join(f'{name}{{{cost}}}' for name, cost in zip(_COSTS, costs, strict=False))})"


@functools.cache
def kernel_constant(name: str) -> int:
    """A constant of cuda/attention/sm90/launch.cuh."""
    found = re.search(rf"\b{name} = (\d+)", (HERE / "cuda/attention/sm90/launch.cuh").read_text())
    assert found is not None, name
    return int(found[1])


def kernels_of(head: int) -> list[Kernel]:
    """The kernels of a head size without score modification, read from the source."""
    found = []
    path = HERE / f"cuda/attention/sm90/instantiations/d{head}.cu"
    source = re.sub(r"\s+", " ", path.read_text())
    for entry in _ENTRY.finditer(source):
        size, rows, keys, pipelines = (int(entry[i]) for i in range(1, 5))
        costs = {_COSTS[name]: float(cost) for name, cost in re.findall(r"(\w+)\{(\d+)\}", entry[6])}
        assert size == head, entry[0]
        found.append(Kernel(rows, keys, pipelines, int(entry[5] or 1), **costs))
    written = source.split("kKernels[] = {")[1].split("};")[0].count("MakeKernel<")
    if len(found) != written:
        raise SystemExit(
            f"{path.relative_to(HERE)} lists {written} kernels, of which {len(found)} could be read: adapt _ENTRY"
        )
    return found


@dataclass(frozen=True)
class Point:
    """A problem and the times of kernels in microseconds, by name."""

    name: str
    shape: tuple[int, int, int, int, int]  # B, H, G, S, T
    head: int
    expression: str
    tables: dict[str, np.ndarray]
    us: dict[str, float]

    @property
    def l2_heads(self) -> int:
        """Query heads of an L2 head group (cuda/attention/job_choice.cc)."""
        _, H, G, _, T = self.shape
        return max(1, L2_BYTES // 2 // (4 * T * self.head)) * (H // G)

    @property
    def mebibytes(self) -> int:
        """Of keys and values."""
        B, _, G, _, T = self.shape
        return (4 * B * G * T * self.head) >> 20


def _dilation(mask: str) -> tuple[int, int] | None:
    """The width w and the dilation m of ``abs(q - k) <= w and (q - k) % m == 0``; None for any other mask."""
    expression = MaskExpression.parse(mask)
    match expression.conjuncts:
        case (window, Binary("==", Binary("%", left, Constant(m)), Constant(0))) if left == Binary("-", Q, K):
            width, right = MaskExpression(window).window() or (0, -1)
            return (width, m) if width == right else None
    return None


def points_of(path: Path, head: int) -> Iterator[Point]:
    """The points of a file that have times of kernels."""
    for record in read(path):
        shape = record["shape"]
        if shape["D"] != head:
            continue
        us = {e["name"]: e["us"] for e in record.get("kernels", {}).get("each", [])}
        if len([n for n in us if n.startswith("sm90")]) < 2:
            continue
        expression, tables = named_mask(record["mask_name"], shape["T"])
        sizes = (shape["B"], shape["H"], shape["G"], shape["S"], shape["T"])
        apart = _dilation(expression)
        if apart is not None and shape["H"] == shape["G"]:  # plugins/core/ops/attention_dilation.cc
            width, m = apart
            expression = f"abs(q - k) <= {width // m}"
            sizes = (shape["B"] * shape["H"], m, m, shape["S"] // m, shape["T"] // m)
        yield Point(f"{record['mask_name']} {sizes}", sizes, head, expression, tables, us)


def store(results: Sequence[Path], target: Path) -> None:
    """Keeps what of results is read here; a later one of a point takes the place of an earlier one."""
    kept = {}
    for path in results:
        for record in read(path):
            if record.get("kernels", {}).get("each"):
                machine = {k: record["machine"][k] for k in ("date", "device", "library")}
                found = {k: record[k] for k in ("grid", "mask_name", "shape")} | {"machine": machine}
                point = json.dumps([found[k] for k in ("grid", "mask_name", "shape")], sort_keys=True)
                kept[point] = found | {"kernels": {"each": record["kernels"]["each"]}}
    write_text("results", target, [strict_json.dumps_by_line(list(kept.values()))])


class Planner:
    """The tile schedules of cuda/schedule/tile_schedule.cc, whose times are the model (tools/plan_times.cc)."""

    def __init__(self, path: Path) -> None:
        """Loads the library.

        Raises:
            OSError: where it cannot be loaded.
        """
        self._library = ctypes.CDLL(str(path))
        self._library.stof_plan_mask.restype = ctypes.c_void_p
        self._library.stof_plan_time.restype = ctypes.c_int64
        self._library.stof_plan_mask_destroy.argtypes = [ctypes.c_void_p]
        self._masks: dict[tuple[str, int, int, int], int] = {}

    def close(self) -> None:
        """Frees all masks."""
        for mask in self._masks.values():
            self._library.stof_plan_mask_destroy(mask)
        self._masks.clear()

    def _mask(self, point: Point, m: int, n: int) -> ctypes.c_void_p:
        """The point's block mask of tiles of m queries by n keys; kept."""
        key = (point.name, point.head, m, n)
        if key not in self._masks:
            B, H, _, S, T = point.shape
            block = Mask(point.expression, point.tables).block_mask(B, H, S, T, m, n, T - S)
            layout = np.atleast_2d(block.layout)
            parts = [layout, block.row_ptr, block.full_begin, block.key_tile, block.bits_id, block.bits]
            arrays = [
                np.ascontiguousarray(np.asarray(part).reshape(-1).astype(_TYPES[i])) for i, part in enumerate(parts)
            ]
            sizes = (ctypes.c_int64 * 8)(S, T, T - S, m, n, -(-S // m), *layout.shape)
            counts = (ctypes.c_int64 * 6)(*(a.size for a in arrays))
            self._masks[key] = self._library.stof_plan_mask(
                sizes, counts, *(ctypes.c_void_p(a.ctypes.data) for a in arrays)
            )
        return ctypes.c_void_p(self._masks[key])

    def predict(self, point: Point, kernel: Kernel) -> float:
        """Microseconds by the model: that of cuda/attention/select.cc, and what every launch takes."""
        B, H, _, S, T = point.shape
        ctas = kernel.ctas_per_sm * SM_COUNT
        if point.expression:
            each = (
                *(kernel.row, kernel.full, kernel.partial, kernel.split),
                *(kernel.can_split_rows, kernel.half_tile_pct, kernel.solo_speed_pct),
            )
            costs = (ctypes.c_int64 * 7)(*map(round, each))
            mask = self._mask(point, kernel.rows, kernel.keys)
            sizes = map(ctypes.c_int64, (B, H, ctas, point.l2_heads))
            nanoseconds = float(self._library.stof_plan_time(mask, *sizes, costs))
        else:
            rows = B * H * -(-S // kernel.rows)
            tiles = math.ceil(math.ceil(T / kernel.keys) / kernel.split)
            nanoseconds = -(-rows // ctas) * (kernel.row + kernel.full * tiles)
            if kernel.half_tile_pct and 2 * rows <= ctas:
                nanoseconds *= kernel.half_tile_pct / 100
        return LAUNCH + (nanoseconds + kernel.ns_per_mib * point.mebibytes) * 1e-3


def regrets(points: Sequence[Point], kernels: Sequence[Kernel], planner: Planner) -> list[tuple[float, str, str]]:
    """Of every point: regret, the kernel that is chosen, the fastest."""
    found = []
    for point in points:
        timed = [k for k in kernels if k.name in point.us]
        chosen = min(timed, key=lambda k: planner.predict(point, k)).name
        fastest = min(point.us, key=lambda n: point.us[n])
        found.append((point.us[chosen] / point.us[fastest], chosen, fastest))
    return found


def geomean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def loss(
    points: Sequence[Point], kernels: Sequence[Kernel], start: Sequence[Kernel], table: Sequence[dict[str, float]]
) -> float:
    """The objective that is minimized.

    Its main term is the expected regret of a soft choice, as costs have to be right beyond the stored points: a kernel is
    the likelier the faster it is by the model. Small terms are the model's errors where a kernel is near the fastest, and
    the change of the ratios of tile row and partial tile to full tile, by which schedules balance.
    """
    total = 0.0
    for point, predicted in zip(points, table, strict=True):
        least = min(predicted.values())
        best = min(point.us[n] for n in predicted)
        likely = {n: math.exp(-(us / least - 1) / UNSURE) for n, us in predicted.items()}
        expected = sum(likely[n] * min(point.us[n] / best, 1.5) for n in predicted)
        total += math.log(expected / sum(likely.values()))
        for name, us in predicted.items():
            error = math.log(us / point.us[name])
            total += (0.05 if point.us[name] < 1.15 * best else 0.005) * error * error
    moved = 0.0
    for kernel, first in zip(kernels, start, strict=True):
        moved += math.log(kernel.row / kernel.full / (first.row / first.full)) ** 2
        moved += 40 * math.log(kernel.partial / kernel.full / (first.partial / first.full)) ** 2
    return total / len(points) + MOVED * moved


def _step(kernel: Kernel, drawn: random.Random, size: float) -> Kernel:
    """Other constants of a kernel."""
    kind = drawn.randrange(6)
    if kind == 0:  # all
        factor = math.exp(drawn.gauss(0, size / 2))
        return replace(kernel, row=kernel.row * factor, full=kernel.full * factor, partial=kernel.partial * factor)
    if kind == 1:
        return replace(kernel, ns_per_mib=max(0.0, kernel.ns_per_mib + drawn.gauss(0, 250 * size)))
    if kind == 2 and kernel.ctas_per_sm > 1:
        most = 100.0 * kernel.ctas_per_sm
        return replace(kernel, solo_speed_pct=min(most, max(100.0, kernel.solo_speed_pct + drawn.gauss(0, 200 * size))))
    name = ("row", "full", "partial")[kind % 3]
    factor = math.exp(drawn.gauss(0, size if name == "row" else size / 2))
    moved = replace(kernel, **{name: getattr(kernel, name) * factor})
    return replace(moved, partial=max(moved.partial, moved.full))


def fit(
    points: Sequence[Point],
    kernels: Sequence[Kernel],
    planner: Planner,
    progress: Callable[[], float],
    only: str | None = None,
) -> list[Kernel]:
    """Constants by simulated annealing (Kirkpatrick et al. 1983), a kernel's at a time: the best that were met.

    progress: how far the search is, from 0 on; it ends at 1. Asked before each step.
    only: the name of the one kernel whose constants are sought, the others' stay.
    """
    drawn = random.Random(1)
    start, found = list(kernels), list(kernels)
    table = [{k.name: planner.predict(p, k) for k in found if k.name in p.us} for p in points]
    now = loss(points, found, start, table)
    best, least = list(found), now
    while (gone := progress()) < 1:
        at = drawn.choice([i for i, k in enumerate(found) if only in (None, k.name)])
        tried = list(found)
        tried[at] = _step(found[at], drawn, 0.15 * (1 - gone) + 0.01)
        name = tried[at].name
        changed = [
            row | {name: planner.predict(p, tried[at])} if name in row else row
            for p, row in zip(points, table, strict=True)
        ]
        new = loss(points, tried, start, changed)
        if new < now or drawn.random() < math.exp((now - new) / (HEAT * (1 - gone) ** 2 + 1e-9)):
            now, found, table = new, tried, changed
        if now < least:
            best, least = list(found), now
    return best


def share_of(seconds: float) -> Callable[[], float]:
    """The share of so many seconds that is over, from now on."""
    begin = time.monotonic()
    return lambda: (time.monotonic() - begin) / seconds


def report(points: Sequence[Point], kernels: Sequence[Kernel], planner: Planner) -> None:
    """Prints the regret of all points and of each mask, and the worst points."""
    found = regrets(points, kernels, planner)
    by_mask: dict[str, list[float]] = {}
    for point, (regret, _, _) in zip(points, found, strict=True):
        by_mask.setdefault(point.name.split()[0], []).append(regret)
    values = [r for r, _, _ in found]
    counts = sorted({len(p.us) for p in points})
    print(f"{len(points)} points, {' or '.join(map(str, counts))} kernels timed at each")
    for name, some in [("all", values), *by_mask.items()]:
        print(
            f"  {name:16s} {len(some):4d} points, {100 * geomean(some) - 100:5.2f} %, worst {100 * max(some) - 100:5.2f} %"
        )
    worst = sorted(zip(found, points, strict=True), key=lambda x: -x[0][0])[:5]
    for (regret, chosen, fastest), point in worst:
        us = point.us
        if regret > 1.02:
            print(
                f"  {100 * regret - 100:5.1f} % {point.name}: {chosen} {us[chosen]:.1f} us, {fastest} {us[fastest]:.1f} us"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", nargs="*", type=Path, default=[HERE / "docs/results/h100/selector.json"])
    parser.add_argument("--store", type=Path, metavar="FILE", help="keep the points of RESULTS there, and end")
    parser.add_argument("--head", type=int, choices=[64, 128], default=64)
    parser.add_argument("--fit", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--only", metavar="KERNEL", help="seek the constants of this one alone (sm90-128x64x2)")
    parser.add_argument(
        "--planner",
        type=Path,
        metavar="LIBRARY",
        default=HERE / "build/dev/libstof_plan_times.so",
        help="the library of the target stof_plan_times, which makes the tile schedules",
    )
    parser.add_argument(
        "--halves", action="store_true", help="fit to every other point, print the regret of the others"
    )
    arguments = parser.parse_args(argv)
    if arguments.store is not None:
        store(arguments.results, arguments.store)
        return 0
    points = [p for path in arguments.results for p in points_of(path, arguments.head)]
    if not points:
        print(
            "no point with times of kernels: python -m bench attention --device cuda --kernels makes them",
            file=sys.stderr,
        )
        return 1
    kernels = kernels_of(arguments.head)
    if arguments.halves and len(points) < 2:
        print("--halves: one point has no other half", file=sys.stderr)
        return 2
    if arguments.only not in (None, *(k.name for k in kernels)):
        print(f"no kernel {arguments.only}; there are {', '.join(k.name for k in kernels)}", file=sys.stderr)
        return 2
    try:
        planner = Planner(arguments.planner)
    except OSError as error:
        print(
            f"{error}: cmake --build --preset dev --target stof_plan_times makes it (or --planner LIBRARY)",
            file=sys.stderr,
        )
        return 1
    try:
        report(points, kernels, planner)
        if arguments.fit > 0:
            chosen = points[::2] if arguments.halves else points
            fitted = fit(chosen, kernels, planner, share_of(arguments.fit), arguments.only)
            print("fitted:")
            for kernel in fitted:
                print(f"  {kernel}")
            report(points[1::2] if arguments.halves else points, fitted, planner)
    except LibraryError as error:  # it makes the block masks
        print(error, file=sys.stderr)
        return 1
    finally:
        planner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
