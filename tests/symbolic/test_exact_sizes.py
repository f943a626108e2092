# SPDX-License-Identifier: Apache-2.0
"""Exact facts: sizes of every run, where masks need only those of the runs that a graph is meant for."""

from __future__ import annotations

import onnx
import pytest

from stof.fusion.shape_rules import SHAPE_RULES
from stof.symbolic import Symbolic
from stof.symbolic.dimension_names import declared_dim


def sizes(inputs: str, nodes: str, *, exact: bool = True) -> list[int | str]:
    """The shape of y; "" where a size is computed or not known."""
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 18, "stof": 1]> g ({inputs}) => (float[unknown_rank] y) {{ {nodes} }}'
    )
    model.graph.output[0].type.tensor_type.ClearField("shape")
    shape = Symbolic(model, exact=exact, rules=SHAPE_RULES).shape("y")
    assert shape is not None
    return list(map(declared_dim, shape))


def sliced(start: int, end: int) -> str:
    return (
        f"s = Constant <value = int64[1] {{{start}}}> () e = Constant <value = int64[1] {{{end}}}> () "
        "a = Constant <value = int64[1] {1}> () y = Slice (x, s, e, a)"
    )


@pytest.mark.parametrize(
    ("start", "end", "inexact", "exact"),
    [
        (0, 1, 1, 1),  # every axis has an element
        (0, 1000, 1000, ""),
        (0, 1 << 40, "S", "S"),
        (2, 1 << 40, "", ""),
        (-1, 1 << 40, 1, 1),
        (-3, 1 << 40, 3, ""),
    ],
)
def test_slices(start: int, end: int, inexact: int | str, exact: int | str) -> None:
    """A slice of 1000 elements of S was said to have 1000, in runs of fewer, too."""
    found = [sizes("float[B,S] x", sliced(start, end), exact=e) for e in (False, True)]
    assert found == [["B", inexact], ["B", exact]]


def test_a_slice_of_a_table_has_the_length_that_the_graph_asks_for() -> None:
    nodes = (
        "n = Shape <start = 1, end = 2> (x) z = Constant <value = int64[1] {0}> () a = Constant <value = int64[1] {1}> () "
        "p = Slice (t, z, n, a) y = Add (x, p)"
    )
    assert sizes("float[B,S] x, float[1,512] t", nodes) == ["B", "S"]


@pytest.mark.parametrize(
    ("one", "other", "inexact", "exact"),
    [
        ("B,S", "B,S", ["B", "S"], ["B", "S"]),
        ("B,S", "C,S", ["B", "S"], ["", "S"]),
        ("B,S", "1,S", ["B", "S"], ["B", "S"]),
        ("B,S", "S", ["B", "S"], ["B", "S"]),
        ("B,S", "4,S", [4, "S"], [4, "S"]),
    ],
)
@pytest.mark.parametrize("op", ["Add", "Max", "Sum", "Equal"])
def test_broadcast_names(op: str, one: str, other: str, inexact: list[int | str], exact: list[int | str]) -> None:
    """B or C may be 1."""
    nodes = f"y0 = {op} (a, b) y = Cast <to = 1> (y0)"
    assert sizes(f"float[{one}] a, float[{other}] b", nodes, exact=False) == inexact
    assert sizes(f"float[{one}] a, float[{other}] b", nodes) == exact


@pytest.mark.parametrize(
    ("nodes", "shape"),
    [
        (
            'y = stof.StofChain <chain = "axes a = x0.0, b = x0.1, n = 64; out y0 f32 [a, b, n] = x0[a, b, n]"> (x)',
            ["B", "S", 64],
        ),
        ('y = stof.StofChain <chain = "axes a = x0.0, b = 4, n = 16; out y0 f16 [1, (b a), n] = x0[a, 0, n]"> (x)', [1, "", 16]),
        ('y = stof.StofChain <chain = "axes a = x0.2 / 16, b = 2, n = 3; out y0 f32 [(a b), n] = x0[0, 0, a]"> (x)', [8, 3]),
        ('y = stof.StofGemm <epilogue = "", pair = 0> (x, w)', ["B", "S", 96]),
        ('y = stof.StofGemm <epilogue = "", pair = 1> (x, w)', ["B", "S", 48]),
    ],
)  # fmt: skip
def test_rules_of_chains_and_matmuls(nodes: str, shape: list[int | str]) -> None:
    """Shapes are those of the description, which is the operator's contract."""
    assert sizes("float[B,S,64] x, float[64,96] w", nodes) == shape
