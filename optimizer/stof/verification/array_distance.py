# SPDX-License-Identifier: Apache-2.0
"""How large arrays are, how far two are apart, and what rounding moves them by."""

from __future__ import annotations

import numpy as np

_EPSILON = {"float32": 1.2e-7, "float16": 9.8e-4, "bfloat16": 7.9e-3}


def largest_number(array: np.ndarray) -> float:
    """The largest absolute value of finite elements; 0 where there is none."""
    return float(np.abs(array[np.isfinite(array)].astype(np.float64)).max(initial=0.0))


def largest_difference(one: np.ndarray, other: np.ndarray) -> float:
    """The largest absolute difference of elements; NaN where one is NaN."""
    return float(np.abs(one.astype(np.float64) - other).max(initial=0.0))


def ulp_of_largest(array: np.ndarray, dtype: np.dtype) -> float:
    """The unit in the last place of an array's largest number in a type; that of fp32 for types without an own one."""
    return _EPSILON.get(dtype.name, _EPSILON["float32"]) * largest_number(array)
