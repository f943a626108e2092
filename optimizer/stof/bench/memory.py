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
from collections.abc import Callable, Mapping
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


def peak_memory(
    model: str, feeds: Mapping[str, np.ndarray], threads: int, module: str = "stof.bench.memory", *words: str
) -> dict[str, int]:
    """Bytes held after loading, and the peak of one run above them.

    Args:
        model: its file.
        feeds: of the run.
        threads: of the run.
        module: what is run in the process, with the model, a file of the feeds and the threads.
        words: further words for it.

    Raises:
        subprocess.CalledProcessError: when the process fails.
    """
    with temporary_folder() as folder:
        path = folder / "feeds.npz"
        arrays: dict[str, Any] = dict(feeds)
        np.savez(path, **arrays)
        command = [sys.executable, "-m", module, model, str(path), str(threads), *words]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    sizes = json.loads(done.stdout.splitlines()[-1])
    return {name: int(value) for name, value in sizes.items()}


def read_feeds(path: str) -> dict[str, np.ndarray]:
    """What :func:`peak_memory` wrote for the process."""
    with np.load(path) as arrays:
        return {name: arrays[name] for name in arrays.files}


def measure_run(run: Callable[[], object]) -> dict[str, int]:
    """Bytes that this process holds, and the peak of one run above them."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    held = _bytes("VmRSS")
    run()
    return {"held": held, "above": _bytes("VmHWM") - held}


def main() -> int:
    """Loads a session, resets the peak, runs once, prints."""
    from stof.bench.sessions import session

    model, path, threads = sys.argv[1:]
    feeds = read_feeds(path)
    loaded = session(model, int(threads), stof=True)
    print(strict_json.dumps(measure_run(lambda: loaded.run(None, feeds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
