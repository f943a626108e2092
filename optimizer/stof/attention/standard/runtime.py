# SPDX-License-Identifier: Apache-2.0
"""What ONNX Runtime's CPU provider has of the operator ``Attention``."""

from __future__ import annotations

from dataclasses import dataclass

from stof.execution.runtime_faults import RuntimeFault
from stof.execution.session_process import RuntimeFailure, has_onnxruntime


@dataclass(frozen=True)
class AttentionRuntime:
    """The runtime in which a written model has to run.

    Attributes:
        has_windows: it takes ``left_window_size`` and ``right_window_size`` of opset 25.
    """

    has_windows: bool = False


def installed_runtime() -> AttentionRuntime:
    """The one that is installed; without one, the least that any has."""
    try:
        return AttentionRuntime(has_onnxruntime() and not RuntimeFault.NO_ATTENTION_WINDOWS.is_present())
    except RuntimeFailure:
        return AttentionRuntime()
