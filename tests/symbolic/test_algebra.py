# SPDX-License-Identifier: Apache-2.0
"""The algebra: conditions by cases, limits of indices, named sizes, floats that hold integers."""

from __future__ import annotations

import numpy as np
import pytest

from stof.symbolic import Cond, Int, integer, var
from stof.symbolic.algebra.conditions import all_of, decide, equal, less_equal, negate
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.domain import Domain, divisions
from stof.symbolic.algebra.float_arithmetic import floor_quotient
from stof.symbolic.algebra.piecewise import reads_input, split_cases, to_int
from stof.symbolic.algebra.sizes import evaluate
from stof.symbolic.algebra.terms import FALSE, TRUE, Real, dim, of_atom, real
from stof.symbolic.dimension_names import parse_dimension
from stof.symbolic.rules.elementwise import div

Q, K, S, T = var("q"), var("k"), dim("S"), dim("T")
ONE = integer(1)
CAUSAL, NEAR = less_equal(K, Q), less_equal(Q - K, integer(4))


def domain() -> Domain:
    return Domain({"q": (integer(0), S - ONE), "k": (integer(0), T - ONE)})


def test_an_index_below_a_divisor() -> None:
    heads = Domain({"h": (integer(0), integer(3))})
    h = var("h")
    assert heads.integer(of_atom("div", h, 4) + S) == S
    assert heads.integer(of_atom("mod", h, 4) + S) == h + S
    assert heads.integer(of_atom("div", h, 3)) == of_atom("div", h, 3)


def test_products_and_sums_of_conditions_become_and_and_or() -> None:
    a, b = to_int(CAUSAL), to_int(NEAR)
    assert less_equal(ONE, a * b) == all_of([CAUSAL, NEAR])
    assert negate(equal(a + b - a * b, integer(0))) == negate(all_of([negate(CAUSAL), negate(NEAR)]))
    assert decide(Q - K, lambda x: less_equal(x, ONE)) is None  # it depends on no condition


def test_a_float_mask_has_one_case_for_each_value() -> None:
    mask = Real("select", (CAUSAL, Real("select", (NEAR, real(0.0), real(-2.0))), real(-2.0)))
    found = {x: c for c, x in split_cases(mask)}
    assert found[0.0] == all_of([CAUSAL, NEAR])
    assert found[-2.0] == negate(found[0.0])


def test_a_difference_of_reads_is_not_taken_for_zero_or_one() -> None:
    one, other = (of_atom("read", "ids", (var("b"), x)) for x in (Q, K))
    (only,) = split_cases(Real("int", (one - other,)))
    assert only == (TRUE, Real("int", (one - other,)))
    assert len(split_cases(Real("int", (one * other,)))) == 2
    assert reads_input(Real("int", (one,)))
    assert not reads_input(Real("int", (Q,)))


def test_limits_decide_conditions() -> None:
    assert domain().simplify(less_equal(K + ONE, T)) == TRUE
    assert domain().simplify(less_equal(T, K)) == FALSE
    least = of_atom("min", integer(3), T)
    assert domain().simplify(less_equal(K + ONE, least)) == less_equal(K, integer(2))


@pytest.mark.parametrize(("kind", "wanted"), [("division", Q), ("modulo", K)])
def test_a_flat_index_is_taken_apart(kind: str, wanted: Int) -> None:
    flat = of_atom("opaque", kind, Q * T + K, T)
    assert domain().integer(flat) == wanted


def test_a_division_of_polynomials_leaves_the_right_rest() -> None:
    rng = np.random.default_rng(0)
    value, divisor = (Q + T) * (S + T) + K, S + T
    for quotient, rest in divisions(value, divisor):
        for _ in range(20):
            sizes = dict(zip("STqk", map(int, rng.integers(1, 50, 4)), strict=True))
            whole, part, by = (evaluate(_named(x), sizes) for x in (quotient, rest, divisor))
            assert whole * by + part == evaluate(_named(value), sizes)


def _named(value: Int) -> Int:
    """With indices as sizes, which can be evaluated."""
    total = integer(0)
    for monomial, coefficient in value.terms:
        product = integer(coefficient)
        for atom in monomial:
            product = product * dim(str(atom.args[0]))
        total = total + product
    return total


@pytest.mark.parametrize("number", [-6, -1, 0, 1, 2, 3])
def test_numbers_times_polynomials_and_their_quotients(number: int) -> None:
    value, n = S * T * integer(6) - S * integer(12) + integer(18), integer(number)
    sizes = {"S": 5, "T": 7}
    assert value * n == n * value
    assert evaluate(value * n, sizes) == number * evaluate(value, sizes)
    assert value - value * n == value * (ONE - n)
    assert value + integer(0) == value - integer(0) == value == integer(0) - -value
    assert integer(0) - value == -value
    assert (value * n).divide(n) == (value if number else None)
    assert (value + ONE).divide(n) == {1: value + ONE, -1: -value - ONE}.get(number)


def test_a_size_may_be_0() -> None:
    """Row q of the queries behind an empty past is position q, so ``q + P < 1`` holds for the first one."""
    q, past = var("q"), dim("P")
    assert less_equal(q + past, integer(0)) not in (TRUE, FALSE)
    assert less_equal(q, q + past) == TRUE
    assert less_equal(q + ONE, q - past) == FALSE


def test_names_of_sizes_that_are_sums() -> None:
    assert parse_dimension("past + sequence") == dim("past") + dim("sequence")
    assert parse_dimension("2*s0 - 1") == dim("s0") * integer(2) - ONE
    assert parse_dimension("unk__12") == dim("unk__12")
    assert parse_dimension("floor(n/2) + 1") == dim("floor(n/2) + 1")


def test_the_floor_of_a_quotient_of_positions() -> None:
    quotient = Real("div", (Real("int", (Q,)), real(4.0)))
    assert floor_quotient(quotient) == Real("int", (of_atom("div", Q, 4),))
    assert floor_quotient(Real("div", (Real("int", (Q - K,)), real(4.0)))) is None  # may be negative
    assert isinstance(CAUSAL, Cond)


@pytest.mark.parametrize("factor", [-3, -1, 1, 3])
def test_quotients_and_remainders_of_sizes(factor: int) -> None:
    for constant in (-7, -1, 0, 3, 5):
        value = S * integer(factor) + integer(constant)
        for divisor in (1, 2, 4, 5):
            quotient, rest = floor_div(value, divisor), floor_mod(value, divisor)
            for n in range(1, 23):
                expected = divmod(factor * n + constant, divisor)
                assert (evaluate(quotient, {"S": n}), evaluate(rest, {"S": n})) == expected
    rounded_up = S + floor_mod(-S, 4)  # to whole windows
    assert floor_mod(rounded_up, 4) == integer(0)
    assert rounded_up.divide(floor_div(rounded_up, 4)) == integer(4)
    truncated = div(-S, integer(4))  # as ONNX divides
    assert [evaluate(truncated, {"S": n}) for n in (1, 3, 4, 7, 8)] == [0, 0, -1, -1, -2]
