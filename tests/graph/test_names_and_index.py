# SPDX-License-Identifier: Apache-2.0
"""Fresh names, topological order, and the list of movement operators."""

from __future__ import annotations

import onnx
from onnx import helper, parser

from stof.graph.index import needed_tensors, producer_indices, topological_order
from stof.graph.inline import MOVEMENT_OPS
from stof.graph.names import FreshNames, name_nodes
from stof.symbolic.rules import movement


def test_fresh_names_are_numbered_from_two() -> None:
    names = FreshNames(["x"])
    assert [names.make(n) for n in ("x", "y", "x", "y")] == ["x_2", "y", "x_3", "y_2"]
    names.reserve(["z"])
    assert "z" in names
    assert names.make("z") == "z_2"
    assert FreshNames(["x"], lambda name, number: f"{name} ({number})").make("x") == "x (2)"


def test_every_node_gets_a_name_of_its_own() -> None:
    branch = helper.make_graph([helper.make_node("Identity", ["x"], ["b"], "twice")], "branch", [], [])
    nodes = [
        helper.make_node("Identity", ["x"], ["y"], "twice"),
        helper.make_node("If", ["c"], ["z"], then_branch=branch),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [], []))
    name_nodes(model)
    inner = model.graph.node[1].attribute[0].g.node[0].name
    assert [n.name for n in model.graph.node] == ["twice", "If_z"]
    assert inner == "twice_1"


def _nodes(text: str) -> list[onnx.NodeProto]:
    return list(parser.parse_graph(f"g (float[1] x) => (float[1] out) {{ {text} }}").node)


def test_writers_come_before_readers_and_ranks_decide_otherwise() -> None:
    nodes = _nodes("b = Neg (a) a = Abs (x) c = Neg (x) out = Add (b, c)")
    assert topological_order(nodes) == [1, 0, 2, 3]
    assert topological_order(nodes, [3, 2, 1, 0]) == [2, 1, 0, 3]
    assert producer_indices(nodes) == {"b": 0, "a": 1, "c": 2, "out": 3}


def test_nodes_of_a_cycle_and_behind_it_are_left_out() -> None:
    assert topological_order(_nodes("a = Neg (b) b = Neg (a) c = Abs (x) out = Add (a, c)")) == [2]


def test_needed_tensors_are_those_that_outputs_depend_on() -> None:
    graph = parser.parse_graph("g (float[1] x) => (float[1] out) { a = Abs (x) dead = Neg (a) out = Neg (a) }")
    assert needed_tensors(graph) == {"out", "a", "x"}


def test_functions_of_movement_operators_have_symbolic_rules() -> None:
    assert movement.RULES.keys() == MOVEMENT_OPS
