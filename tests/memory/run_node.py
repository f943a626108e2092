# SPDX-License-Identifier: Apache-2.0
"""How much memory a run of a small model takes at most, without an arena: ``python run_node.py MODEL FEED`` prints the bytes."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import stof
from stof.system.memory import PeakMemory, resident_bytes


def measure_node(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> int:
    """Bytes of a run in a process of its own, in which every large block is mapped and unmapped by itself."""
    with tempfile.TemporaryDirectory() as folder:
        path, arrays = Path(folder) / "model.onnx", Path(folder) / "feed.npz"
        onnx.save(model, path)
        np.savez(arrays, **feed)  # type: ignore[arg-type]
        words = [sys.executable, __file__, str(path), str(arrays)]
        folder_of_stof = str(Path(stof.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": folder_of_stof, "MALLOC_MMAP_THRESHOLD_": "65536"}
        done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1])


def main(path: str, arrays: str) -> None:
    """The command."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_cpu_mem_arena = False
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    stof.register(options)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    with np.load(arrays) as stored:
        feed = dict(stored)
    before = resident_bytes()
    peak = PeakMemory(os.getpid())
    session.run(None, feed)
    print(peak.peak_bytes() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
