# SPDX-License-Identifier: Apache-2.0
"""Descriptions that are none are refused, whatever they hold; reads stay inside of their tensors."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stof.errors import ModelError
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.evaluate import evaluate_chain

GOOD = "axes b = x0.0, n = x0.1 / 2\nlet t = x0[b, n + 2]\nout y0 f32 [b, n] = select(n < 1, t, x0[b, n]) * 0x1p-1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "0 axes"),
        ("out y0 f32 [n] = 1", "'axes' on the first line"),
        ("axes n = 4", "0 outputs"),
        ("axes n = 4; out y1 f32 [n] = 1", "'y0'"),
        ("axes n = 4; out y0 f64 [n] = 1", "a type"),
        ("axes n = 4; out y0 f32 [m] = 1", "every axis once"),
        ("axes b = 2, n = 4; out y0 f32 [n] = 1", "every axis once"),
        ("axes n = 4; out y0 f32 [n, n] = 1", "every axis once"),
        ("axes n = 4; out y0 f32 [n] = x0[n * n]", "end of the line|']'"),
        ("axes n = 4; out y0 f32 [n] = x99[n]", "at most 16 inputs"),
        ("axes n = 4; out y0 f32 [n] = t", "a number, an axis"),
        ("axes n = 4; let t = 1; let t = 2; out y0 f32 [n] = t", "a new name"),
        ("axes n = 4; out y0 f32 [n] = min(1)", "2 arguments"),
        ("axes n = 4; out y0 f32 [n] = 1 @ 2", "no part of the format"),
        ("axes n = 99999999999; out y0 f32 [n] = 1", "at most 2"),
        ("axes n = 4; out y0 f32 [n] = " + "(" * 80 + "1" + ")" * 80, "64 levels"),
        ("axes n = 4; out y0 f32 [n] = 1" + " + 1" * 9000, "bytes"),
        ("axes n = 4; out y0 f32 [n] = x0[(n) % 0]", "divisor"),
        ("axes n = 4; out y0 f32 [n] = " + "-" * 9000 + "1", "64 levels"),
        ("axes n = 4; out y0 f32 [n] = 0x", "a floating-point number"),
        ("axes n = 4; out y0 f32 [n] = 0x1p99999", "a floating-point number"),
        ("axes n = " + "9" * 9000 + "; out y0 f32 [n] = 1", "at most 2"),
        ("axes n = \u0664; out y0 f32 [n] = 1", "no part of the format"),
        ("axes inf = 4; out y0 f32 [inf] = 1", "a new name for an axis"),
        ("axes n = 4; let out = 4; out y0 f32 [n] = out", "a new name"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        ChainDescription.parse(text)


def test_integers_of_2_to_the_31_are_read() -> None:
    chain = ChainDescription.parse("axes n = x0.0; out y0 f32 [n] = x0[(2147483648 * n) // 2147483648]")
    (found,) = evaluate_chain(chain, [np.arange(3.0)])
    np.testing.assert_array_equal(found, np.arange(3.0))


def test_a_select_reads_only_what_it_takes() -> None:
    x = np.arange(8.0).reshape(2, 4)
    (found,) = evaluate_chain(ChainDescription.parse(GOOD), [x])
    np.testing.assert_array_equal(found, np.where(np.arange(2) < 1, x[:, 2:], x[:, :2]) / 2)
    axes = "axes b = x0.0, n = x0.1; out y0 f32 [b, n] = "
    outside = ChainDescription.parse(axes + "select(n < 1, x0[b, n + 1], x0[b, n + 1])")
    with pytest.raises(ModelError, match="read outside"):
        evaluate_chain(outside, [x])
    (found,) = evaluate_chain(ChainDescription.parse(axes + "select(n < 3, x0[b, n + 1], 0)"), [x])
    np.testing.assert_array_equal(found[:, 3], 0)


@given(st.text(alphabet="axesoutlet=;x0.1[],()+-*/%<> bn\n", max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        ChainDescription.parse("axes b = x0.0, n = x0.1\n" + text)
    except ModelError:
        return
