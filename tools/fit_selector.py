#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fits the constants of the attention kernels' selector for 9.0 to stored times, and says how much its choices lose.

    STOF_LIBRARY=libstof_ort.so PYTHONPATH=optimizer tools/fit_selector.py [--head D] [--fit SECONDS [--only KERNEL]] [RESULTS...]

RESULTS are files of ``stof-bench attention --device cuda --kernels``; every point that has times of at least two kernels
counts. --store FILE keeps these points, and nothing else of the files; docs/results/h100/selector.json, which is read where
no RESULTS are given, was made so. The model is cuda/selector.cc's: rows of tiles dealt out as cuda/work_plan.cc does; the
constants are read from cuda/attention_sm90_d64.cu and _d128.cu. Without --fit only the regret of these is
printed; with it, constants are sought for that long from those that are there, and printed as the lists want them. No GPU is
needed, nor a library with CUDA kernels.

Regret is the time of the kernel that the model chooses over that of the fastest, the 8.0 and the row-wise kernel among them.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import json
import math
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stof.bench.gpu.cases import mask as named_mask
from stof.runtime import LibraryError, Mask

HERE = Path(__file__).resolve().parent.parent
MULTIPROCESSORS = 132
L2_BYTES = 50 << 20
_RESIDUES = re.compile(r"abs\(q - k\) <= (\d+) and \(q - k\) % (\d+) == 0")
MOST_PARTS, MOST_PARTS_OF_ROW, FEWEST_TILES = 512, 32, 4
JOIN, JOIN_PART = 2000, 14  # nanoseconds
HARDLY, WORTH_HALVING, MOST_HALVED, FEW_ROWS = 96, 256, 1 << 13, 4
HELD_BACK = 32  # one of so many nanoseconds of work is of rows that come last
LAUNCH = 2.0  # microseconds that every kernel takes beside its busiest worker
_ENTRY = re.compile(
    r"Describe<sm90::Shape<(\d+), (\d+), (\d+), \d+, \d+, (\d+)(?:, (\d+))?"
    r"(?:, Extras::kNone(?:, true)+)?>, T>\(([\d, ]+)\)"
)


@dataclass(frozen=True)
class Kernel:
    """An entry of a list: nanoseconds of a row of tiles, a full and a partial tile, a MiB of keys and values."""

    rows: int
    keys: int
    teams: int
    split: int
    row: float
    full: float
    partial: float
    reread: float

    @property
    def workers(self) -> int:
        """Of a multiprocessor."""
        return self.teams // self.split

    @property
    def cuts(self) -> bool:
        """Whether its workers take parts of rows."""
        return self.rows == 64 and self.split == 1

    @property
    def half(self) -> int:
        """What one of a row's two groups of queries takes alone, in percent; 0: workers take both."""
        if self.rows != 128 or self.split != 1:
            return 0
        return half_of("kHalf" if self.teams == 1 else "kHalfBeside")

    @property
    def name(self) -> str:
        """What it is called in results."""
        return f"sm90-{self.rows}x{self.keys}x{self.workers}"

    def __str__(self) -> str:
        costs = [round(x) for x in (self.row, self.full, self.partial)] + ([round(self.reread)] if self.reread else [])
        return f"{self.name:18s} ({', '.join(map(str, costs))})"


@functools.cache
def half_of(name: str) -> int:
    """A constant of cuda/attention_sm90.cuh."""
    found = re.search(rf"\b{name} = (\d+)", (HERE / "cuda/attention_sm90.cuh").read_text())
    assert found is not None, name
    return int(found[1])


def kernels_of(head: int) -> list[Kernel]:
    """The kernels without extras of a head size, from the source."""
    found = []
    source = (HERE / f"cuda/attention_sm90_d{head}.cu").read_text()
    for entry in _ENTRY.finditer(source):
        size, rows, keys, teams = (int(entry[i]) for i in range(1, 5))
        costs = [float(x) for x in entry[6].split(",")]
        assert size == head, entry[0]
        found.append(Kernel(rows, keys, teams, int(entry[5] or 1), *costs, *[0.0] * (4 - len(costs))))
    written = source.split("kKernels[] = {")[1].split("};")[0].count("Describe<")
    if len(found) != written:
        raise SystemExit(
            f"cuda/attention_sm90_d{head}.cu lists {written} kernels, of which {len(found)} could be read: adapt _ENTRY"
        )
    return found


