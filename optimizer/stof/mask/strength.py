# SPDX-License-Identifier: Apache-2.0
"""The numbers that forbid when they are added to scores, and how strongly they do."""

from __future__ import annotations

from collections.abc import Sequence

from onnx import TensorProto

from stof.mask.site import FORBIDDING_VALUE

LOWEST: dict[int, float] = {  # the absolute value of a type's lowest finite number
    TensorProto.FLOAT: 3.4028234663852886e38,
    TensorProto.DOUBLE: 1.7976931348623157e308,
    TensorProto.FLOAT16: 65504.0,
    TensorProto.BFLOAT16: 3.3895313892515355e38,
}
FLOOR = -LOWEST[TensorProto.FLOAT]
UNDERFLOW = -1e3  # its exponential is 0 in fp32 and fp64
ABSORBING = -1e8  # a number above it leaves a score visible that it is added to


def forbidding_limit(dtype: int) -> float:
    """The number at and below which an entry of an ONNX element type forbids whatever else its mask holds."""
    return -LOWEST.get(dtype, LOWEST[TensorProto.FLOAT]) / 2


def forbids_softly(numbers: Sequence[float], scale: float) -> bool:
    """Whether the numbers of a mask besides 0 are so low that they forbid, times ``scale`` as well."""
    strengths = [x if scale > 0 else -x for x in numbers]
    return bool(strengths) and max(strengths) <= FORBIDDING_VALUE and max(strengths) * abs(scale) <= UNDERFLOW
