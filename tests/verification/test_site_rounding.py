# SPDX-License-Identifier: Apache-2.0
"""The site check allows for the rounding of large scores in any order of their sums, and still finds faults."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto

from stof.attention.checks.site_comparison import compare_result, site_exactly
from stof.mask.site import AttentionSite, Layout, MaskTerm, Operand, TermKind
from stof.verification.result import Comparison

SHAPE = (1, 2, 40, 32)
WIDENED = "fp32 sums in other orders widened the budget"


def _site(rng: np.random.Generator, size: float) -> tuple[AttentionSite, dict[str, np.ndarray]]:
    """An attention without a mask whose scores have this size, with its tensors."""
    operands = dict(zip(("query", "key", "value"), (Operand(n, Layout.BHSD) for n in "qkv"), strict=True))
    heads = {"num_heads": 2, "kv_num_heads": 2, "head_size": 32, "value_head_size": 32, "scale": 32**-0.5}
    settings = {
        "name": "s",
        "index": 0,
        "softmax": "p",
        "output": "y",
        "output_layout": Layout.BHSD,
        "dtype": TensorProto.FLOAT,
    }
    site = AttentionSite(**operands, **heads, **settings)  # type: ignore[arg-type]
    arrays = {name: rng.standard_normal(SHAPE, np.float32) for name in "qkv"}
    arrays["q"] *= np.float32(size)
    return site, arrays


@pytest.mark.parametrize("size", [1.0, 40.0])
def test_one_order_of_sums_is_no_bound(size: float) -> None:
    """The original's result, here exact by chance, beside a result whose scores were summed in another order."""
    site, arrays = _site(np.random.default_rng(0), size)
    exact = site_exactly(site, arrays).output.astype(np.float32)
    arrays["y"] = exact
    other = site_exactly(site, arrays, np.float32, stride=3).output
    found = compare_result(site, other, arrays, exact, False, has_all_policy=False)
    assert found.ok, found
    # Faults are larger: a scale that is off by a thousandth, and one key that is left out.
    wrong = {**arrays, "q": arrays["q"] * np.float32(1.001)}
    assert not compare_result(
        site, site_exactly(site, wrong, np.float32).output, arrays, exact, False, has_all_policy=False
    ).ok
    fewer = {**arrays, "k": arrays["k"][:, :, 1:], "v": arrays["v"][:, :, 1:]}
    assert not compare_result(
        site, site_exactly(site, fewer, np.float32).output, arrays, exact, False, has_all_policy=False
    ).ok


def _compare(site: AttentionSite, arrays: dict[str, np.ndarray], mine: np.ndarray) -> Comparison:
    return compare_result(site, mine, arrays, arrays["y"], False, has_all_policy=False)


def test_a_loud_head_gives_no_budget_to_a_quiet_one() -> None:
    """Head 0 has large scores: its rounding errors are as large as a fault in head 1, which has to be found."""
    site, arrays = _site(np.random.default_rng(1), 1.0)
    arrays["q"][:, 0] *= np.float32(40)
    exact = site_exactly(site, arrays).output
    arrays["y"] = exact.astype(np.float32)
    other = site_exactly(site, arrays, np.float32, stride=3).output
    found = _compare(site, arrays, other)
    assert found.ok, found
    assert found.detail == WIDENED
    faulty = other.copy()
    faulty[:, 1] += np.float32(np.abs(other - exact)[:, 0].max())
    found = _compare(site, arrays, faulty)
    assert not found.ok, found
    assert "largest at (b, h, q, d) = (0, 1, " in found.detail


def test_rows_without_a_key_keep_their_budget() -> None:
    """Row 3 attends no key: the original's numbers count there, and rounding of large scores in other rows does not."""
    site, arrays = _site(np.random.default_rng(1), 40.0)
    arrays["mask"] = np.zeros((1, 1, SHAPE[2], SHAPE[2]), np.float32)
    arrays["mask"][:, :, 3] = np.finfo(np.float32).min
    term = MaskTerm(TermKind.ADD, "mask")
    site = replace(site, terms=(term,))
    exact = site_exactly(site, arrays).output
    arrays["y"] = exact.astype(np.float32)
    other = site_exactly(site, arrays, np.float32, stride=3).output
    other[:, :, 3] = arrays["y"][:, :, 3]
    found = _compare(site, arrays, other)
    assert found.ok, found
    assert found.detail == WIDENED
    other[:, :, 3] += np.float32(np.abs(other - exact).max())
    found = _compare(site, arrays, other)
    assert not found.ok, found
    assert ", 3, " in found.detail
