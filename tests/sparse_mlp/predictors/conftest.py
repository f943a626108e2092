# SPDX-License-Identifier: Apache-2.0
"""NumPy multiplies in one thread: on shared cores, threads of small matmuls wait for each other for minutes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="package", autouse=True)
def _one_thread() -> Iterator[None]:
    libraries = Path(np.__file__).parents[1].glob("numpy.libs/*openblas*")  # wheels have one; others run as they do
    loaded = [ctypes.CDLL(str(path)) for path in libraries]
    found = [(x.scipy_openblas_get_num_threads64_(), x.scipy_openblas_set_num_threads64_) for x in loaded
             if hasattr(x, "scipy_openblas_set_num_threads64_")]  # fmt: skip
    for _, set_threads in found:
        set_threads(1)
    yield
    for threads, set_threads in found:
        set_threads(threads)
