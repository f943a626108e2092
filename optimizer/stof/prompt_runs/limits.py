# SPDX-License-Identifier: Apache-2.0
"""Limits of runs on prompts."""

from __future__ import annotations

from stof.execution.run_limits import RunLimits

_SECONDS = 86400.0  # a day: --verify-budget is not for prompts


def prompt_limits(memory: int) -> RunLimits:
    """The limits of one run over prompts.

    Args:
        memory: bytes; 0: half of what is free.
    """
    return RunLimits(_SECONDS, memory)
