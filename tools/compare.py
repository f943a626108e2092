# SPDX-License-Identifier: Apache-2.0
"""Times an original and an optimized model in turns, in one process, and compares their outputs."""

from __future__ import annotations

import argparse
import os
import sys
import time

import numpy as np
import onnxruntime as ort

import stof


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("original")
    parser.add_argument("optimized")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--threads", type=int, default=cores, help="all cores by default")
    parser.add_argument("--budget", type=float, default=60.0, metavar="SECONDS", help="no new round after this (60)")
    arguments = parser.parse_args()
    sessions = []
    for path in (arguments.original, arguments.optimized):
        options = ort.SessionOptions()
        options.intra_op_num_threads = arguments.threads
        stof.register(options)
        sessions.append(ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]))
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 90, (1, arguments.length))
    feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    best = [float("inf")] * 2
    outputs = []
    began = time.perf_counter()
    rounds = 0
    for number in range(arguments.rounds + 1):
        if number > 1 and time.perf_counter() - began > arguments.budget:
            break
        rounds = number
        for i, session in enumerate(sessions):
            start = time.perf_counter()
            result = session.run(None, feeds)[0]
            if number == 0:
                outputs.append(result)  # the first round warms up
            else:
                best[i] = min(best[i], time.perf_counter() - start)
    difference = float(np.abs(outputs[0] - outputs[1]).max())
    print(f"length {arguments.length}, {arguments.threads} threads, best of {rounds} interleaved runs:")
    print(f"  original   {best[0] * 1e3:9.1f} ms")
    print(f"  optimized  {best[1] * 1e3:9.1f} ms")
    span = float(outputs[0].max() - outputs[0].min())
    print(
        f"The optimized model is {best[0] / best[1]:.2f} times as fast; outputs differ by {difference:.1e} at most, "
        f"of a range of {span:.1f}."
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
