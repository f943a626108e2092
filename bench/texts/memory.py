# SPDX-License-Identifier: Apache-2.0
"""The peak memory of candidates, each in a process of its own that runs its largest batch once.

``python -m bench.texts.memory MODEL FEEDS.npz THREADS ENGINE`` prints bytes as JSON.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from bench.texts.candidates import CANDIDATES
from bench.texts.problem import TextProblem
from bench.texts.runtimes import CpuRuntime
from bench.texts.text_models import TextFiles
from stof.bench.memory import measure_run, peak_memory, read_feeds
from stof.bench.results import Record
from stof.files import strict_json
from stof.terminal import say


def measure_memory(problem: TextProblem, files: TextFiles, names: Collection[str], threads: int) -> Record:
    """By candidate, ``peak`` bytes of its process during a run, those ``held`` before it and those ``above`` them.

    Args:
        problem: whose batches are run.
        files: of the model.
        names: of the candidates.
        threads: that the runtime may use.

    Returns:
        The same for all that could run; of the others, why not, as ``missing``.
    """
    found: Record = {}
    for candidate in CANDIDATES:
        if candidate.name not in names:
            continue
        feeds = problem.batches(candidate.is_sorted).largest
        try:
            sizes = peak_memory(
                str(files.paths[candidate.kind]), feeds, threads, "bench.texts.memory", candidate.engine
            )
        except subprocess.CalledProcessError as failure:
            found[candidate.name] = {"missing": (failure.stderr.strip().splitlines() or [str(failure)])[-1]}
        else:
            found[candidate.name] = {"peak": sizes["held"] + sizes["above"], **sizes}
    return found


def main() -> int:
    """Loads a model, resets the peak, runs once, prints."""
    model, path, threads, engine = sys.argv[1:]
    feeds = read_feeds(path)
    run_batch = CpuRuntime(int(threads)).open(engine, Path(model), [feeds])
    say(strict_json.dumps(measure_run(lambda: run_batch(feeds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
