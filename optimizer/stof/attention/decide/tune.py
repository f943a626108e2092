# SPDX-License-Identifier: Apache-2.0
"""Which CUDA kernel each site gets, measured on the device at hand instead of estimated (``--tune``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from stof.attention.describe.site_problem import SiteProblem
from stof.errors import ArgumentError
from stof.options import Options
from stof.runtime.cuda import CudaOp, DeviceInfo, device_info, kernel_names
from stof.runtime.library import LibraryError, build_info
from stof.tuning_cache import Cache, open_cache

_GAIN = 1.03  # below that a difference is taken for noise
_SLICE = 0.15  # seconds of replays for one time

Time = Callable[[SiteProblem, int, int, str], float]


@dataclass(frozen=True)
class Tuned:
    """The measurements of a problem: the chosen ``kernel`` ("" leaves it to the model) and microseconds by length and kernel."""

    kernel: str
    microseconds: dict[int, dict[str, float]] = field(default_factory=dict, compare=False)
    whole: bool = True  # False: the time was up, or a kernel could not be run at some length


class Tuner:
    """Measures the kernels of problems, each once, also over runs."""

    def __init__(
        self,
        seconds: float,
        cache: Cache | None = None,
        clock: Callable[[], float] = time.monotonic,
        measure: Time | None = None,
        device: DeviceInfo | None = None,
        options: Options | None = None,
        started: float | None = None,
    ) -> None:
        """``measure`` and ``device`` stand in for the device's in tests; ``options`` and when the run ``started`` say
        which measurements count.

        Raises:
            ArgumentError: without a device or CUDA kernels, or when the cache cannot be used.
        """
        try:
            self.device = device or device_info()
        except LibraryError as error:
            raise ArgumentError(f"--tune measures on a CUDA device: {error}") from error
        self.cache = cache or open_cache(options or Options(), self.device.name, build_info(), started)
        self.clock = clock
        self.end = clock() + seconds
        self.measure = measure or time_kernel
        self.spent = 0.0  # seconds of measurements
        self.tuned: dict[tuple[SiteProblem, int, tuple[int, ...]], Tuned] = {}

    def tune(self, problem: SiteProblem, batch: int, lengths: Sequence[int]) -> Tuned:
        """The kernel for a problem: one that is nowhere slower than the model's choice and somewhere 3 % faster."""
        largest = max(problem.head_size, problem.value_head_size)
        names = kernel_names(largest, problem.dtype) if problem.has_kernel_choice else []
        if len(names) < 2:
            return Tuned("")
        key = problem, batch, tuple(lengths)
        if key not in self.tuned:
            self.tuned[key] = self._tune(problem, batch, lengths, ["", *names])
        return self.tuned[key]

    def _tune(self, problem: SiteProblem, batch: int, lengths: Sequence[int], names: Sequence[str]) -> Tuned:
        times_by_length: dict[int, dict[str, float]] = {}
        whole = True
        for length in sorted(set(lengths), reverse=True):
            cache_key = {**problem.cache_key, "batch": batch, "length": length}
            cached_seconds = self.cache.of(cache_key)
            times = times_by_length.setdefault(length, {})
            for name in names:
                if name not in cached_seconds:
                    if self.clock() >= self.end:
                        whole = False
                        continue
                    start = self.clock()
                    try:
                        microseconds = self.measure(problem, batch, length, name)
                    except LibraryError:  # a table of another length, too little memory: the model chooses there
                        whole = False
                        continue
                    finally:
                        self.spent += self.clock() - start
                    cached_seconds[name] = microseconds * 1e-6
                    self.cache.put(cache_key, name, cached_seconds[name])
                times[name] = cached_seconds[name] * 1e6
        problems = [{**problem.cache_key, "batch": batch, "length": length} for length in times_by_length]
        self.cache.note_decision(problems, {name for times in times_by_length.values() for name in times})
        return Tuned(_best(times_by_length), times_by_length, whole)


def _best(times_by_length: dict[int, dict[str, float]]) -> str:
    """Of the kernels that were measured wherever the model's choice was, the one that saves most."""
    lengths = [times for times in times_by_length.values() if "" in times]
    if not lengths:
        return ""
    best, most = "", 1.0
    for name in lengths[0]:
        if not name or any(name not in times for times in lengths):
            continue
        gains = [times[""] / times[name] for times in lengths]
        if min(gains) >= 1 / _GAIN**0.5 and max(gains) >= _GAIN and float(np.prod(gains)) > most:
            best, most = name, float(np.prod(gains))
    return best


def time_kernel(problem: SiteProblem, batch: int, length: int, kernel: str) -> float:
    """Microseconds of one StofAttention at S = T = ``length`` on the current device, by the kernel of that name.

    Raises:
        LibraryError: when the library refuses the problem or the device has too little memory.
    """
    tables = problem.table_arrays
    roles = [*problem.operands, *tables]
    attributes: dict[str, int | float | str] = {
        "mask": problem.mask.text,
        "scale": float(problem.scale),
        "softcap": float(problem.softcap),
        "layout": "BHSD",
        "query_offset": problem.query_offset,
        "empty_rows": problem.empty_rows.value,
        "operands": " ".join(roles),
        "kernel": kernel,
    }
    vectors = {
        "pad": np.ones((batch, length), bool),
        "segment_q": np.zeros((batch, length), np.int64),
        "segment_k": np.zeros((batch, length), np.int64),
        "lengths": np.full(batch, length, np.int64),
    }
    operands = [tables[role] if role in tables else vectors[role] for role in roles]
    op = CudaOp("StofAttention", attributes, 3 + len(roles), {3 + roles.index(n): a for n, a in tables.items()})
    dtype = onnx.helper.tensor_dtype_to_np_dtype(problem.dtype).name
    heads, groups = problem.num_heads, problem.kv_num_heads
    shapes = [
        (batch, heads, length, problem.head_size),
        (batch, groups, length, problem.head_size),
        (batch, groups, length, problem.value_head_size),
    ]
    return op.time([(dtype, shape) for shape in shapes], operands, _SLICE)
