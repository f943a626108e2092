# SPDX-License-Identifier: Apache-2.0
"""The library through its C ABI: masks against Python's own evaluation, attention against fp64."""

from __future__ import annotations

import numpy as np
import pytest

from stof.runtime import LibraryError, Mask, Op, build_info

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


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray, policy: str) -> np.ndarray:
    """Attention in fp64, [B, H, S, D] with as many key heads as query heads."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    plain = np.einsum("bhsd,bhtd->bhst", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(allowed, plain, -np.inf)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    empty = ~np.broadcast_to(allowed, scores.shape).any(-1, keepdims=True)
    if policy == "zero":
        weights = np.where(empty, 0.0, weights)
    elif policy == "mean":
        weights = np.where(empty, 1.0 / k.shape[2], weights)
    elif policy == "all":
        full = np.exp(plain - plain.max(-1, keepdims=True))
        weights = np.where(empty, full / full.sum(-1, keepdims=True), weights)
    return np.einsum("bhst,bhtd->bhsd", weights, v)


@pytest.mark.parametrize("policy", ["zero", "nan", "mean", "all"])
@pytest.mark.parametrize("expression", ["", "abs(q - k) <= 7", "k <= q and q - k <= 40", "k < 3 or q % 5 == 1"])
@pytest.mark.parametrize(("S", "T", "D", "Dv"), [(70, 70, 16, 16), (97, 131, 64, 64), (1, 65, 24, 8), (49, 1, 3, 5)])
def test_attention_against_fp64(policy: str, expression: str, S: int, T: int, D: int, Dv: int) -> None:
    rng = np.random.default_rng(S * 1000 + T)
    B, H = 2, 4
    q = rng.standard_normal((B, H, S, D)).astype(np.float32)
    k = rng.standard_normal((B, H, T, D)).astype(np.float32)
    v = rng.standard_normal((B, H, T, Dv)).astype(np.float32)
    pad = np.ones((B, T), np.int64)
    pad[0, : T // 3] = 0
    pad[1, T - T // 4 :] = 0
    mask = f"({expression}) and pad[b, k]" if expression else "pad[b, k]"
    allowed = Mask(mask).evaluate(B, H, S, T, 0, {"pad": pad != 0})
    wanted = reference(q, k, v, allowed, policy)
    found = np.full((B, H, S, Dv), 12345.0, np.float32)
    Op("StofAttention", {"mask": mask, "operands": "pad", "empty_rows": policy}).run([q, k, v, pad], [found], threads=2)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    good = ~np.isnan(wanted)
    assert np.abs(found - wanted)[good].max(initial=0.0) < 4e-6


@pytest.mark.parametrize(
    ("name", "value"), [("scale", 1), ("softcap", "30"), ("num_heads", 4.0), ("mask", 3), ("empty_rows", 0.5)]
)
def test_attributes_of_another_type_are_refused(name: str, value: float | str) -> None:
    with pytest.raises(LibraryError, match=f"attribute {name} is of another type"):
        Op("StofAttention", {name: value})


def test_build_info_names_the_backend() -> None:
    info = build_info()
    assert info["backends"] == ["cpu"]
    assert info["cpu_isa"] in ("portable", "avx2", "avx512")


@pytest.mark.parametrize(("scale", "softcap"), [(1.0, 1e-45), (1.0, 3e38), (1e10, 1e-25), (1.0, -1.0)])
def test_a_softcap_that_overflows_is_refused(scale: float, softcap: float) -> None:
    with pytest.raises(LibraryError, match="softcap"):
        Op("StofAttention", {"scale": scale, "softcap": softcap})
