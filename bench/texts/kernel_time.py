# SPDX-License-Identifier: Apache-2.0
"""The time of kernels on the device, by torch's profiler, which sees every kernel of the process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.core.candidate import require
from stof.files import temporary_folder

_COPIES = ("gpu_memcpy", "gpu_memset")
# CUPTI does not survive that it is torn down between captured graphs; torch keeps it for its own graphs alone.
_KEPT_CUPTI = {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}


@dataclass(frozen=True)
class KernelTime:
    """What a run did on the device.

    Attributes:
        kernel_seconds: the sum over its kernels.
        copy_seconds: the sum over copies and fills of memory.
        kernels: how many there were.
    """

    kernel_seconds: float
    copy_seconds: float
    kernels: int


def measure_kernel_time(run: Callable[[], object]) -> KernelTime:
    """Profiles one run, which waits for the device.

    Raises:
        ValueError: when the profiler saw no kernel.
    """
    for name, value in _KEPT_CUPTI.items():
        os.environ.setdefault(name, value)
    torch: Any = require("torch")
    with temporary_folder() as folder:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as found:
            run()
        path = folder / "device.json"
        found.export_chrome_trace(str(path))
        return sum_events(json.loads(path.read_text())["traceEvents"])


def sum_events(events: Iterable[Mapping[str, Any]]) -> KernelTime:
    """The sums over the events of a profile, whose times are in microseconds.

    Raises:
        ValueError: when there is no kernel among them.
    """
    kernels: list[float] = []
    copies = 0.0
    for event in events:
        if event.get("cat") == "kernel":
            kernels.append(float(event["dur"]))
        elif event.get("cat") in _COPIES:
            copies += float(event["dur"])
    if not kernels:
        raise ValueError("the profiler saw no kernel")
    return KernelTime(sum(kernels) * 1e-6, copies * 1e-6, len(kernels))
