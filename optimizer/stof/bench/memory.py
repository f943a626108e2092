# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one run above that of a loaded session, measured in a process of its own.

``python -m stof.bench.memory MODEL FEEDS.npz THREADS`` prints bytes as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stof.files import strict_json, temporary_folder
from stof.system.memory import PeakMemory, resident_bytes

_POLL_SECONDS = 0.002  # between two samples of the memory of a run, where the system keeps no peak that can be reset


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
    """Bytes that this process holds, and the peak of one run above them: samples every 2 ms on macOS and Windows."""
    if sys.platform == "linux":
        with contextlib.suppress(AttributeError):  # another C library than glibc
            ctypes.CDLL(None).malloc_trim(0)
    held = resident_bytes()
    peak = PeakMemory(os.getpid())
    if sys.platform == "linux":
        run()
        most = peak.peak_bytes()
    else:
        most = _watch(peak, run)
    return {"held": held, "above": max(0, most - held)}


def _watch(peak: PeakMemory, run: Callable[[], object]) -> int:
    """The most memory that was held at a look during a run."""
    most, over = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not over.wait(_POLL_SECONDS):
            most = max(most, peak.peak_bytes())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        run()
    finally:
        over.set()
        thread.join()
    return max(most, peak.peak_bytes())


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
