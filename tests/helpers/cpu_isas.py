# SPDX-License-Identifier: Apache-2.0
"""The names of the instruction sets of CPU kernels, as C++ lists them."""

from __future__ import annotations

import re
from pathlib import Path

LIST = Path(__file__).resolve().parents[2] / "plugins/core/base/cpu_isas.h"

CPU_ISAS = tuple(re.findall(r"ISA\(k\w+, (\w+),", LIST.read_text()))
