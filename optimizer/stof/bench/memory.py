# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one run above that of a loaded session, measured in a process of its own.

``python -m stof.bench.memory MODEL FEEDS.npz THREADS`` prints bytes as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stof.files import strict_json, temporary_folder

_STATUS = Path("/proc/self/status")


def _bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{_STATUS} has no {field}")


def peak_memory(model: str, feeds: Mapping[str, np.ndarray], threads: int) -> dict[str, int]:
    """Bytes held after loading, and the peak of one run above them."""
    with temporary_folder() as folder:
        path = folder / "feeds.npz"
        arrays: dict[str, Any] = dict(feeds)
        np.savez(path, **arrays)
        command = [sys.executable, "-m", "stof.bench.memory", model, str(path), str(threads)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    sizes = json.loads(done.stdout.splitlines()[-1])
    return {name: int(value) for name, value in sizes.items()}


def main() -> int:
    """Loads a session, resets the peak, runs once, prints."""
    from stof.bench.sessions import session

    model, path, threads = sys.argv[1:]
    with np.load(path) as arrays:
        feeds = {name: arrays[name] for name in arrays.files}
    loaded = session(model, int(threads), stof=True)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    held = _bytes("VmRSS")
    loaded.run(None, feeds)
    print(strict_json.dumps({"held": held, "above": _bytes("VmHWM") - held}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
