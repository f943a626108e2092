# SPDX-License-Identifier: Apache-2.0
"""Three products of one tensor (query, key and value) as one, which a chain takes apart again with what follows them.

A few rows take as long to multiply by three matrices one after the other as by all at once three times. The factors are put
together in the graph, where runtimes do so once, when a session is created.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
from onnx import helper

from stof.chains.ops import FREE, kind_of_node
from stof.graph import domain_of, node_tensors, with_nodes
from stof.symbolic import Symbolic
from stof.widen import HALF

COUNT = 3
Products = Sequence[onnx.NodeProto]
Merges = Callable[[onnx.ModelProto, Symbolic, Products], bool]  # whether products are to become one


def merged(model: onnx.ModelProto, symbolic: Symbolic, merges: Merges) -> tuple[onnx.ModelProto, frozenset[str]]:
    """A copy with one product in the place of three, and the names of the nodes that take them apart which a chain has to take:
    those of products that others compute with, rather than attention alone. The model itself where there are none.
    """
    constant = {t.name for t in model.graph.initializer} - {i.name for i in model.graph.input}
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and not domain_of(node) and node.input[1] in constant:
            found.setdefault(node.input[0], []).append(node)
    taken = {n for node in model.graph.node for n in node_tensors(node)} | constant
    groups = {
        g[0].output[0]: g
        for g in found.values()
        if _fits(g, symbolic) and not _names(g) & taken and merges(model, symbolic, g)
    }
    inside = {n.output[0] for g in groups.values() for n in g}
    nodes: list[onnx.NodeProto] = []
    splits: set[str] = set()
    for node in model.graph.node:
        name = node.output[0] if node.output else ""
        if name in groups:
            nodes += _together(groups[name], symbolic)
            if any(is_computed_with(model, o) for o in nodes[-1].output):
                splits.add(nodes[-1].name)
        elif name not in inside:
            nodes.append(node)
    if not groups:
        return model, frozenset()
    return with_nodes(model, nodes), frozenset(splits)


def is_computed_with(model: onnx.ModelProto, name: str) -> bool:
    """Whether a memory-bound operator that computes something reads a tensor."""
    return any(name in n.input and n.op_type not in FREE and kind_of_node(n) for n in model.graph.node)


def _fits(group: Products, symbolic: Symbolic) -> bool:
    if len(group) != COUNT or any(symbolic.dtype(n.input[1]) not in HALF for n in group):
        return False
    shapes = [symbolic.shape(n.input[1]) for n in group]
    return all(s is not None and len(s) == 2 and s[1].constant is not None for s in shapes)


def _names(group: Products) -> set[str]:
    first = f"{group[0].output[0]}/shared"
    return {first, f"{first}/factor", f"{first}/widths"}


def _together(group: Products, symbolic: Symbolic) -> list[onnx.NodeProto]:
    first = f"{group[0].output[0]}/shared"
    shapes = [symbolic.shape(n.input[1]) for n in group]
    widths = [s[1].constant for s in shapes if s is not None]
    return [
        helper.make_node("Concat", [n.input[1] for n in group], [f"{first}/factor"], f"{first}/factor", axis=1),
        helper.make_node("MatMul", [group[0].input[0], f"{first}/factor"], [first], first),
        helper.make_node("Constant", [], [f"{first}/widths"], f"{first}/widths", value_ints=widths),
        helper.make_node(
            "Split", [first, f"{first}/widths"], [n.output[0] for n in group], f"{first}/split", axis=-1
        ),
    ]  # fmt: skip
