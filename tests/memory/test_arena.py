# SPDX-License-Identifier: Apache-2.0
"""The arena, the order of nodes and the plan of buffers that estimates take over from a session."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from stof.memory.arena import Arena
from stof.memory.declared_shapes import infer_declared_shapes
from stof.memory.einsum_copies import einsum_copies
from stof.memory.quadratic import find_quadratic
from stof.memory.session_graph import read_session_graph
from stof.memory.session_plan import plan_session
from stof.memory.tensor_sizes import TensorSizes, UnknownSizeError, show_size
from stof.symbolic import Symbolic
from stof.symbolic.algebra.terms import dim, integer, of_atom

_NODE = helper.make_node
_MIB = 1 << 20


def test_the_smallest_chunk_that_fits_is_taken() -> None:
    arena = Arena()
    large, small, last = (arena.allocate(size * _MIB) for size in (40, 10, 1))
    assert arena.touched == 51 * _MIB
    arena.free(large)
    arena.free(small)
    arena.free(arena.allocate(9 * _MIB))
    assert arena.touched == 51 * _MIB  # where the small one lay
    arena.free(last)


def test_a_chunk_twice_as_large_is_split_and_free_neighbours_become_one() -> None:
    arena = Arena()
    whole = arena.allocate(64 * _MIB)
    arena.free(whole)
    parts = [arena.allocate(32 * _MIB) for _ in range(2)]
    assert arena.touched == 64 * _MIB
    for part in parts:
        arena.free(part)
    arena.free(arena.allocate(64 * _MIB))
    assert arena.touched == 64 * _MIB
    kept = arena.allocate(33 * _MIB)  # the rest of its chunk is lost to others
    arena.allocate(20 * _MIB)
    assert arena.touched == 84 * _MIB
    arena.free(kept)


def test_of_chunks_of_one_size_that_of_the_newest_region_is_taken() -> None:
    """Its address is the lowest. The second half of its chunk is then written to, and the older chunk stays free."""
    arena = Arena()
    arena.free(arena.allocate(1))
    first = arena.allocate(16 * _MIB)
    arena.allocate(16 * _MIB)
    arena.allocate(16 * _MIB)  # of a region twice as large, whose second half is free
    arena.free(first)
    before = arena.touched
    arena.allocate(16 * _MIB)
    assert arena.touched == before + 16 * _MIB
    arena.allocate(16 * _MIB)
    assert arena.touched == before + 16 * _MIB


def test_blocks_without_bytes_take_nothing() -> None:
    arena = Arena()
    arena.free(arena.allocate(0))
    assert arena.touched == 0


def _model(nodes: list[onnx.NodeProto], stored: dict[str, np.ndarray], length: str = "n") -> onnx.ModelProto:
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["b", length, 64])
    y = onnx.ValueInfoProto(name="y")
    weights = [numpy_helper.from_array(a, n) for n, a in stored.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _names(model: onnx.ModelProto) -> list[str]:
    graph = read_session_graph(model.graph, Symbolic(model), infer_declared_shapes(model), is_optimized=True)
    return [node.proto.name for node in graph.nodes]


def test_constants_are_folded_and_copies_are_gone() -> None:
    nodes = [
        _NODE("Neg", ["w"], ["v"], "folded"),
        _NODE("Shape", ["w"], ["s"], "folded-shape"),
        _NODE("Identity", ["x"], ["i"], "copy"),
        _NODE("Cast", ["i"], ["c"], "no-cast", to=1),
        _NODE("MatMul", ["c", "v"], ["m"], "matmul"),
        _NODE("Shape", ["m"], ["t"], "shape"),
        _NODE("Slice", ["t", "zero", "one"], ["u"], "slice"),
        _NODE("Expand", ["u", "s"], ["y"], "expand"),
    ]
    stored = {"w": np.ones((64, 64), np.float32), "zero": np.array([0]), "one": np.array([1])}
    assert _names(_model(nodes, stored)) == ["matmul", "shape", "slice", "expand"]


def test_later_inputs_run_first() -> None:
    nodes = [
        _NODE("Exp", ["x"], ["a"], "first"),
        _NODE("Sin", ["x"], ["b"], "second"),
        _NODE("Add", ["a", "b"], ["y"], "sum"),
    ]
    assert _names(_model(nodes, {})) == ["second", "first", "sum"]


def test_a_matmul_that_takes_in_a_scale_runs_before_later_nodes() -> None:
    nodes = [
        _NODE("Transpose", ["x"], ["t"], "transpose", perm=[0, 2, 1]),
        _NODE("MatMul", ["x", "t"], ["m"], "matmul"),
        _NODE("Mul", ["m", "half"], ["p"], "scale"),
        _NODE("MatMul", ["x", "w"], ["q"], "project"),
        _NODE("ReduceSum", ["q"], ["r"], "reduce", keepdims=1),
        _NODE("Add", ["p", "r"], ["y"], "sum"),
    ]
    stored = {"half": np.array(0.5, np.float32), "w": np.ones((64, 64), np.float32)}
    assert _names(_model(nodes, stored)) == ["matmul", "project", "reduce", "sum"]
    # Two readers of the product: the scale stays.
    nodes[-1] = _NODE("Sum", ["p", "r", "m"], ["y"], "sum")
    assert _names(_model(nodes, stored)) == ["matmul", "project", "reduce", "scale", "sum"]
    nodes[0] = _NODE("Transpose", ["x"], ["t"], "transpose", perm=[2, 0, 1])  # none that a matmul takes in
    nodes[1] = _NODE("MatMul", ["t", "x"], ["m"], "matmul")
    nodes[-1] = _NODE("Sum", ["r", "p", "m"], ["y"], "sum")
    assert _names(_model(nodes, stored)) == ["project", "reduce", "transpose", "matmul", "scale", "sum"]


def test_equal_nodes_are_one() -> None:
    nodes = [
        _NODE("Add", ["x", "one"], ["a"], "first"),
        _NODE("Add", ["x", "uno"], ["b"], "same"),
        _NODE("Add", ["x", "two"], ["c"], "other"),
        _NODE("Sum", ["a", "b", "c"], ["y"], "sum"),
    ]
    stored = {"one": np.float32([1]), "uno": np.float32([1]), "two": np.float32([2])}
    assert _names(_model(nodes, stored)) == ["other", "first", "sum"]


@pytest.mark.parametrize(("declared", "expected"), [(True, ["a", "b", "y"]), (False, ["a", "b", "c", "d", "y"])])
def test_dead_buffers_of_a_declared_shape_serve_again(declared: bool, expected: list[str]) -> None:
    names = ["a", "b", "c", "d", "y"]
    nodes = [_NODE("Exp", [before], [name]) for before, name in zip(["x", *names], names, strict=False)]
    model = _model(nodes, {})
    graph = read_session_graph(model.graph, Symbolic(model), {}, is_optimized=True)
    shapes = infer_declared_shapes(model) if declared else {}
    plan = plan_session(graph, shapes, dict.fromkeys(names, 4))
    assert [name for step in plan.steps for name in step.made] == expected
    ended = [name for step in plan.steps for name in step.ended]
    assert ended == [name for name in expected if name != "y"]


def test_einsum_copies() -> None:
    # Both operands have their heads first afterwards; the product is copied into the result.
    assert einsum_copies("bihd,bjhd->bhij", [(2, 5, 3, 4), (2, 7, 3, 4)], (2, 3, 5, 7)) == [168, 120, 168, 210]
    # A batch of 1 is an axis of the right operand: the product is permuted once more.
    assert einsum_copies("bhij,bhjd->bhid", [(1, 3, 5, 7), (1, 3, 7, 4)], (1, 3, 5, 4))[-2:] == [60, 60]
    assert einsum_copies("ij->ji", [(3, 4)], (4, 3)) == [12]
    assert einsum_copies("ij->ij", [(3, 4)], (3, 4)) == []


def test_tensors_with_a_product_of_lengths_are_quadratic() -> None:
    nodes = [
        _NODE("Transpose", ["x"], ["t"], perm=[0, 2, 1]),
        _NODE("MatMul", ["x", "t"], ["scores"]),
        _NODE("MatMul", ["scores", "x"], ["out"]),
        _NODE("Reshape", ["scores", "flat"], ["row"]),
        _NODE("Concat", ["out", "out"], ["y"], axis=1),
    ]
    model = _model(nodes, {"flat": np.array([0, -1])})
    assert find_quadratic(model.graph, Symbolic(model), {"n"}) == ["scores", "row"]
    assert find_quadratic(model.graph, Symbolic(model), {"b"}) == []


def test_sizes_that_depend_on_data_are_the_largest() -> None:
    nodes = [_NODE("NonZero", ["x"], ["found"]), _NODE("Transpose", ["found"], ["rows"]), _NODE("Neg", ["rows"], ["y"])]
    model = _model(nodes, {})
    sizes = TensorSizes(Symbolic(model), {"b": 2, "n": 3}, model.graph.node)
    assert sizes.shape("y") == (2 * 3 * 64, 3)
    model = _model([_NODE("Unique", ["x"], ["y"])], {})
    sizes = TensorSizes(Symbolic(model), {"b": 2, "n": 3}, model.graph.node)
    with pytest.raises(UnknownSizeError, match="'y'"):
        sizes.bytes("y")


def test_sizes_in_words() -> None:
    n, two = dim("n"), integer(2)
    assert show_size(two * n - integer(1)) == "2·n - 1"
    assert show_size(integer(0) - n) == "-n"
    assert show_size(of_atom("div", n, 8)) == "(n // 8)"
    assert show_size(integer(7)) == "7"
    assert show_size(integer(0)) == "0"
