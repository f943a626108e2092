# SPDX-License-Identifier: Apache-2.0
"""Comparisons of outputs with the contract: budgets, numbers that are none, and which of several is reported."""

from __future__ import annotations

import numpy as np
import pytest
from gqa_models import Shape, model_of

from stof.cached_attention.checks.contract_comparison import compare_original, compare_with_contract, worst_of
from stof.cached_attention.find import find_candidates
from stof.cached_attention.site import CacheSite
from stof.symbolic import Symbolic
from stof.verification.result import Comparison

EXACT = np.random.default_rng(3).standard_normal((5, 8))
ROUNDED = EXACT.astype(np.float32)
FP32 = np.dtype(np.float32)


def make_site() -> CacheSite:
    model = model_of(Shape())
    (candidate,) = find_candidates(model, Symbolic(model), "cpu")
    assert isinstance(candidate.site, CacheSite)
    return candidate.site


def changed(value: float) -> np.ndarray:
    found = EXACT.copy()
    found[2, 3] = value
    return found


def compare(found: np.ndarray, exact: np.ndarray = EXACT, unused: int = 0) -> Comparison:
    return compare_with_contract(make_site(), "present_key", found.astype(np.float32), exact, ROUNDED, FP32, unused)


@pytest.mark.parametrize("value", [EXACT[2, 3] + 1e-4, np.nan, np.inf])
def test_an_output_beyond_its_budget_is_named(value: float) -> None:
    found = compare(changed(value))
    assert not found.ok
    assert found.detail.startswith("present_key")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_where_the_contract_has_none_is_reported_behind_outputs_that_agree(value: float) -> None:
    good, bad = compare(ROUNDED), compare(ROUNDED, changed(value))
    assert good.ok
    assert not bad.ok
    assert worst_of([good, bad]) is not good
    assert not worst_of([good, bad]).ok
    assert not worst_of([bad, good]).ok


def test_a_failure_without_a_budget_is_reported_beside_a_full_one() -> None:
    full = Comparison("site", 1.0, 1.0, True)
    assert not worst_of([full, compare(changed(np.nan))]).ok


def test_all_elements_are_counted() -> None:
    found = worst_of([compare(ROUNDED, unused=7), compare(ROUNDED)])
    assert (found.coverage.compared, found.coverage.unused) == (80, 7)


@pytest.mark.parametrize("value", [EXACT[2, 3] + 1e-3, np.nan, np.inf])
def test_an_original_that_computes_something_else(value: float) -> None:
    assert compare_original(make_site(), ROUNDED, EXACT, ROUNDED) is None
    found = compare_original(make_site(), changed(value).astype(np.float32), EXACT, ROUNDED)
    assert found is not None
    assert not found.ok
