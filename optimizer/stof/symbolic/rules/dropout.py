# SPDX-License-Identifier: Apache-2.0
"""Tells whether a Dropout drops elements."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx


def may_drop(node: onnx.NodeProto, constant: Callable[[str], np.ndarray | None]) -> bool:
    """Whether a Dropout may change its input: in training mode with a ratio above 0, or where either is unknown.

    Before opset 12 it has neither input, and runtimes run it in inference mode.

    Args:
        node: the Dropout.
        constant: gives the value of a constant tensor, None for others.
    """
    ratio, training = ((*node.input, "", "")[i] for i in (1, 2))
    if not training or _is_zero(constant(training)):
        return False
    return not ratio or not _is_zero(constant(ratio))


def _is_zero(value: np.ndarray | None) -> bool:
    return value is not None and value.size == 1 and not value.reshape(-1)[0]
