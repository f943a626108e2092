# SPDX-License-Identifier: Apache-2.0
"""The library's parser and the optimizer's take the same texts of chains, and compute the same from what is printed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stof.errors import ModelError
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.evaluate import evaluate_chain
from stof.runtime.library import LibraryError, Op

AXES = "axes b = x0.0, n = x0.1\n"
INPUTS = [
    np.array([[0.5, -1.5, 2.0], [1.0, 0.25, -0.75]], np.float32),
    np.array([1.0, -2.0, 3.0], np.float32),
]


def run_in_library(text: str) -> np.ndarray:
    output = np.zeros((2, 3), np.float32)
    Op("StofChain", {"chain": text}).run(INPUTS, [output], threads=1)
    return output


@pytest.mark.parametrize(
    "expression",
    [
        *(
            "-0.0",
            "-0",
            "--5",
            "-(3)",
            "-(-0.0)",
            "x0[b, n] - -3.5",
            "x0[b, n] * -2 + -1.0",
            "-x0[b, n] * -x1[n]",
            "-inf",
        ),
        *("-(x0[b, n] + 1)", "f16(-65504.0) + x0[b, n]", "1e6 - 1000001", "select(n < 1, -x1[n + 1], -1e-5)", "0x1p-3"),
        *("x0[b, n] - (x1[n] - 1)", "x0[b, n] / (x1[n] / 4)", "(x0[b, n] < 1) + (b == 1)", "x1[(2 * n + b) % 3]"),
    ],
)
def test_signs_and_levels(expression: str) -> None:
    description = ChainDescription.parse(f"{AXES}out y0 f32 [b, n] = {expression}")
    (exact,) = evaluate_chain(description, INPUTS, rounded=True)
    for text in (f"{AXES}out y0 f32 [b, n] = {expression}", description.text):
        result = run_in_library(text)
        np.testing.assert_allclose(result, exact, rtol=1e-6)
        np.testing.assert_array_equal(np.signbit(result), np.signbit(exact))


ATOMS = st.sampled_from(["1", "-2", "0.5", "-0.0", "1e-5", "70000", "inf", "nan", "b", "n", "x0[b, n]", "x1[n]"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", "/", "<", ">="]), inner).map(lambda t: f"({' '.join(t)})"),
        st.tuples(ATOMS, st.sampled_from(["+", "-", "*", "/"]), inner).map(" ".join),
        inner.map(lambda x: f"-{x}"),
        inner.map(lambda x: f"bf16({x})"),
        st.tuples(inner, inner, inner).map(lambda t: f"select({', '.join(t)})"),
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(EXPRESSIONS)
def test_the_library_takes_what_is_printed(expression: str) -> None:
    """In the same sense: its result from the printed text has the same bits as from the text before."""
    text = f"{AXES}let t = {expression}\nout y0 f32 [b, n] = t + x0[b, n]"
    np.testing.assert_array_equal(run_in_library(ChainDescription.parse(text).text), run_in_library(text))


def is_read_by_library(text: str) -> bool:
    """Without inputs: whether indices fit the rank of an input is no matter of the format."""
    try:
        Op("StofChain", {"chain": text})
    except LibraryError:
        return False
    return True


def is_read(text: str) -> bool:
    try:
        ChainDescription.parse(text)
    except ModelError:
        return False
    return True


TOKENS = ["x0[", "x1[", "b", "n", ",", "]", "(", ")", "+", "-", "*", "/", "//", "%", "<", "1", "2.5", "0", "t"]
TOKENS += ["exp(", "min(", "f16(", "x1[n]", "select("]


@settings(max_examples=200)
@given(st.lists(st.sampled_from(TOKENS), max_size=9).map(" ".join))
def test_both_take_a_text_or_neither(expression: str) -> None:
    text = f"{AXES}let t = x0[b, n]\nlet u = {expression}\nout y0 f32 [b, n] = t + u"
    assert is_read(text) == is_read_by_library(text)


@pytest.mark.parametrize(
    "index",
    ["+ b", "+ 0", "- - b", "b +", "b - 1 + 2 * n - n", "-b", "2147483648 * b", "2147483648 * b + b", "2 * b - b * 2"],
)
def test_both_take_an_index_or_neither(index: str) -> None:
    text = f"{AXES}out y0 f32 [b, n] = x0[{index}, n]"
    assert is_read(text) == is_read_by_library(text)


@pytest.mark.parametrize(
    "number",
    ["1e999", "1e308", "1e-999", "0x", "0x1p9999", "0x1p-9999", "0x0p-9999", "0.0e-999", ".", "1.", ".5", "5e"],
)
def test_both_take_a_number_or_neither(number: str) -> None:
    text = f"{AXES}out y0 f32 [b, n] = {number} + x0[b, n]"
    assert is_read(text) == is_read_by_library(text)
