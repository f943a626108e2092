# SPDX-License-Identifier: Apache-2.0
"""The comparison of one node with the contract: every part of it can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gqa_models import Shape, draw_step, model_of

from stof.cached_attention.checks import site_checks
from stof.cached_attention.checks.oracle import CacheStep, CacheStepResult, compute_step
from stof.cached_attention.checks.site_checks import compare_cache_site, run_step
from stof.cached_attention.emit import emit_caches
from stof.cached_attention.find import find_candidates
from stof.cached_attention.site import OP, CacheSite
from stof.graph.node_fields import plain_attributes_of
from stof.symbolic import Symbolic
from stof.verification.compare import compare_outputs
from stof.verification.result import Comparison

SHAPES = {
    "plain": Shape(),
    "window": Shape(window=5),
    "sliding": Shape(window=6, sliding=True),
    "everything": Shape(H=6, D=32, packed=True, rotary=16, sink=True, window=7, softcap=2.0, norms=True),
    "bias": Shape(bias=(1, 4)),
    "positions": Shape(rotary=16, positions=True),
    "fp16": Shape(dtype="float16", rotary=16),
    "bf16": Shape(dtype="bfloat16", packed=True),
    "int8": Shape(cache="int8", rotary=16, channels=(True, True)),
    "int8, sliding": Shape(cache="int8", window=6, sliding=True, packed=True),
    "fp8": Shape(cache="float8", dtype="float16", channels=(True, False)),
    # Keys are rounded to bfloat16 before they are quantized: an oracle that does not finds other steps.
    "bf16, int8, rotary and norms": Shape(cache="int8", dtype="bfloat16", rotary=16, norms=True),
    "bf16, fp8, rotary": Shape(cache="float8", dtype="bfloat16", rotary=16),
}


def site_of(shape: Shape) -> tuple[CacheSite, dict[str, Any]]:
    model = model_of(shape)
    (candidate,) = find_candidates(model, Symbolic(model), "cpu")
    assert candidate.site is not None
    node = next(n for n in emit_caches(model, [candidate.site]).graph.node if n.op_type == OP)
    return candidate.site, plain_attributes_of(node)


def compared(shape: Shape, original: np.ndarray | None = None, **changed: Any) -> Comparison:
    site, attributes = site_of(shape)
    step = draw_step(shape, [9, 9, 9] if shape.sliding else [9, 4, 1], 9, 12)
    exact = compute_step(step).output.astype(step.query.dtype)
    return compare_cache_site(site, attributes | changed, step, exact if original is None else original)


@pytest.mark.parametrize("name", SHAPES)
def test_the_operator_is_right(name: str) -> None:
    found = compared(SHAPES[name])
    assert found.ok, found.message()
    assert found.coverage.compared > 4000


CHANGES: dict[str, Callable[[CacheStepResult, CacheStep], None]] = {
    "an output": lambda r, s: r.output.__setitem__((0, 0, 3), r.output[0, 0, 3] + 1e-3),
    "NaN in an output": lambda r, s: r.output.__setitem__((0, 0, 3), np.nan),
    "the first key": lambda r, s: r.key.__setitem__((0, 0, 0, 0), r.key[0, 0, 0, 0] + 1e-3),
    "the last value": lambda r, s: r.value.__setitem__((0, 1, s.rows[0] - 1, 2), 7.0),
    "infinity in a cache": lambda r, s: r.value.__setitem__((0, 1, 0, 0), np.inf),
}
IGNORED: dict[str, Callable[[CacheStepResult, CacheStep], None]] = {
    "rows beyond the keys": lambda r, s: [
        c[b, :, n:].fill(np.nan) for c in (r.key, r.value) for b, n in enumerate(s.rows)
    ],
    "padded queries": lambda r, s: r.output.__setitem__(s.padded, np.nan),
}  # type: ignore[dict-item]


def with_change(monkeypatch: pytest.MonkeyPatch, change: Callable[[CacheStepResult, CacheStep], None]) -> None:
    def changed(attributes: Any, step: CacheStep) -> CacheStepResult:
        found = run_step(attributes, step)
        change(found, step)
        return found

    monkeypatch.setattr(site_checks, "run_step", changed)


@pytest.mark.parametrize("name", CHANGES)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_change(monkeypatch, CHANGES[name])
    found = compared(Shape(rotary=16))
    assert not found.ok
    assert "the captured step, " in found.detail


QUANTIZED_CHANGES: dict[str, Callable[[CacheStepResult, CacheStep], None]] = {
    "two steps": lambda r, s: r.key.__setitem__((0, 0, 3, 0), r.key[0, 0, 3, 0] + np.int8(2)),
    "many elements by one step": lambda r, s: r.value.__setitem__((0, 0, 3), r.value[0, 0, 3] + np.int8(1)),
    "an output": lambda r, s: r.output.__setitem__((0, 0, 3), r.output[0, 0, 3] + 1e-3),
}


@pytest.mark.parametrize("name", QUANTIZED_CHANGES)
def test_faults_of_quantized_caches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of int8 differ by one step in few elements at most."""
    with_change(monkeypatch, QUANTIZED_CHANGES[name])
    found = compared(Shape(cache="int8", H=1, G=1, D=16))
    assert not found.ok
    assert "the captured step, " in found.detail


