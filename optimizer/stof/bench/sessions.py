# SPDX-License-Identifier: Apache-2.0
"""Sessions of ONNX Runtime on the CPU whose runs are timed."""

from __future__ import annotations

import importlib
from typing import Any

from stof.runtime import library


def session(model: bytes | str, threads: int, *, stof: bool = False, profile: str | None = None) -> Any:
    """A session on the CPU provider with a fixed number of threads and every graph optimization."""
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    if stof:
        library.register(options)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)
