# SPDX-License-Identifier: Apache-2.0
"""The library through its C ABI: masks against Python's own evaluation, attention against fp64."""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401  -- makes NumPy know bfloat16
import numpy as np
import pytest
from tests.helpers.cpu_isas import CPU_ISAS

from stof.attention.checks.reference import assert_close, random_problem, reference
from stof.mask.site import EmptyRows
from stof.runtime.library import LibraryError, Mask, Op, build_info

EXPRESSIONS = [
    "abs(q - k) <= 9",
    "k <= q and q - k <= 20",
    "(q - k) % 3 == 0 or k < 4",
    "q // 16 == k // 16",
    "not (k > q) and (h + k // 8) % 4 != 1",
    "min(q, k) >= 2 and max(q, k) - S // 2 < 30",
]


def evaluate(expression: str, H: int, S: int, T: int) -> np.ndarray:
    """The oracle: the grammar is a subset of Python's."""
    allowed = np.zeros((1, H, S, T), bool)
    for h in range(H):
        for q in range(S):
            for k in range(T):
                names = {"b": 0, "h": h, "q": q, "k": k, "S": S, "T": T, "P": 0, "abs": abs, "min": min, "max": max}
                allowed[0, h, q, k] = eval(expression, {"__builtins__": {}}, names)
    return allowed


@pytest.mark.parametrize("expression", EXPRESSIONS)
@pytest.mark.parametrize(("S", "T"), [(33, 47), (64, 64), (1, 5)])
def test_masks_are_python_expressions(expression: str, S: int, T: int) -> None:
    found = Mask(expression).evaluate(1, 5, S, T)
    np.testing.assert_array_equal(found, evaluate(expression, 5, S, T))


@pytest.mark.parametrize(
    "bad", ["q +", "q < k < 3", "q // k", "foo[b, k]", "q", "1 // 0 == k", "(" * 80 + "q" + ")" * 80]
)
def test_malformed_expressions_are_refused(bad: str) -> None:
    with pytest.raises(LibraryError):
        Mask(bad)


@pytest.mark.parametrize("policy", ["zero", "nan", "mean", "all"])
@pytest.mark.parametrize("expression", ["", "abs(q - k) <= 7", "k <= q and q - k <= 40", "k < 3 or q % 5 == 1"])
@pytest.mark.parametrize(("S", "T", "D", "Dv"), [(70, 70, 16, 16), (97, 131, 64, 64), (1, 65, 24, 8), (49, 1, 3, 5)])
def test_attention_against_fp64(policy: str, expression: str, S: int, T: int, D: int, Dv: int) -> None:
    rng = np.random.default_rng(S * 1000 + T)
    problem = random_problem(
        rng, 4, 4, S, D, G=2, T=T, Dv=Dv, mask=expression, padded=True, empty_rows=EmptyRows(policy)
    )
    assert_close(problem.run(threads=2), reference(problem))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_types_against_fp64(dtype: str) -> None:
    rng = np.random.default_rng(5)
    problem = random_problem(rng, 2, 4, 83, 32, mask="abs(q - k) <= 9", dtype=np.dtype(dtype), padded=True)
    assert_close(problem.run(), reference(problem))


@pytest.mark.parametrize(
    "settings",
    [
        {"softcap": 5.0},
        {"scale": 0.7},
        {"query_offset": True, "T": 90},
        {"mask": "segment_q[b, q] == segment_k[b, k]", "segments": True},
        {"mask": "table0[q, k]", "table": True},
        {"bias": True},
        {"bias": True, "T": 0},
    ],
    ids=str,
)
def test_every_setting_against_fp64(settings: dict[str, Any]) -> None:
    rng = np.random.default_rng(7)
    settings = dict(settings)
    S, T = 61, settings.pop("T", 61)
    if settings.pop("segments", False):
        segments = np.sort(rng.integers(0, 4, (2, S)), axis=1)
        settings["operands"] = {"segment_q": segments, "segment_k": segments}
    if settings.pop("table", False):
        settings["operands"] = {"table0": rng.random((S, T)) < 0.2}
    if settings.get("bias"):
        bias = rng.standard_normal((1, 4, S, T)).astype(np.float32)
        bias[:, :, 7] = -np.inf
        settings["bias"] = bias
    problem = random_problem(rng, 2, 4, S, 16, T=T, **settings)
    assert_close(problem.run(), reference(problem))


def test_a_difference_is_told_with_its_place() -> None:
    problem = random_problem(np.random.default_rng(0), 1, 2, 9, 8)
    wanted = reference(problem)
    found = wanted.astype(np.float32)
    assert_close(found, wanted)
    found[0, 1, 3, 4] += 0.5
    with pytest.raises(AssertionError, match=r"difference 5\.0+e-01 at \(0, 1, 3, 4\)"):
        assert_close(found, wanted)
    found[0, 0, 2, 1] = np.nan
    with pytest.raises(AssertionError, match=r"1 NaN or inf out of place, first at \(0, 0, 2, 1\)"):
        assert_close(found, wanted)
    with pytest.raises(AssertionError, match="shape"):
        assert_close(found[:, :1], wanted)


@pytest.mark.parametrize(
    ("name", "value"), [("scale", 1), ("softcap", "30"), ("num_heads", 4.0), ("mask", 3), ("empty_rows", 0.5)]
)
def test_attributes_of_another_type_are_refused(name: str, value: float | str) -> None:
    with pytest.raises(LibraryError, match=f"attribute {name} is of another type"):
        Op("StofAttention", {name: value})


def test_build_info_names_the_backend() -> None:
    info = build_info()
    assert info["backends"] == ["cpu"]
    assert info["cpu_isa"] in CPU_ISAS


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 1e-45), (1.0, 3e38), (1e10, 1e-25), (1.0, -1.0)])
def test_a_softcap_that_overflows_is_refused(scale: float, softcap: float) -> None:
    with pytest.raises(LibraryError, match="softcap"):
        Op("StofAttention", {"scale": scale, "softcap": softcap})
