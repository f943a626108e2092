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


def relative_rms(array: np.ndarray, exact: np.ndarray, kept: np.ndarray | None = None) -> float | None:
    """The root mean square of the differences over that of ``exact``, in fp64; None where all numbers of that are 0.

    Args:
        array: numbers of any type.
        exact: those that they should be.
        kept: the elements that count; None: those that are finite in both.
    """
    if kept is None:
        kept = np.isfinite(array) & np.isfinite(exact)
    wanted = exact[kept].astype(np.float64)
    size = float(np.square(wanted).sum())
    if not size:
        return None
    return float(np.sqrt(np.square(array[kept].astype(np.float64) - wanted).sum() / size))


def ulp_of_largest(array: np.ndarray, dtype: np.dtype) -> float:
    """The unit in the last place of an array's largest number in a type; that of fp32 for types without an own one."""
    return _EPSILON.get(dtype.name, _EPSILON["float32"]) * largest_number(array)
