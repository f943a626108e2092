# SPDX-License-Identifier: Apache-2.0
"""Tests that parse and build need TensorRT: tools/test_parts/engines.sh makes an environment with it and runs them all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

collect_ignore = [] if os.environ.get("STOF_TEST_TENSORRT") == "1" else ["test_build.py"]
