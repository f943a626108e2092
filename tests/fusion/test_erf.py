# SPDX-License-Identifier: Apache-2.0
"""The error function beside Python's own."""

from __future__ import annotations

import math

import numpy as np

from stof.fusion.description.erf import erf


def test_the_error_function_is_pythons() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([np.linspace(-7, 7, 50_001), rng.standard_normal(10_000), [0.0, -0.0, 1e-300, 6.0, 1e300]])
    found = erf(x)
    assert np.abs(found - [math.erf(v) for v in x]).max() <= 2 * np.finfo(np.float64).eps


def test_infinities_nan_and_shapes() -> None:
    np.testing.assert_array_equal(erf(np.array([[np.inf, -np.inf, np.nan]])), [[1.0, -1.0, np.nan]])
    assert erf(np.zeros((0, 3))).shape == (0, 3)
    assert float(erf(np.array(0.5))) == math.erf(0.5)
