# SPDX-License-Identifier: Apache-2.0
"""In the ONNX Runtime of this environment: optimized models give the originals' outputs, with the library and without.

``check.py FOLDER LIBRARY VERSION``, after tests/runtimes/prepare.py. Needs numpy and onnxruntime alone, so that it runs beside
any version of them.
"""

from __future__ import annotations

import ctypes
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

# Of the outputs' range: fp32 sums in another order, through a few layers.
ALLOWED = 2e-5
# ONNX Runtime 1.18's own fusion of attention aborts the process on a LayerNormalization without bias, which the original
# ModernBERT has as well: users of that version have to switch it off for the original, too.
DISABLED = ["AttentionFusion"] if ort.__version__.startswith("1.18.") else []


def session(path: Path, library: str | None) -> Any:
    """A CPU session with every graph optimization that this version survives."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if library is not None:
        options.register_custom_ops_library(library)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"], disabled_optimizers=DISABLED)


class Kernels:
    """Tells whether kernels of the library ran: each run asks the library's cache of block masks."""

    def __init__(self, library: str) -> None:
        self._stats = ctypes.CDLL(library).stof_block_mask_cache_stats
        self._seen = self._count()

    def _count(self) -> int:
        stats = (ctypes.c_int64 * 5)()
        self._stats(stats, ctypes.c_int(0))
        return stats[2] + stats[3]  # hits and misses

    def ran(self) -> bool:
        """Since the last call."""
        before, self._seen = self._seen, self._count()
        return self._seen > before


def fewer_outputs(folder: Path, library: str) -> str | None:
    """What is wrong with nodes of fewer outputs than their operator has: one runs, one is refused by its name."""
    values = np.random.default_rng(0).standard_normal((3, 1, 2, 8, 16)).astype(np.float32)
    found = session(folder / "runs.onnx", library).run(None, dict(zip("qkv", values, strict=True)))
    if len(found) != 1 or found[0].shape != values[0].shape or not np.isfinite(found[0]).all():
        return "attention with one of two outputs gives no output"
    try:
        session(folder / "refused.onnx", library).run(None, {"x": values[0, 0, 0]})
    except Exception as error:
        return None if "has 1 outputs" in str(error) else f"the error about outputs is {error}"
    return "a chain with one of two outputs was taken"


def main(folder: Path, library: str, version: str) -> int:
    """Compares every model of the folder at every input; 1 when one differs."""
    if ort.__version__ != version:
        print(f"this is onnxruntime {ort.__version__}, expected {version}")
        return 1
    originals = sorted(p for p in folder.glob("*.onnx") if not p.name.endswith(".stof.onnx"))
    worst, count = {"library": 0.0, "function body": 0.0}, 0
    seconds = dict.fromkeys(worst, 0.0)
    kernels = Kernels(library)
    for path in originals:
        optimized = path.with_name(path.name.replace(".onnx", ".stof.onnx"))
        reference = session(path, None)
        for how, candidate in (("library", session(optimized, library)), ("function body", session(optimized, None))):
            kernels.ran()
            for file in sorted(folder.glob(f"{path.stem}.*.npz")):
                with np.load(file) as arrays:
                    feeds = {n: arrays[n] for n in arrays.files}
                start = time.perf_counter()
                results = candidate.run(None, feeds)
                seconds[how] += time.perf_counter() - start
                for value, expected, found in zip(
                    reference.get_outputs(), reference.run(None, feeds), results, strict=True
                ):
                    if not (np.isfinite(expected).all() and found.shape == expected.shape and np.ptp(expected) > 0):
                        print(f"{file.name}: output {value.name} is no result to compare with")
                        return 1
                    error = float(np.abs(found - expected).max() / np.ptp(expected))
                    worst[how], count = max(worst[how], error), count + 1
                    if not error <= ALLOWED:
                        print(f"{file.name}, {how}: output {value.name} differs by {error:.1e} of its range")
                        return 1
            if kernels.ran() != (how == "library"):
                print(f"{optimized.name}, {how}: the library's kernels {'ran' if how != 'library' else 'did not run'}")
                return 1
    wrong = fewer_outputs(folder / "fewer", library)
    if wrong is not None:
        print(wrong)
        return 1
    if count == 0:
        print(f"nothing to compare in {folder}")
        return 1
    figures = ", ".join(f"{how} worst {worst[how]:.1e} in {seconds[how]:.2f} s" for how in worst)
    print(f"onnxruntime {version}, numpy {np.__version__}: {len(originals)} models, {count} outputs, {figures}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
