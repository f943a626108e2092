# SPDX-License-Identifier: Apache-2.0
"""Formulas of computed tensors over elements of matmuls: moves, sums, and divisions by sizes."""

from __future__ import annotations

import onnx
import pytest
from onnx import parser

from stof.graph.index import GraphIndex
from stof.symbolic import Symbolic, integer, var
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.terms import Int, Real, dim
from stof.symbolic.trace import Trace, element_of, simplify_real, variables_of

Q, K, B = var("q"), var("k"), var("b")
S = dim("S")


def trace(body: str, domain: Domain | None = None) -> Trace:
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[B,S,8] x, float[8,S] w) => (float[B,S,S] out) {{ {body} }}"""
    model: onnx.ModelProto = parser.parse_model(text)
    return Trace(Symbolic(model), GraphIndex(model.graph), domain)


def limits() -> Domain:
    return Domain({"b": (integer(0), dim("B") - integer(1)), **{n: (integer(0), S - integer(1)) for n in "qk"}})


def test_moves_and_sums() -> None:
    found = trace("m = MatMul (x, w) t = Transpose <perm = [0, 2, 1]> (m) out = Add (m, t)").element("out", (B, Q, K))
    assert found == Real("add", (element_of("m", (B, Q, K)), element_of("m", (B, K, Q))))


def test_a_step_goes_through_one_move() -> None:
    one = trace("m = MatMul (x, w) t = Transpose <perm = [0, 2, 1]> (m) out = Relu (t)")
    assert one.step("t", (B, Q, K)) == ("m", (B, K, Q))
    assert one.step("out", (B, Q, K)) is None  # computes
    assert one.step("m", (B, Q, K)) is None
    assert one.step("x", (B, Q, K)) is None


def shift(domain: Domain | None) -> Int:
    """The column of m that Transformer-XL's shift reads: a Pad on the left, and rows that are one element longer."""
    one = trace(
        """zero = Constant <value = int64[1] {0}> () one = Constant <value = int64[1] {1}> ()
        two = Constant <value = int64[1] {2}> () many = Constant <value = int64[1] {9223372036854775807}> ()
        m = MatMul (x, w) shape = Shape (m) b = Slice (shape, zero, one) s = Slice (shape, one, two) s1 = Add (s, one)
        pads = Constant <value = int64[6] {0, 0, 1, 0, 0, 0}> () padded = Pad (m, pads)
        tall = Concat <axis = 0> (b, s1, s) viewed = Reshape (padded, tall)
        cut = Slice (viewed, one, many, one) wide = Concat <axis = 0> (b, s, s) out = Reshape (cut, wide)""",
        domain,
    )
    value = one.element("out", (B, Q, K))
    assert value is not None
    found = simplify_real(limits(), value)
    while found.kind == "select":
        found = next(a for a in found.args[1:] if isinstance(a, Real) and a.kind != "const")
    assert found.kind == "element"
    index = found.args[1]
    assert isinstance(index, tuple)
    return index[2]


def test_a_division_by_a_size_gives_both_rows() -> None:
    """K - q + S - 1 where k <= q, and elements of the next row elsewhere."""
    plain, guarded = shift(None), shift(limits())
    assert plain == K - Q - integer(2)  # of the next row: right where k > q + 1 alone
    assert guarded != plain
    assert [a.kind for a in guarded.atoms()] == ["select"]
    select = next(iter(guarded.atoms()))
    assert K - Q + S in select.args


@pytest.mark.parametrize(
    ("value", "names"), [(Q - K, {"q", "k"}), (S, set()), ((Q, B * S), {"q", "b"})], ids=["difference", "size", "tuple"]
)
def test_variables(value: Int | tuple[Int, ...], names: set[str]) -> None:
    assert variables_of(value) == names


def test_flat_indices_of_long_tensors() -> None:
    """An index whose numbers int64 may not hold is one nevertheless, where a tensor of so many elements exists."""
    sizes = "n = Shape (m) one = Constant <value = int64 {1}> () two = Constant <value = int64 {2}> ()"
    body = f"""m = MatMul (x, w) {sizes} nothing = Constant <value = int64 {{0}}> ()
    s = Gather (n, one) t = Gather (n, two) b0 = Gather (n, nothing) st = Mul (s, t)
    b = Range (nothing, b0, one) b1 = Mul (b, st) b2 = Reshape (b1, tall)
    q = Range (nothing, s, one) q1 = Mul (q, t) q2 = Reshape (q1, high) k = Range (nothing, t, one)
    f1 = Add (b2, q2) f2 = Add (f1, k) flat = Reshape (m, whole) out = Gather <axis = 0> (flat, f2)"""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
    g (float[B,S,8] x, float[8,T] w) => (float[B,S,T] out)
    <int64[3] tall = {{-1, 1, 1}}, int64[2] high = {{-1, 1}}, int64[1] whole = {{-1}}> {{ {body} }}"""
    model: onnx.ModelProto = parser.parse_model(text)
    limits = {n: (integer(0), dim(size) - integer(1)) for n, size in (("b", "B"), ("q", "S"), ("k", "T"))}
    found = Trace(Symbolic(model), GraphIndex(model.graph), Domain(limits)).element("out", (B, Q, K))
    assert found is not None
    assert simplify_real(Domain(limits), found) == element_of("m", (B, Q, K))