@pytest.mark.parametrize("name", IGNORED)
def test_rows_without_a_token_are_not_compared(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_change(monkeypatch, IGNORED[name])
    assert compared(Shape(rotary=16)).ok


@pytest.mark.parametrize("label", ["several tokens behind a past", "one token behind a past"])
def test_steps_behind_a_past(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that only these steps show."""
    count = 9 if label.startswith("several") else 1

    def change(result: CacheStepResult, step: CacheStep) -> None:
        if step.query.shape[1] == count and step.total > count:
            result.output[1] += 1.0

    with_change(monkeypatch, change)
    found = compared(Shape(window=5))
    assert not found.ok
    assert found.detail == f"{label}, output"


def test_an_original_that_means_something_else() -> None:
    """The node that is replaced does not compute the contract: a runtime of another version, say."""
    shape = Shape(rotary=16)
    step = draw_step(shape, [9, 4, 1], 9, 12)
    other = compute_step(replace(step, window=3)).output.astype(np.float32)
    found = compared(shape, original=other)
    assert not found.ok
    assert "computes something else" in found.detail


def test_what_the_library_refuses() -> None:
    found = compared(Shape(), scale=float("inf"))
    assert not found.ok
    assert "attribute scale is not finite" in found.detail


def cases() -> dict[str, np.ndarray]:
    plain = np.random.default_rng(0).standard_normal((2, 3, 6, 4)).astype(np.float32)
    held = np.arange(6)[None] < np.array([[6], [2]])
    outside, inside = plain.copy(), plain.copy()
    outside[1, :, 2:] = np.nan
    inside[1, 2, 1, 3] += 0.1
    return {"plain": plain, "held": held, "outside": outside, "inside": inside}


def test_outputs_that_are_caches() -> None:
    """Rows that hold no key are left out of the comparison of whole models, and counted."""
    data = cases()
    plain, held = data["plain"], data["held"]
    case: Any = "case"
    right = compare_outputs(case, 1e-6, "present", plain, [plain], data["outside"], held=held)
    assert right.ok
    assert (right.coverage.compared, right.coverage.unused, right.coverage.elements) == (96, 48, 144)
    assert not compare_outputs(case, 1e-6, "present", plain, [plain], data["inside"], held=held).ok
    assert not compare_outputs(case, 1e-6, "present", plain, [plain], data["outside"]).ok
    wrong = compare_outputs(case, 1e-6, "present", plain, [plain], plain[:, :, :5], held=held)
    assert not wrong.ok
    assert "shape" in wrong.detail
