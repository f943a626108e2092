# SPDX-License-Identifier: Apache-2.0
"""Device time of every node of a session, joined from two profiles.

ONNX Runtime's profile has the time of each node on the host; torch's profiler has the time of each launch and kernel.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.core.candidate import require
from bench.cpu.profile import NodeCall, tensor_shapes
from stof.files import temporary_folder

_STEP = 5.0  # µs, of the search for the offset between the two clocks
_REACH = 3000.0
_MATCHED = 0.98  # of the launches have to fall into a node


@dataclass(frozen=True)
class NodeRun:
    """A node's run: what it is, its provider, and the seconds that its kernels took on the device."""

    call: NodeCall
    provider: str
    device_seconds: float


def trace(made: Callable[[str], Any], run: Callable[[Any], None]) -> list[NodeRun]:
    """The nodes of one warm run.

    Args:
        made: gives a session that writes its profile to files with a prefix.
        run: queues one run of the session and waits for it.

    Raises:
        ValueError: when launches and nodes do not match.
    """
    torch: Any = require("torch")
    with temporary_folder() as folder:
        session = made(str(folder / "run"))
        for _ in range(3):
            run(session)
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as found, torch.profiler.record_function("traced run"):
            run(session)
        path = folder / "device.json"
        found.export_chrome_trace(str(path))
        host = json.loads(Path(session.end_profiling()).read_text())
        device = json.loads(path.read_text())["traceEvents"]
    return match(host, device)


def match(host: list[dict[str, Any]], device: list[dict[str, Any]]) -> list[NodeRun]:
    """Joins the events of the last run in both profiles by the launches' times; their clocks differ by an offset."""
    runs = [e for e in host if e.get("cat") == "Session" and e["name"] == "model_run"]
    first, last = runs[-1]["ts"], runs[-1]["ts"] + runs[-1]["dur"]
    nodes = [
        e for e in host
        if e.get("cat") == "Node" and e["name"].endswith("_kernel_time") and first <= e["ts"] <= last
    ]  # fmt: skip
    nodes.sort(key=lambda e: float(e["ts"]))
    starts = [float(e["ts"]) for e in nodes]
    ends = [float(e["ts"] + e["dur"]) for e in nodes]
    took: dict[int, float] = {}
    for event in device:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            took[event["args"]["correlation"]] = (
                took.get(event["args"]["correlation"], 0.0) + float(event["dur"]) * 1e-6
            )
    launches = [
        (float(e["ts"]), took[e["args"]["correlation"]])
        for e in device
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and e.get("args", {}).get("correlation") in took
    ]
    begin = next((float(e["ts"]) for e in device if e.get("name") == "traced run" and e.get("ph") == "X"), None)
    if begin is None or not launches:
        raise ValueError("the device's profile holds no launches")

    def place(at: float) -> int | None:
        i = bisect.bisect_right(starts, at) - 1
        return i if i >= 0 and at <= ends[i] + 1 else None

    def inside(offset: float) -> int:
        return sum(place(t - offset) is not None for t, _ in launches)

    guess = begin - first
    offsets = [guess + i * _STEP for i in range(int(-_REACH / _STEP), int(_REACH / _STEP) + 1)]
    counts = [inside(o) for o in offsets]
    best = max(counts)
    # The middle of the longest stretch that matches best: launches lie inside of their nodes with some room.
    chosen = [o for o, c in zip(offsets, counts, strict=True) if c == best]
    offset = chosen[len(chosen) // 2]
    if best < _MATCHED * len(launches):
        raise ValueError(f"only {best} of {len(launches)} launches fall into a node of the runtime's profile")
    seconds = [0.0] * len(nodes)
    for at, duration in launches:
        index = place(at - offset)
        if index is not None:
            seconds[index] += duration
    result = []
    for event, device_seconds in zip(nodes, seconds, strict=True):
        arguments = event["args"]
        shapes = (tensor_shapes(arguments.get(f"{way}_type_shape")) for way in ("input", "output"))
        name = event["name"].removesuffix("_kernel_time")
        call = NodeCall(name, arguments["op_name"], event["dur"] * 1e-6, *shapes)
        result.append(NodeRun(call, arguments.get("provider", ""), device_seconds))
    return result
