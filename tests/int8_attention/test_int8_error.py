# SPDX-License-Identifier: Apache-2.0
"""The error of attention with 8-bit operands in fp64: its bounds, and what each choice of the scheme is for."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from helpers.int8_attention import Inputs, attend, draw, exact, relative_rms
from stof.attention.checks.eight_bit_model import SCORES_ALONE, KeyValueHead, Scheme, to_fp8

INT8, INT8_FP8 = 0.015, 0.045  # the bounds
FAMILIES = ("gaussian", "offset", "sink")


def error(inputs: Inputs, scheme: Scheme, allowed: np.ndarray | None = None) -> float:
    return relative_rms(attend(inputs, scheme, allowed), exact(inputs, allowed))


def window(queries: int, keys: int, width: int, sinks: int) -> np.ndarray:
    """Causal, the last queries; the ``width`` keys before a query and the first ``sinks``."""
    q, k = np.arange(queries)[:, None] + keys - queries, np.arange(keys)
    return np.asarray((k <= q) & ((q - k < width) | (k < sinks)))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("keys", [128, 700, 4096])
@pytest.mark.parametrize("family", FAMILIES)
def test_errors_stay_below_the_bounds(family: str, keys: int, size: int) -> None:
    inputs = draw(family, 128, keys, size, seed=keys + size)
    assert error(inputs, SCORES_ALONE) <= INT8
    assert error(inputs, Scheme()) <= INT8_FP8


@pytest.mark.parametrize("family", FAMILIES)
def test_errors_under_a_window_with_sinks(family: str) -> None:
    inputs = draw(family, 128, 1024, 128, seed=5)
    allowed = window(128, 1024, width=200, sinks=4)
    assert error(inputs, SCORES_ALONE, allowed) <= INT8
    assert error(inputs, Scheme(), allowed) <= INT8_FP8


def test_nothing_quantized_is_attention() -> None:
    plain = Scheme(quantize_scores=False, quantize_weights=False, quantize_values=False)
    assert error(draw("sink", 64, 500, 64, seed=1), plain) < 1e-13


def test_the_mean_is_what_offsets_need() -> None:
    inputs = draw("offset", 128, 2048, 128, seed=2)
    assert error(inputs, replace(SCORES_ALONE, remove_mean=False)) > 4 * error(inputs, SCORES_ALONE)


def test_groups_keep_an_outlier_away_from_other_keys() -> None:
    inputs = draw("gaussian", 128, 256, 128, seed=3)
    key = inputs.key.copy()
    key[0] *= 8
    inputs = replace(inputs, key=key)
    allowed = np.broadcast_to(np.arange(256) > 0, (128, 256))  # the outlier itself is not attended
    assert error(inputs, replace(SCORES_ALONE, key_scales="tile"), allowed) > 1.5 * error(inputs, SCORES_ALONE, allowed)


def test_short_accumulators_need_promotion_over_long_sequences() -> None:
    inputs = draw("gaussian", 8, 65536, 64, seed=4)
    inputs = replace(inputs, value=inputs.value + 1)  # products that all have one sign
    assert error(inputs, replace(Scheme(), promote_every=0)) > 2 * error(inputs, Scheme())


def test_less_headroom_loses_small_weights() -> None:
    inputs = draw("sink", 128, 4096, 64, seed=6)
    assert error(inputs, replace(Scheme(), headroom=3.0)) > 1.3 * error(inputs, Scheme())


@pytest.mark.parametrize(("scheme", "bound"), [(SCORES_ALONE, INT8), (Scheme(), INT8_FP8)])
def test_sinks_meet_scores_that_lack_the_mean(scheme: Scheme, bound: float) -> None:
    """A sink is a column of the softmax; the product of the query and the mean is given back to it."""
    inputs = draw("offset", 64, 500, 64, seed=8)
    logit = 9.0
    scores = inputs.query @ inputs.key.T / 8
    weights = np.exp(scores - scores.max(1, keepdims=True))
    beside = np.exp(logit - scores.max(1))
    wanted = weights @ inputs.value / (weights.sum(1) + beside)[:, None]
    found = KeyValueHead.of(inputs.key, inputs.value, scheme).attend(inputs.query, sink=logit)
    assert (beside > 0.1 * weights.sum(1)).any()
    assert relative_rms(found, wanted) <= bound


def test_padding_may_hold_anything() -> None:
    inputs = draw("gaussian", 64, 300, 64, seed=9)
    real = np.arange(300) < 200
    allowed = np.broadcast_to(real, (64, 300))
    key, value = (np.where(real[:, None], x, 1e6) for x in (inputs.key, inputs.value))
    wanted = exact(Inputs(inputs.query, inputs.key[:200], inputs.value[:200]))
    for scheme, bound in ((SCORES_ALONE, INT8), (Scheme(), INT8_FP8)):
        found = KeyValueHead.of(key, value, scheme, real).attend(inputs.query, allowed=allowed)
        assert relative_rms(found, wanted) <= bound


def test_e4m3() -> None:
    given = [0.0, 1.0, 1.0625, 1.1875, 2.0**-9, 2.0**-10, 1.5 * 2.0**-9, 448.0, 1e6, -19.0, -21.0]
    wanted = [0.0, 1.0, 1.0, 1.25, 2.0**-9, 0.0, 2.0**-8, 448.0, 448.0, -20.0, -20.0]
    np.testing.assert_array_equal(to_fp8(np.array(given)), wanted)
