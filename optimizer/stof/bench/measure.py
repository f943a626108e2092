# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing of candidates, and facts about the machine."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from stof.runtime import library
from stof.system.memory import NO_LIMIT, free_memory
from stof.system.processor import cpu_name, read_cpuinfo, usable_cpus, use_cpus

ROUNDS = 5
_SLICE = 0.02  # seconds a round of repeated calls: short calls are timed often
_LEAST_CALLS = 3  # of a slice, unless they take longer than this:
_LONGEST_SLICE = 1.0  # seconds
_SETTLE = 0.005  # seconds in which the threads of the last candidate go to sleep
_PACKAGES = ("onnxruntime", "torch", "openvino", "numpy", "onnx")


@dataclass(frozen=True)
class Timing:
    """Seconds of a run of one candidate.

    Attributes:
        best: the least of all rounds.
        median: the median of the rounds.
        worst: the greatest of the rounds.
        rounds: how many rounds there were.
        plain: on a GPU, the least time of a launch outside of a captured graph; 0 where it was not timed.
        launches: on a GPU, how many launches a captured graph holds.
    """

    best: float
    median: float
    worst: float
    rounds: int
    plain: float = 0.0
    launches: int = 1

    @staticmethod
    def of(samples: Sequence[float], plain: float = 0.0, launches: int = 1) -> Timing:
        """The timing of a candidate with one sample a round."""
        return Timing(min(samples), median(samples), max(samples), len(samples), plain, launches)


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Pins this thread, and those that it starts meanwhile, to ``threads`` CPUs, of different cores where possible.

    On macOS threads cannot be pinned: the number alone is checked.

    Raises:
        ValueError: this process may not use so many CPUs.
    """
    allowed = usable_cpus()
    if threads > len(allowed):
        raise ValueError(f"{threads} threads asked for, but only {len(allowed)} CPUs are available")
    first_of_cores: list[int] = []
    others: list[int] = []
    seen: set[str] = set()
    for cpu in allowed:
        core = _core(cpu)
        (others if core in seen else first_of_cores).append(cpu)
        seen.add(core)
    openmp = os.environ.get("OMP_NUM_THREADS")
    use_cpus([*first_of_cores, *others][:threads])
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        yield
    finally:
        use_cpus(allowed)
        if openmp is None:
            os.environ.pop("OMP_NUM_THREADS", None)


def _core(cpu: int) -> str:
    """A name of a CPU's core: the CPUs that share its execution units."""
    siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return siblings.read_text(encoding="utf-8").strip() if siblings.is_file() else str(cpu)


def take_turns(count: int, rounds: int, visit: Callable[[int, int], None]) -> None:
    """Visits ``count`` candidates in every round, without garbage collection.

    The order rotates, so that each candidate goes first once.

    Args:
        count: how many candidates there are.
        rounds: how many rounds.
        visit: is given a candidate's number and the round's.
    """
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds):
            for i in range(count):
                visit((i + number) % count, number)
    finally:
        gc.enable()


def interleave(calls: Sequence[Callable[[], object]], rounds: int = ROUNDS, warm: int = 1) -> list[Timing]:
    """Times calls on the CPU in turns: a round runs each of them once or, when short, for a slice of time."""
    for call in calls:
        for _ in range(warm):
            call()
    samples: list[list[float]] = [[] for _ in calls]

    def visit(number: int, _: int) -> None:
        time.sleep(_SETTLE)
        samples[number].append(min(time_slice(calls[number])))

    take_turns(len(calls), rounds, visit)
    return [Timing.of(s) for s in samples]


def time_slice(call: Callable[[], object]) -> list[float]:
    """The seconds of a slice's calls. Several, since the first call finds the data of other candidates in the caches."""
    begin = time.perf_counter()
    samples: list[float] = []
    while True:
        start = time.perf_counter()
        call()
        now = time.perf_counter()
        samples.append(now - start)
        if now >= begin + _SLICE and (len(samples) >= _LEAST_CALLS or now >= begin + _LONGEST_SLICE):
            return samples


def rates(threads: int) -> dict[str, float]:
    """FMA rate in GFLOP/s and read bandwidth in GB/s, now."""
    return {
        "fma_gflops": round(library.fma_rate(threads, 0.3), 1),
        "read_gbps": round(library.read_bandwidth(threads, 1 << 28, 0.3), 2),
    }


def best_rates(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    """The better of two measurements of the rates."""
    return {k: max(v, second[k]) for k, v in first.items()}


def available_bytes() -> int:
    """Bytes of memory that are available without swapping; a large number where nothing tells."""
    return free_memory() or NO_LIMIT


def machine(threads: int) -> dict[str, Any]:
    """The machine of a record: device, library, versions, date."""
    info = library.build_info()
    return {
        "device": _cpu_name(),
        "cpus": os.cpu_count(),
        "threads": threads,
        "isa": info["cpu_isa"],
        "library": info["build_id"],
        "compiler": info["compiler"],
        "versions": {"python": platform.python_version(), "stof": info["version"], **_versions()},
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return versions


def _cpu_name() -> str:
    """The processor's name, with family and model where Linux tells them: the name alone says little."""
    fields = read_cpuinfo()
    family = f" (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else ""
    return f"{cpu_name()}{family}"
