# SPDX-License-Identifier: Apache-2.0
"""Writes what a run of ``stof-optimize`` with default options costs on every graph of the zoo: docs/results/zoo-memory.json.

``python tests/zoo/peak_memory.py`` measures peak memory and CPU seconds of the command's process tree. ``--graphs NAME ...``
measures only these and keeps the others' entries. Ends with 1 where a run fails or takes more than 4 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx
from zoo_inputs import filled, names

from stof.files import strict_json

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "zoo-memory.json"
MOST_MB = 4096.0
_EVERY = 0.02  # seconds between two looks at the processes
_PAGE_MB = os.sysconf("SC_PAGE_SIZE") / 2**20


@dataclass(frozen=True)
class Cost:
    """One run: exit status, largest resident memory of all its processes together in MiB, CPU seconds."""

    status: int
    peak_mb: int
    cpu_seconds: float


def read_costs() -> dict[str, Cost]:
    """The stored results by the name of the graph."""
    return {name: Cost(**entry) for name, entry in json.loads(RESULTS.read_text()).items()}


def resident_mb(root: int) -> float:
    """Resident memory of a process and its descendants in MiB; pages that they share count for each of them."""
    total, pending = 0.0, [str(root)]
    while pending:
        process = Path("/proc") / pending.pop()
        try:
            total += int((process / "statm").read_text().split()[1]) * _PAGE_MB
            for task in (process / "task").iterdir():  # the thread that started a child has it
                pending += (task / "children").read_text().split()
        except OSError:  # it has ended
            continue
    return total


def measure(command: list[str]) -> Cost:
    """The cost of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0.0
    while process.poll() is None:
        peak = max(peak, resident_mb(process.pid))
        time.sleep(_EVERY)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(process.returncode, round(peak), round(seconds, 1))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", metavar="NAME", default=[])
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = read_costs() if arguments.graphs and RESULTS.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        model, written = Path(folder) / "model.onnx", Path(folder) / "out.onnx"
        for name in arguments.graphs or names():
            onnx.save(filled(name), str(model))
            written.unlink(missing_ok=True)
            found[name] = measure([sys.executable, "-m", "stof.cli", str(model), "-o", str(written)])
            print(f"{name}: {found[name]}", flush=True)
            ordered = {n: asdict(found[n]) for n in names() if n in found}
            arguments.output.write_text(strict_json.dumps_by_line(ordered) + "\n")
    bad = {n: c for n, c in found.items() if c.status or c.peak_mb > MOST_MB}
    print(f"{len(found)} graphs, {len(bad)} fail or take more than {MOST_MB:g} MiB: {bad}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