# Of a row of tiles: partial ones, all, and for each group of 64 queries how many it passes over.
Numbers = tuple[int, int, tuple[int, ...]]
Rows = Counter[tuple[float, Numbers]]  # how many rows there are, by cost and numbers


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
    def section(self) -> int:
        """Heads that are dealt out together (cuda/attention_job_choice.cc)."""
        _, H, G, _, T = self.shape
        return max(1, L2_BYTES // 2 // (4 * T * self.head)) * (H // G)

    @property
    def mebibytes(self) -> int:
        """Of keys and values."""
        B, _, G, _, T = self.shape
        return (4 * B * G * T * self.head) >> 20


def points_of(path: Path, head: int) -> Iterator[Point]:
    """The points of a file that have times of kernels."""
    for record in json.loads(path.read_text()):
        shape = record["shape"]
        if shape["D"] != head:
            continue
        us = {e["name"]: e["us"] for e in record.get("kernels", {}).get("each", [])}
        if len([n for n in us if n.startswith("sm90")]) < 2:
            continue
        expression, tables = named_mask(record["mask_name"], shape["T"])
        sizes = (shape["B"], shape["H"], shape["G"], shape["S"], shape["T"])
        apart = _RESIDUES.fullmatch(expression)
        if apart is not None and shape["H"] == shape["G"]:  # plugins/core/ops/attention_residues.cc
            m = int(apart[2])
            expression = f"abs(q - k) <= {int(apart[1]) // m}"
            sizes = (shape["B"] * shape["H"], m, m, shape["S"] // m, shape["T"] // m)
        yield Point(f"{record['mask_name']} {sizes}", sizes, head, expression, tables, us)


def store(results: Sequence[Path], target: Path) -> None:
    """Keeps what of results is read here; a later one of a point takes the place of an earlier one."""
    kept = {}
    for path in results:
        for record in json.loads(path.read_text()):
            if record.get("kernels", {}).get("each"):
                machine = {k: record["machine"][k] for k in ("date", "device", "library")}
                found = {k: record[k] for k in ("grid", "mask_name", "shape")} | {"machine": machine}
                point = json.dumps([found[k] for k in ("grid", "mask_name", "shape")], sort_keys=True)
                kept[point] = found | {"kernels": {"each": record["kernels"]["each"]}}
    target.write_text("[" + ",\n ".join(json.dumps(record) for record in kept.values()) + "]\n")


class Tiles:
    """Numbers of tiles of the points' rows, made once for a tile's shape."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int, int], list[Counter[Numbers]]] = {}

    def of(self, point: Point, m: int, n: int) -> list[Counter[Numbers]]:
        """For every section of heads, how many rows have (partial, all) tiles and groups that pass tiles over."""
        key = (point.name, point.head, m, n)
        if key not in self._known:
            self._known[key] = self._make(point, m, n)
        return self._known[key]

    @staticmethod
    def _make(point: Point, m: int, n: int) -> list[Counter[Numbers]]:
        B, H, _, S, T = point.shape
        rows = -(-S // m)
        if not point.expression:
            heads = [Counter({(0, -(-T // n), (0,) * (m // 64)): rows})] * (B * H)
        else:
            block = Mask(point.expression, point.tables).block_mask(B, H, S, T, m, n, T - S)
            every = np.diff(block.row_ptr)
            partial = block.full_begin - block.row_ptr[:-1]
            missing = _missing(block, m)
            each = list(zip(partial.tolist(), every.tolist(), missing, strict=True))
            tables = [Counter(each[at : at + rows]) for at in range(0, len(each), rows)]
            layout = np.broadcast_to(block.layout, (B, H)).reshape(-1)
            heads = [tables[i] for i in layout]
        sections = []
        count = -(-B * H // point.section)
        for i in range(count):
            total: Counter[Numbers] = Counter()
            for head in heads[B * H * i // count : B * H * (i + 1) // count]:
                total += head
            sections.append(total)
        return sections


def _missing(block: Any, m: int) -> list[tuple[int, ...]]:
    """Of every row, how many tiles each group of 64 queries passes over, as cuda/work_plan.cc walks them."""
    groups = m // 64
    if groups == 1:
        return [(0,)] * (len(block.row_ptr) - 1)
    every = (1 << groups) - 1
    bits = np.asarray(block.bits).reshape(-1, groups, 64 * block.bits.shape[-1])
    known = (bits.any(axis=2) << np.arange(groups)).sum(axis=1).tolist()
    low = [(g & -g).bit_length() + g.bit_length() if g else 0 for g in range(every + 1)]
    found = []
    for row, begin in enumerate(block.row_ptr[:-1].tolist()):
        full, end = int(block.full_begin[row]), int(block.row_ptr[row + 1])
        entries = [known[i] for i in block.bits_id[begin:full].tolist()]
        some = every if full < end else 0
        for own in entries:
            some |= own
        walk = sorted(
            [(own | every & ~some, False) for own in entries] + [(every, True)] * (end - full), key=lambda e: low[e[0]]
        )
        none, before, behind = [0] * len(walk), 0, 0
        for i, (own, _) in enumerate(walk):
            before |= own
            none[i] |= every & ~before
        for i in range(len(walk) - 1, -1, -1):
            behind |= walk[i][0]
            none[i] |= every & ~behind
        partial = [n for n, (_, whole) in zip(none, walk, strict=True) if not whole]
        found.append(tuple(sum(n >> g & 1 for n in partial) for g in range(groups)))
    return found


def _deal(loads: list[tuple[float, int]], works: Sequence[tuple[float, int]]) -> None:
    """Gives works (cost, how many) to the least loaded of workers (load, how many), the largest first."""
    for cost, count in sorted(works, reverse=True):
        left = count
        while left > 0:
            load, workers = heapq.heappop(loads)
            while loads and loads[0][0] == load:
                workers += heapq.heappop(loads)[1]
            taken = min(left, workers)
            heapq.heappush(loads, (load + cost, taken))
            if taken < workers:
                heapq.heappush(loads, (load, workers - taken))
            left -= taken


def _held_below(costs: Counter[float], total: float) -> float:
    """The cost below which rows come last, as cuda/work_plan.cc holds them back."""
    taken = 0.0
    for cost, count in sorted(costs.items()):
        taken += cost * count
        if taken > total / HELD_BACK:
            return cost
    return 0.0


def predict(point: Point, kernel: Kernel, tiles: Tiles) -> float:
    """Microseconds by the model."""
    B, H, _, S, T = point.shape
    items = B * H * -(-S // kernel.rows)
    workers = kernel.workers * MULTIPROCESSORS
    reread = kernel.reread * point.mebibytes

    def together(count: int) -> int:
        return -(-count // kernel.split)

    if not point.expression:
        rounds = -(-items // workers)
        longest = rounds * (kernel.row + kernel.full * together(-(-T // kernel.keys)))
        if kernel.half and 2 * items <= workers:
            longest *= kernel.half / 100
        return LAUNCH + (longest + reread) * 1e-3
    rows: list[Rows] = []  # of each section
    for section in tiles.of(point, kernel.rows, kernel.keys):
        costs: Rows = Counter()
        for (partial, every, missing), count in section.items():
            some = together(partial)
            cost = kernel.row + kernel.partial * some + kernel.full * (together(every) - some)
            if kernel.split == 1:  # else no group passes tiles over
                cost -= kernel.partial * sum(missing) / (2 * (kernel.rows // 64))
            costs[round(cost), (partial, every, missing)] += count
        rows.append(costs)
    sections = [Counter[float]() for _ in rows]
    for own, costs in zip(sections, rows, strict=True):
        for (cost, _), count in costs.items():
            own[cost] += count
    longest = _longest(sections, min(workers, items))
    if kernel.half and items <= MOST_HALVED:
        longest = _halved(rows, items, workers, kernel, longest)
    if kernel.cuts:
        for of_share in (1, 2, 3):
            cut, parts = _in_parts(rows, workers, kernel, of_share)
            if not 0 < parts <= MOST_PARTS:
                continue
            pieces = sum(n for own in cut for n in own.values())
            joined = _longest(cut, min(workers, pieces)) + JOIN + JOIN_PART * parts
            longest = min(longest, joined)
    return LAUNCH + (longest + reread) * 1e-3


def _halved(rows: Sequence[Rows], items: int, workers: int, kernel: Kernel, longest: float) -> float:
    """The same where some rows are halved, if that ends earlier, as cuda/work_plan.cc tries."""
    mean = sum(cost * count for own in rows for (cost, _), count in own.items()) / workers
    if longest - mean <= mean / HARDLY:
        return longest
    last = [(i, row, count) for i in range(len(rows) - 1, -1, -1) for row, count in rows[i].items()]
    smallest = sorted(last, key=lambda entry: entry[1][0])
    eighth = max(1, workers // 8)
    if items >= FEW_ROWS * workers:
        tries = [(order, n * eighth) for order in (last, smallest) for n in (2, 4)]
    else:
        tries = [(order, n * eighth) for order in (last, smallest, smallest[::-1]) for n in (1, 2, 4, 8)]
        tries.append((last, items))
    for order, halves in tries:
        if not 0 < halves <= items:
            continue
        sections, left = [Counter[float]() for _ in rows], halves
        for i, (cost, (partial, every, missing)), count in order:
            taken = min(left, count)
            left -= taken
            sections[i][cost] += count - taken
            for passed in missing:
                own = kernel.row + kernel.partial * (partial - passed) + kernel.full * (every - partial)
                sections[i][round(own * kernel.half / 100)] += taken
        found = _longest([+own for own in sections], min(workers, items + halves))
        if found < longest - longest / WORTH_HALVING:
            longest = found
    return longest


def _in_parts(rows: Sequence[Rows], workers: int, kernel: Kernel, of_share: int) -> tuple[list[Counter[float]], int]:
    """Rows longer than a worker's share in parts of a fraction of it, and how many, as cuda/work_plan.cc cuts."""
    share = sum(cost * count for own in rows for (cost, _), count in own.items()) // workers
    part = max(share // of_share, kernel.row + FEWEST_TILES * kernel.full)
    found, parts = [], 0
    for own in rows:
        cut: Counter[float] = Counter()
        for (cost, (partial, every, _)), count in own.items():
            pieces = int(min(-(-cost // part), every // FEWEST_TILES, MOST_PARTS_OF_ROW))
            if cost <= share or pieces < 2:
                cut[cost] += count
                continue
            parts += pieces * count
            first = 1 if every > partial else 0  # a full tile, then those with bits
            for i in range(pieces):
                begin, end = every * i // pieces, every * (i + 1) // pieces
                bits = max(0, min(end, first + partial) - max(begin, first))
                cut[round(kernel.row + kernel.partial * bits + kernel.full * (end - begin - bits))] += count
        found.append(cut)
    return found, parts


def _longest(sections: Sequence[Counter[float]], workers: int) -> float:
    """What the busiest of workers has to do, in nanoseconds.

    As cuda/work_plan.cc deals the largest sections; smaller ones, which it prefers, end hardly later.
    """
    share = sum(cost * count for own in sections for cost, count in own.items()) / workers
    small = _held_below(sum(sections, Counter()), share * workers)
    begins = [0.0]
    for own in sections:
        begins.append(begins[-1] + sum(cost * count for cost, count in own.items() if cost >= small) / workers)
    places = [Counter[float]() for _ in range(len(sections) + 1)]
    for i, own in enumerate(sections):
        for cost, count in own.items():
            at = i if cost >= small else len(sections)
            while 0 < at < len(sections) and begins[at] + cost > share - share / HELD_BACK:
                at -= 1
            places[at][cost] += count
    loads: list[tuple[float, int]] = [(0, workers)]
    for place in places:
        _deal(loads, list(place.items()))
    return max(load for load, _ in loads)


def regrets(points: Sequence[Point], kernels: Sequence[Kernel], tiles: Tiles) -> list[tuple[float, str, str]]:
    """Of every point: regret, the kernel that is chosen, the fastest."""
    found = []
    for point in points:
        timed = [k for k in kernels if k.name in point.us]
        chosen = min(timed, key=lambda k: predict(point, k, tiles)).name
        fastest = min(point.us, key=lambda n: point.us[n])
        found.append((point.us[chosen] / point.us[fastest], chosen, fastest))
    return found


def geomean(values: Sequence[float]) -> float:
    """The geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def loss(points: Sequence[Point], kernels: Sequence[Kernel], table: Sequence[dict[str, float]]) -> float:
    """What is made small: the regret, and a little of the model's errors where a kernel is near the fastest."""
    total = 0.0
    for point, predicted in zip(points, table, strict=True):
        chosen = min(predicted, key=lambda n: predicted[n])
        best = min(point.us[n] for n in predicted)
        total += math.log(point.us[chosen] / best)
        for name, us in predicted.items():
            error = math.log(us / point.us[name])
            total += (0.05 if point.us[name] < 1.15 * best else 0.005) * error * error
    return total / len(points)


def fit(
    points: Sequence[Point], kernels: Sequence[Kernel], tiles: Tiles, seconds: float, only: str | None = None
) -> list[Kernel]:
    """Constants by steps of one or all of a kernel, which get smaller; the same for the same seconds' worth of steps.

    only: the name of the one kernel whose constants are sought, the others' stay.
    """
    drawn = random.Random(1)
    found = list(kernels)
    table = [{k.name: predict(p, k, tiles) for k in found if k.name in p.us} for p in points]
    best = loss(points, found, table)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        left = (end - time.monotonic()) / seconds
        at = drawn.choice([i for i, k in enumerate(found) if only in (None, k.name)])
        names = ["row", "full", "partial"] + (["reread"] if found[at].reread else [])
        moved = names if drawn.random() < 0.5 else [drawn.choice(names)]
        steps = {n: getattr(found[at], n) * math.exp(drawn.gauss(0, 0.01 + 0.15 * left)) for n in moved}
        tried = replace(found[at], **steps)
        if tried.partial < tried.full:
            continue
        columns = [predict(p, tried, tiles) if tried.name in p.us else None for p in points]
        old = [row.get(tried.name) for row in table]
        for row, new in zip(table, columns, strict=True):
            if new is not None:
                row[tried.name] = new
        now = loss(points, found, table)
        if now < best:
            best = now
            found[at] = tried
            continue
        for row, before in zip(table, old, strict=True):
            if before is not None:
                row[tried.name] = before
    return found


def report(points: Sequence[Point], kernels: Sequence[Kernel], tiles: Tiles) -> None:
    """Prints the regret of all points and of each mask, and the worst points."""
    found = regrets(points, kernels, tiles)
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
        "--halves", action="store_true", help="fit to every other point, print the regret of the others"
    )
    arguments = parser.parse_args(argv)
    if arguments.store is not None:
        store(arguments.results, arguments.store)
        return 0
    points = [p for path in arguments.results for p in points_of(path, arguments.head)]
    if not points:
        print(
            "no point with times of kernels: stof-bench attention --device cuda --kernels makes them", file=sys.stderr
        )
        return 1
    kernels: Any = kernels_of(arguments.head)
    if arguments.only not in (None, *(k.name for k in kernels)):
        print(f"no kernel {arguments.only}; there are {', '.join(k.name for k in kernels)}", file=sys.stderr)
        return 2
    tiles = Tiles()
    try:
        report(points, kernels, tiles)
        if arguments.fit > 0:
            fitted = fit(points[::2] if arguments.halves else points, kernels, tiles, arguments.fit, arguments.only)
            print("fitted:")
            for kernel in fitted:
                print(f"  {kernel}")
            report(points[1::2] if arguments.halves else points, fitted, tiles)
    except LibraryError as error:  # masks are cut in tiles by it
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
