# SPDX-License-Identifier: Apache-2.0
"""Optimizes a text encoder, runs both files in ONNX Runtime and compares them.

``python examples/optimize_and_run.py model.onnx [--length N]`` writes ``model.stof.onnx``, and ends with an error unless both
files give the same outputs. The model has the inputs ``input_ids`` and ``attention_mask`` [batch, sequence].
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import onnxruntime as ort

import stof


def run(path: Path, feeds: dict[str, np.ndarray]) -> tuple[list[np.ndarray], float]:
    """The outputs, and the seconds of the second run."""
    options = ort.SessionOptions()
    stof.register(options)  # the library of stof's operators; the original does not need it
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    session.run(None, feeds)
    began = time.perf_counter()
    outputs = session.run(None, feeds)
    return outputs, time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--length", type=int, default=512)
    arguments = parser.parse_args()
    original, optimized = arguments.model, arguments.model.with_suffix(".stof.onnx")

    # Verified against the original before the file appears. Sizes in use decide what is replaced: Options(shapes=...).
    report = stof.optimize(original, optimized)
    print(report.to_text())
    if not report.replaced:
        print("nothing to replace")
        return 1

    rng = np.random.default_rng(0)
    ids = rng.integers(0, 90, (2, arguments.length))
    mask = np.ones_like(ids)
    mask[1, arguments.length // 2 :] = 0  # the second sequence is padded
    feeds = {"input_ids": ids, "attention_mask": mask}
    (expected, before), (found, after) = run(original, feeds), run(optimized, feeds)
    print(f"{before * 1e3:.1f} ms -> {after * 1e3:.1f} ms at batch 2, length {arguments.length}")
    worst = max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(expected, found, strict=True))
    print(f"largest difference: {worst:.1e} of the largest value")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
