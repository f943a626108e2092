# SPDX-License-Identifier: Apache-2.0
"""Floats as sums: which selects count as what they select, and how often shared parts are visited."""

from __future__ import annotations

import math

import onnx
import pytest
from onnx import parser

from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex
from stof.mask.from_condition import B, K, Q
from stof.mask.relative_terms import linear
from stof.mask.relative_terms.contraction import depends_on
from stof.mask.relative_terms.linear import ONE, linear_sum
from stof.symbolic import Symbolic, integer, trace
from stof.symbolic.algebra.divisions import floor_div
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.terms import Atom, Cond, Real, of_atom, real
from stof.symbolic.tensor import Index
from stof.symbolic.trace import Trace, element_of, replace_atoms_of_real, simplify_real

X, Y = element_of("x", (Q,)), element_of("y", (K,))
ZERO = real(0.0)
POSITION = Cond("le", (Q - K,))
DATA = {
    "a boolean": Cond("read", ("m", (Q,))),
    "a negated boolean": Cond("unread", ("m", (Q,))),
    "an integer": Cond("eq", (of_atom("read", "ids", (B, Q)) - integer(103),)),
    "a float": Cond("opaque", ("greater", (Q,))),
    "a negated float": Cond("unopaque", ("greater", (Q,))),
    "both": Cond("and", (POSITION, Cond("read", ("m", (Q,))))),
}


def select(condition: Cond, yes: Real, no: Real) -> Real:
    return Real("select", (condition, yes, no))


def doubled(kind: str, one: Real, times: int) -> Real:
    for _ in range(times):
        one = Real(kind, (one, one))
    return one


def test_factors() -> None:
    half = Real("div", (Real("sub", (X, Real("neg", (Y,)))), real(2.0)))
    value = Real("add", (Real("mul", (real(3.0), half)), Real("add", (Y, real(5.0)))))
    assert linear_sum(value) == {X: 1.5, Y: 2.5, ONE: 5.0}
    assert linear_sum(Real("sub", (value, value))) == {}


def test_conditions_on_indices_need_execution() -> None:
    for pad in (select(POSITION, X, ZERO), select(POSITION, ZERO, X)):
        assert linear_sum(pad, reach=8) == {X: 1.0}
        assert linear_sum(pad) == {pad: 1.0}
    other = select(POSITION, X, Y)
    assert linear_sum(other, reach=8) == {other: 1.0}


@pytest.mark.parametrize(
    "condition",
    [
        Cond("le", (K - integer(9),)),
        Cond("le", (integer(9) * Q - K,)),
        Cond("le", (floor_div(Q, 9) - K,)),
        Cond("and", (POSITION, Cond("le", (K - integer(100_000),)))),
        Cond("table", ("stored", (Q, K))),
    ],
)
def test_conditions_that_no_free_length_shows(condition: Cond) -> None:
    pad = select(condition, X, ZERO)
    assert linear_sum(pad, reach=8) == {pad: 1.0}
    assert linear_sum(pad, reach=math.inf) == {X: 1.0}


@pytest.mark.parametrize("name", DATA)
def test_conditions_on_data_make_a_term(name: str) -> None:
    for value in (select(DATA[name], X, ZERO), select(DATA[name], ZERO, X)):
        assert linear_sum(Real("mul", (value, real(2.0))), reach=8) == {value: 2.0}


def test_shared_parts_of_sums_are_read_once() -> None:
    assert linear_sum(doubled("add", X, 60)) == {X: 2.0**60}


def test_terms_too_large_to_compare() -> None:
    with pytest.raises(UnsupportedError, match="too large to compare"):
        linear_sum(doubled("max", X, 60))


def test_sums_of_too_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_MOST_NODES", 50)
    assert linear_sum(doubled("add", X, 49)) == {X: 2.0**49}
    with pytest.raises(UnsupportedError, match="more than 50 parts"):
        linear_sum(doubled("add", X, 50))


@pytest.mark.parametrize("kind", ["add", "max"])
def test_shared_parts_are_replaced_once(kind: str) -> None:
    """Shared parts stay shared, or the next step would visit each path."""
    value = doubled(kind, X, 60)
    for found in (
        simplify_real(Domain({"q": (integer(0), integer(7))}), value),
        replace_atoms_of_real(value, {Atom("var", ("q",)): K}),
    ):
        objects, one = 0, found
        while one.kind == kind:
            assert one.args[0] is one.args[1]
            assert isinstance(one.args[0], Real)
            objects, one = objects + 1, one.args[0]
        assert objects == 60
        assert one.args[0] == "x"


def test_formulas_of_too_many_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_MOST_PARTS", 50)
    value = doubled("add", X, 60)
    with pytest.raises(UnsupportedError, match="more than 50 parts"):
        simplify_real(Domain({}), value)
    with pytest.raises(UnsupportedError, match="more than 50 parts"):
        replace_atoms_of_real(value, {Atom("var", ("q",)): K})


class _Counting(Trace):
    """A trace that counts the elements that are asked for."""

    steps = 0

    def element(self, tensor: str, index: Index) -> Real | None:
        self.steps += 1
        assert self.steps < 20_000
        return super().element(tensor, index)


def squares(first: str, times: int) -> _Counting:
    """A trace of the chain of squares of x0, which ``first`` gives."""
    chain = "".join(f" x{i + 1} = MatMul (x{i}, x{i})" for i in range(times))
    model: onnx.ModelProto = parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[B,8,8] x) => (float[B,8,8] x{times}) {{ {first} {chain} }}"""
    )
    weight = onnx.helper.make_tensor("weight", onnx.TensorProto.FLOAT, [1, 8, 8], [0.1 * i for i in range(64)])
    model.graph.initializer.append(weight)
    return _Counting(Symbolic(model), GraphIndex(model.graph))


@pytest.mark.parametrize(
    ("first", "times", "expected"),
    [
        ("x0 = Identity (x)", 30, True),
        ("size = Shape (x) x0 = Expand (weight, size)", 30, False),
        ("size = Shape (x) x0 = Expand (weight, size)", 40, True),  # too far back to tell
    ],
)
def test_chains_of_products(first: str, times: int, expected: bool) -> None:
    """2^30 paths lead from the last product to the first one."""
    chain = squares(first, times)
    assert depends_on(chain, element_of(f"x{times}", (B, Q, K)), "b") is expected
    assert chain.steps >= 30
