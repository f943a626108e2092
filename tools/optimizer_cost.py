# SPDX-License-Identifier: Apache-2.0
"""Prints what the optimizer itself costs on generated models: seconds by step, CPU seconds, peak memory.

Each model is optimized in a process of its own, without verification and with an empty tuning cache. Fused chains are looked
for with ``--chains on``, which is the most work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "models"))

# Kind and count of models/large.py, the option --chains, and the bounds: CPU seconds, and peak memory over the file's size.
CASES = (
    ("encoder", 1000, "off", 10.0, 3.0),
    ("elementwise_chains", 100_000, "on", 120.0, None),
    ("elementwise_only", 100_000, "on", 120.0, None),
    ("constant_nodes", 100_000, "on", 120.0, None),
    ("attentions", 5000, "off", 60.0, None),
)


def measure(path: Path, chains: str) -> dict[str, Any]:
    """The cost of one optimization, up to the model that would be written."""
    from stof.options import Options
    from stof.pipeline import optimize

    _raise_garbage_threshold()
    usage = resource.getrusage(resource.RUSAGE_SELF)
    before = usage.ru_utime + usage.ru_stime
    options = Options(verify=False, chains=chains, output=path.with_suffix(".out.onnx"))
    report = optimize(path, options=options)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime - before, 2),
        "seconds": {step: round(seconds, 2) for step, seconds in report.seconds.items()},
        "peak_mb": round(usage.ru_maxrss * 1024 / 1e6),
        "file_mb": round(path.stat().st_size / 1e6, 1),
        "nodes": [report.nodes_before, report.nodes_after],
        "sites": report.replaced,
    }


def _raise_garbage_threshold() -> None:
    import gc

    from stof.cli import _GARBAGE

    gc.set_threshold(_GARBAGE)  # as the command does


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", metavar="KIND", help="a kind of models/large.py; repeatable")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of nodes and sites (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the costs there")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(Path(arguments.measure[0]), arguments.measure[1])))
        return 0
    import onnx

    from large import KINDS

    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kind, count, chains, seconds, times in CASES:
            if arguments.only and kind not in arguments.only:
                continue
            count = max(1, round(count * arguments.scale))
            path = Path(folder) / f"{kind}.onnx"
            onnx.save(KINDS[kind](count), str(path))
            command = [sys.executable, __file__, "--measure", str(path), chains]
            environment = {**os.environ, "STOF_CACHE": str(Path(folder) / "none" / "tuning.sqlite")}
            run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            row = {"kind": kind, "count": count, "chains": chains, **json.loads(run.stdout)}
            found.append(row)
            bound = f"{seconds:g} s" + (f", {times:g}x of memory" if times else "")
            print(
                f"{kind} {count}: {row['cpu_seconds']} s of CPU, peak {row['peak_mb']} MB for a file of {row['file_mb']} MB "
                f"(bound at full size: {bound}); {row['seconds']}",
                flush=True,
            )
    if arguments.json:
        from stof.files import strict_json

        result = {"machine": platform.machine(), "cores": os.cpu_count(), "scale": arguments.scale, "costs": found}
        arguments.json.write_text(strict_json.dumps_by_line(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
