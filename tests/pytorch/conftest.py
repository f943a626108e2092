# SPDX-License-Identifier: Apache-2.0
"""Tests of ``stof.torch``. They run where PyTorch is installed: the part "PyTorch" of tools/test.sh fails without it."""

from __future__ import annotations

import importlib.util
import os

# A folder named torch on the path of imports would be found, too, if this one had that name.
HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if HAS_TORCH else ["test_*.py"]

if HAS_TORCH:
    # Compiling starts processes otherwise, one for each core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_report_header() -> str:
    """A line where the tests of this folder are left out."""
    return (
        ""
        if HAS_TORCH
        else "tests/pytorch: left out, PyTorch is not installed; tools/test.sh runs them (make test-all)"
    )
