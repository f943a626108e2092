# SPDX-License-Identifier: Apache-2.0
"""Which pairs numbers that are added leave allowed: of few numbers or many, the same."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from stof.mask.evaluate import evaluate_term, is_not_zero
from stof.mask.site import MaskTerm, TermKind
from stof.mask.strength import LOWEST, forbids_softly

_TYPES = {np.float16: TensorProto.FLOAT16, np.float32: TensorProto.FLOAT, np.float64: TensorProto.DOUBLE}


def _wanted(value: np.ndarray, scale: float, dtype: int) -> np.ndarray:
    """By one number at a time."""
    numbers = value.astype(np.float64)
    others = sorted({float(x) for x in numbers.reshape(-1) if x != 0})
    soft = bool(others) and forbids_softly([others[0], others[-1]], scale)
    limit = -LOWEST.get(dtype, LOWEST[TensorProto.FLOAT]) / 2
    allowed = [not (x * scale <= limit or (soft and x * scale < 0)) for x in numbers.reshape(-1)]
    return np.array(allowed).reshape(value.shape)


@pytest.mark.parametrize("kind", _TYPES, ids=lambda k: k.__name__)
@pytest.mark.parametrize("scale", [1.0, 0.125, -1.0])
@pytest.mark.parametrize(
    "numbers",
    [(0,), (-np.inf,), (0, -np.inf), (0, -10000), (-0.0, 0.0), (0, -3), (0, -1e4, -3e4), (0, -10000, 2), (5, 10000)],
)
def test_pairs_are_kept_whatever_numbers_there_are(kind: type, scale: float, numbers: tuple[float, ...]) -> None:
    value = np.random.default_rng(0).choice(np.array(numbers, kind), (1, 2, 7, 5))
    term = MaskTerm(TermKind.ADD, "m", scale=scale)
    for case in (value, np.broadcast_to(value[:, :1, :, :1], value.shape), value[..., ::2]):
        np.testing.assert_array_equal(evaluate_term(term, case, _TYPES[kind]), _wanted(case, scale, _TYPES[kind]))


@pytest.mark.parametrize("kind", _TYPES, ids=lambda k: k.__name__)
def test_what_is_not_zero(kind: type) -> None:
    value = np.array([0.0, -0.0, 6e-8, -6e-8, np.inf, -np.inf, np.nan, 1.0], kind)
    np.testing.assert_array_equal(is_not_zero(value), value != 0)
    assert evaluate_term(MaskTerm(TermKind.ADD, "m"), value[:0], _TYPES[kind]).shape == (0,)
