# SPDX-License-Identifier: Apache-2.0
"""Whether a Dropout drops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx


def may_drop(node: onnx.NodeProto, constant: Callable[[str], np.ndarray | None]) -> bool:
    """Whether a Dropout may give anything but its input: in training mode, or where that is only known at run time.

    Before opset 12 it has neither of these inputs, and runtimes infer.

    Args:
        node: the Dropout.
        constant: the value of a tensor, None where there is no single one.
    """
    ratio, training = ((*node.input, "", "")[i] for i in (1, 2))
    if not training or _is_zero(constant(training)):
        return False
    return not ratio or not _is_zero(constant(ratio))


def _is_zero(value: np.ndarray | None) -> bool:
    return value is not None and value.size == 1 and not value.reshape(-1)[0]
