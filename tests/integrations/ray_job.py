# SPDX-License-Identifier: Apache-2.0
"""Embeds texts by Ray Data in two processes, and prints what they did as JSON; run by test_ray.py.

``python ray_job.py FOLDER TEXTS THREADS MARKER VECTORS``: a process ends by SIGKILL in the middle of the job, once, where
``MARKER`` is a path that does not exist; not where it is empty. Vectors go to the file ``VECTORS``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import ray
import ray_texts

_KILLED_AT = 20  # batches of one process


class CountingEmbedder(ray_texts.Embedder):
    """Counts threads and memory of its process beside each vector, and ends once where it is told to."""

    def __init__(self, folder: str, threads: int) -> None:
        before = count_threads()
        super().__init__(folder, threads)
        super().__call__({"id": np.arange(2), "text": np.array(["one", "two texts"], object)})
        self.session_threads = count_threads() - before
        self.marker = Path(os.environ["RAY_JOB_MARKER"] or "/")
        self.batches = 0

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """As that of the example, with what is counted."""
        self.batches += 1
        if self.batches == _KILLED_AT and not self.marker.exists():
            self.marker.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        rows = super().__call__(batch)
        counts = {
            "process": os.getpid(),
            "session_threads": self.session_threads,
            "resident": resident_bytes(),
            "omp_threads": int(os.environ["OMP_NUM_THREADS"]),
        }
        return {**rows, **{name: np.full(len(rows["id"]), count) for name, count in counts.items()}}


def count_threads() -> int:
    return sum(1 for _ in Path("/proc/self/task").iterdir())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Runs the job on a cluster of its own."""
    folder, count, threads, marker = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    # Processes of Ray import the modules anew.
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "RAY_JOB_MARKER": marker}
    ray.init(
        num_cpus=2 * threads,
        include_dashboard=False,
        object_store_memory=200 << 20,
        runtime_env={"env_vars": environment},
    )
    rows = ray_texts.embed_by_ray(ray_texts.draw_texts(count), folder, 2, threads, CountingEmbedder)
    ray.shutdown()
    np.save(sys.argv[5], np.stack([row["vector"] for row in rows]))
    print(
        json.dumps(
            {
                "ids_in_order": [int(row["id"]) for row in rows] == list(range(count)),
                "processes": sorted({int(row["process"]) for row in rows}),
                "session_threads": sorted({int(row["session_threads"]) for row in rows}),
                "omp_threads": sorted({int(row["omp_threads"]) for row in rows}),
                "least_resident": min(int(row["resident"]) for row in rows),
                "most_resident": max(int(row["resident"]) for row in rows),
            }
        )
    )


if __name__ == "__main__":
    main()
