# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing, the machine beside the numbers, and the memory that is left."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stof.runtime import library

ROUNDS = 5
_SLICE = 0.02  # seconds of repeated calls a round, so that short calls are timed often
_SETTLE = 0.005  # seconds for the threads of the last candidate to go to sleep
_PACKAGES = ("onnxruntime", "torch", "openvino", "numpy", "onnx")


@dataclass(frozen=True)
class Timing:
    """Seconds of one candidate: the least of all rounds, the median and the greatest of the rounds' minima."""

    best: float
    median: float
    worst: float
    rounds: int


def pin(threads: int) -> None:
    """Keeps this process, and the threads that it will start, on ``threads`` CPUs, of different cores where there are."""
    allowed = sorted(os.sched_getaffinity(0))
    if threads > len(allowed):
        raise ValueError(f"{threads} threads asked for, {len(allowed)} CPUs to be had")
    first_of_cores: list[int] = []
    others: list[int] = []
    seen: set[str] = set()
    for cpu in allowed:
        core = _core(cpu)
        (others if core in seen else first_of_cores).append(cpu)
        seen.add(core)
    os.sched_setaffinity(0, [*first_of_cores, *others][:threads])
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def _core(cpu: int) -> str:
    """What names the core of a CPU: those that share its execution units."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return siblings.read_text().strip() if siblings.is_file() else str(cpu)


def interleave(calls: Sequence[Callable[[], object]], rounds: int = ROUNDS, warm: int = 1) -> list[Timing]:
    """Times the candidates in turns: every round runs each of them once or, when short, for a slice of time."""
    for call in calls:
        for _ in range(warm):
            call()
    samples: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            # The order turns, so that no candidate always follows the same neighbour.
            for i in range(len(calls)):
                j = (i + number) % len(calls)
                time.sleep(_SETTLE)
                samples[j].append(_least(calls[j]))
    finally:
        gc.enable()
    return [Timing(min(s), median(s), max(s), len(s)) for s in samples]


def _least(call: Callable[[], object]) -> float:
    best = float("inf")
    end = time.perf_counter() + _SLICE
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end:
            return best


def rates(threads: int) -> dict[str, float]:
    """FMA rate in GFLOP/s and read bandwidth in GB/s, now."""
    return {
        "fma_gflops": round(library.fma_rate(threads, 0.3), 1),
        "read_gbps": round(library.read_bandwidth(threads, 1 << 28, 0.3), 2),
    }


def best_rates(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """The better of two measurements, before and after."""
    return {k: max(v, second[k]) for k, v in first.items()}


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62


def machine(threads: int) -> dict[str, Any]:
    """What every result carries: device, library, versions, date."""
    info = library.build_info()
    return {
        "device": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "isa": info["cpu_isa"],
        "library": info["build_id"],
        "compiler": info["compiler"],
        "versions": {"python": platform.python_version(), "stof": info["version"], **_versions()},
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "missing"
    return found


def _cpu_name() -> str:
    """The model name, with family and model where the name alone says little."""
    fields: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.processor() or "unknown CPU")
    if "cpu family" in fields:
        name += f" (family {fields['cpu family']}, model {fields['model']})"
    return name
