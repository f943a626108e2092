# SPDX-License-Identifier: Apache-2.0
"""The site check allows for the rounding of large scores in any order of their sums, and still finds faults."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from stof.attention.checks.site_comparison import compare_result, site_exactly
from stof.mask.site import AttentionSite, Layout, Operand

SHAPE = (1, 2, 40, 32)


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
