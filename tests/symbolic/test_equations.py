# SPDX-License-Identifier: Apache-2.0
"""Equations between sizes: what is left of them, and which dimensions they tie; their solutions are held against numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stof.symbolic import Int, dim, integer
from stof.symbolic.algebra.equations import reduce_equation, solve_equations, substitute
from stof.symbolic.algebra.sizes import evaluate
from stof.symbolic.dimension_names import parse_dimension

A, B, C, D, E = (dim(n) for n in "abcde")
NAMES = "abcde"


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (A + B, A + C, {B, C}),
        (A * B, A * C, {B, C}),
        (A * B * integer(64), A * C * integer(64), {B, C}),
        (A * B + A * C, A * B + A * D, {C, D}),
        (A * B, B, {A, integer(1)}),
        (A + A, integer(6), {A, integer(3)}),
        (A + B, C, {A + B, C}),
        (A, B, {A, B}),
        (A, A + B, {A, A + B}),  # b is 0, which no size beside it says
    ],
)
def test_what_both_sides_share_is_left_out(one: Int, other: Int, expected: set[Int]) -> None:
    assert set(reduce_equation(one, other)) == expected
    assert set(reduce_equation(other, one)) == expected


def test_equal_dimensions_become_the_one_that_comes_first() -> None:
    found = solve_equations([(B, C), (D, A), (C, D), (E, integer(7))], NAMES)
    assert {n: found.name_of(n) for n in NAMES} == dict.fromkeys("abcd", "a") | {"e": ""}
    assert substitute(B * C + E, found.values) == A * A + integer(7)
    assert not found.rest


def test_what_one_equation_says_reduces_others() -> None:
    found = solve_equations([(A + B, C + D), (A, C), (B * E, D * integer(4))], NAMES)
    assert found.name_of("d") == "b"
    assert found.values["e"] == integer(4)


def test_names_inside_of_a_graph_tie_those_of_inputs() -> None:
    inner = dim("tensor#0")
    assert solve_equations([(inner, B), (A, inner)], NAMES).name_of("b") == "a"


def test_sums_are_left_as_they_are() -> None:
    found = solve_equations([(A + B, C)], NAMES)
    assert not found.values
    assert found.rest == ((A + B, C),)


def test_dimensions_inside_of_quotients_are_replaced() -> None:
    size = parse_dimension("(a*b)//c + (d + 1)//2")
    assert evaluate(size, {"a": 6, "b": 5, "c": 2, "d": 3}) == 17
    assert evaluate(substitute(size, {"a": C, "d": integer(7)}), {"b": 5, "c": 2}) == 9


def test_a_contradiction_ends() -> None:
    solve_equations([(A, integer(2)), (A, integer(3)), (A, B), (B, A + integer(1))], NAMES)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_solutions_hold_wherever_the_equations_do(data: st.DataObject) -> None:
    """At all small sizes at which the equations hold, what was solved holds, too."""
    side = st.lists(st.sampled_from([A, B, C, D, integer(1), integer(2)]), min_size=1, max_size=2)

    def draw() -> Int:
        terms = data.draw(side)
        return terms[0] * terms[-1] if data.draw(st.booleans()) else sum(terms[1:], start=terms[0])

    equations = [(draw(), draw()) for _ in range(data.draw(st.integers(1, 3)))]
    found = solve_equations(equations, NAMES)
    for sizes in itertools.product(range(1, 5), repeat=4):
        values = dict(zip("abcd", sizes, strict=True))
        if all(evaluate(one, values) == evaluate(other, values) for one, other in equations):
            assert all(evaluate(size, values) == values[name] for name, size in found.values.items())
            assert np.all([evaluate(one, values) == evaluate(other, values) for one, other in found.rest])
