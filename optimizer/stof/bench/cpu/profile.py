# SPDX-License-Identifier: Apache-2.0
"""A session's own profile: how long its nodes take, split into attention and the rest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stof.bench.cpu.baselines_ort import session
from stof.files import temporary_folder

_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class NodeCall:
    """One node's run: operator, seconds, and (type, shape) of its inputs and outputs."""

    name: str
    op: str
    seconds: float
    inputs: tuple[tuple[str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, tuple[int, ...]], ...]

    def touches(self, S: int, T: int) -> bool:
        """Whether a tensor of scores or mask goes in or out: four dimensions that end in S × T, or S × T alone."""
        shapes = [shape for _, shape in (*self.inputs, *self.outputs)]
        if any(len(s) >= 4 and s[-2:] == (S, T) for s in shapes):
            return True
        # Without a head axis it may be a mask, or by accident a matrix of weights, which only a product reads.
        return self.op not in ("MatMul", "Gemm", "FusedMatMul") and any(s in ((S, T), (1, S, T)) for s in shapes)


def tensors(found: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(type, shape) of what a profile says of inputs or outputs."""
    return tuple((kind, tuple(shape)) for entry in found or () for kind, shape in entry.items())


def profile(
    model: str, feeds: Mapping[str, np.ndarray], threads: int, *, stof: bool, runs: int = 3
) -> list[list[NodeCall]]:
    """The nodes of ``runs`` warm runs."""
    with temporary_folder() as folder:
        found = session(model, threads, stof=stof, profile=str(folder / "run"))
        for _ in range(runs + 1):
            found.run(None, dict(feeds))
        events = json.loads(Path(found.end_profiling()).read_text())
    calls: list[list[NodeCall]] = [[]]
    for event in events:
        if event.get("cat") == "Session" and event["name"] == "model_run":
            calls.append([])
        elif event.get("cat") == "Node" and event["name"].endswith(_SUFFIX):
            arguments = event["args"]
            shapes = (tensors(arguments.get(f"{way}_type_shape")) for way in ("input", "output"))
            name = event["name"].removesuffix(_SUFFIX)
            calls[-1].append(NodeCall(name, arguments["op_name"], event["dur"] * 1e-6, *shapes))
    # An event of a run is written when the run ends, after those of its nodes.
    full = [c for c in calls if c]
    return full[1:]


def rest_seconds(runs: list[list[NodeCall]], S: int, T: int) -> tuple[float, float]:
    """Seconds outside attention and in attention, of the run with the least outside."""
    split = []
    for calls in runs:
        inside = sum(c.seconds for c in calls if c.touches(S, T))
        split.append((sum(c.seconds for c in calls) - inside, inside))
    return min(split)
