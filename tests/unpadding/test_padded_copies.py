# SPDX-License-Identifier: Apache-2.0
"""What kernels that run over padded copies of packed sequences leave padded."""

from __future__ import annotations
