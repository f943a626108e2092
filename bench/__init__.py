# SPDX-License-Identifier: Apache-2.0
"""stof beside its baselines, run from a clone: ``python -m bench COMMAND`` (docs/design/benchmarks.md). No wheel carries it."""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("stof") is None:  # the clone's own, which finds a library by STOF_LIBRARY
    sys.path.append(str(Path(__file__).resolve().parent.parent / "optimizer"))
