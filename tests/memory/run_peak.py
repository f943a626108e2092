# SPDX-License-Identifier: Apache-2.0
"""By how much a fresh process grows in its first run of a model, in ONNX Runtime with default options.

``python tests/memory/run_peak.py MODEL NAME=N ...`` prints the bytes: the peak of resident memory in the run over that before it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

import stof
from stof.system.memory import PeakMemory, resident_bytes


def measure_run(model: Path, sizes: Mapping[str, int]) -> int:
    """Bytes of a run in a process of its own.

    Args:
        model: a file; it may hold stof's operators.
        sizes: of the inputs' dimensions, by name.
    """
    words = [sys.executable, __file__, str(model), *(f"{name}={size}" for name, size in sizes.items())]
    environment = {**os.environ, "PYTHONPATH": str(Path(stof.__file__).parents[1])}
    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout.split()[-1])


def _draw(value: ort.NodeArg, sizes: Mapping[str, int], rng: np.random.Generator) -> np.ndarray:
    """Random numbers, small ones where they are indices; masks without padding."""
    shape = [d if isinstance(d, int) else sizes[d] for d in value.shape]
    if "bool" in value.type:
        return np.ones(shape, bool)
    if "int" in value.type:
        dtype = np.int32 if "int32" in value.type else np.int64
        drawn = np.ones(shape, dtype) if "mask" in value.name else rng.integers(3, 50, shape).astype(dtype)
        return np.broadcast_to(np.arange(shape[-1], dtype=dtype), shape).copy() if "position" in value.name else drawn
    return rng.standard_normal(shape).astype(np.float32)


def main(path: str, *words: str) -> None:
    """The command."""
    sizes = {name: int(size) for name, size in (word.split("=") for word in words)}
    options = ort.SessionOptions()
    options.log_severity_level = 3
    stof.register(options)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    feed = {value.name: _draw(value, sizes, rng) for value in session.get_inputs()}
    before = resident_bytes()
    peak = PeakMemory(os.getpid())
    session.run(None, feed)
    print(peak.peak_bytes() - before)


if __name__ == "__main__":
    main(*sys.argv[1:])
