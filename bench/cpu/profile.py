# SPDX-License-Identifier: Apache-2.0
"""Times of a session's nodes by ONNX Runtime's profile, split into attention and the rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stof.bench.sessions import session
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
        """Whether an input or output is scores or a mask: four dimensions that end in S × T, or S × T alone."""
        shapes = [shape for _, shape in (*self.inputs, *self.outputs)]
        if any(len(s) >= 4 and s[-2:] == (S, T) for s in shapes):
            return True
        # Two dimensions may be a mask or, by accident, a weight matrix, which only a matmul reads.
        return self.op not in ("MatMul", "Gemm", "FusedMatMul") and any(s in ((S, T), (1, S, T)) for s in shapes)


def tensor_shapes(found: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(type, shape) of the inputs or outputs in a profile's event."""
    return tuple((kind, tuple(shape)) for entry in found or () for kind, shape in entry.items())


def profile(
    model: str, feeds: Mapping[str, np.ndarray], threads: int, *, stof: bool, runs: int = 3
) -> list[list[NodeCall]]:
    """The nodes of ``runs`` warm runs."""

    def run(found: Any) -> None:
        found.run(None, dict(feeds))

    return calls_of_runs(lambda prefix: session(model, threads, stof=stof, profile=prefix), run, runs)


def calls_of_runs(made: Callable[[str], Any], run: Callable[[Any], None], runs: int = 3) -> list[list[NodeCall]]:
    """The nodes of ``runs`` warm runs.

    Args:
        made: gives a session that writes its profile to files with a prefix.
        run: runs a session once.
        runs: how many.
    """
    with temporary_folder() as folder:
        found = made(str(folder / "run"))
        for _ in range(runs + 1):
            run(found)
        events = json.loads(Path(found.end_profiling()).read_text())
    calls: list[list[NodeCall]] = [[]]
    for event in events:
        if event.get("cat") == "Session" and event["name"] == "model_run":
            calls.append([])
        elif event.get("cat") == "Node" and event["name"].endswith(_SUFFIX):
            arguments = event["args"]
            shapes = (tensor_shapes(arguments.get(f"{way}_type_shape")) for way in ("input", "output"))
            name = event["name"].removesuffix(_SUFFIX)
            calls[-1].append(NodeCall(name, arguments["op_name"], event["dur"] * 1e-6, *shapes))
    # The event of a run follows those of its nodes.
    full = [c for c in calls if c]
    return full[1:]


def rest_seconds(runs: list[list[NodeCall]], S: int, T: int) -> tuple[float, float]:
    """Seconds outside attention and in attention, of the run with the least outside."""
    split = []
    for calls in runs:
        inside = sum(c.seconds for c in calls if c.touches(S, T))
        split.append((sum(c.seconds for c in calls) - inside, inside))
    return min(split)
