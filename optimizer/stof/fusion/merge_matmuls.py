# SPDX-License-Identifier: Apache-2.0
"""Products of one tensor as one: query, key and value, which a chain takes apart again with what follows them, and keys and
values of any number of layers, which attention reads where they are.

A few rows take as long to multiply by three matrices one after the other as by all at once three times. The factors are put
together in the graph, where runtimes do so once, when a session is created.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx
from onnx import helper

from stof.execution.upcast import HALF
from stof.fusion.element_ops import FREE, kind_of_node
from stof.fusion.packed_qkv import INPUTS, heads_known, heads_read, is_attention
from stof.graph.index import domain_of, node_tensors
from stof.graph.protobuf import copy_with_nodes
from stof.symbolic import Symbolic

COUNT = 3
Products = Sequence[onnx.NodeProto]
# Whether products are to become one; the last tells whether something has to take them apart again.
Merges = Callable[[onnx.ModelProto, Symbolic, Products, bool], bool]


def merged(
    model: onnx.ModelProto, symbolic: Symbolic, merges: Merges, three: bool = True, packs: bool = False
) -> tuple[onnx.ModelProto, frozenset[str]]:
    """A copy with one product in the place of several, and the names of the nodes that take them apart which a chain has to
    take: those of products that others compute with, rather than attention alone. The model itself where there are none.

    Args:
        model: with attention replaced already.
        symbolic: its shapes.
        merges: decides about each group.
        three: of three products of one tensor, whatever reads them.
        packs: of any number that attention alone reads, which needs none of the Split nodes then (:func:`packed`).
    """
    constant = {t.name for t in model.graph.initializer} - {i.name for i in model.graph.input}
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and not domain_of(node) and node.input[1] in constant:
            found.setdefault(node.input[0], []).append(node)
    taken = {n for node in model.graph.node for n in node_tensors(node)} | constant
    groups: dict[str, Products] = {}
    read = _readers(model) if packs and heads_known(model) else {}
    for products in found.values():
        apart = len(products) == COUNT
        group: Products = products if apart else _of_attention(products, read, symbolic)
        wanted = (three if apart else bool(group)) and _fits(group, symbolic) and not _names(group) & taken
        if wanted and merges(model, symbolic, group, apart):
            groups[group[0].output[0]] = group
    inside = {n.output[0] for g in groups.values() for n in g}
    nodes: list[onnx.NodeProto] = []
    splits: set[str] = set()
    computed = computed_with(model) if groups else frozenset()
    for node in model.graph.node:
        name = node.output[0] if node.output else ""
        if name in groups:
            nodes += _together(groups[name], symbolic)
            if not computed.isdisjoint(nodes[-1].output):
                splits.add(nodes[-1].name)
        elif name not in inside:
            nodes.append(node)
    if not groups:
        return model, frozenset()
    return copy_with_nodes(model, nodes), frozenset(splits)


def computed_with(model: onnx.ModelProto) -> frozenset[str]:
    """The tensors that memory-bound operators which compute something read."""
    return frozenset(i for n in model.graph.node if n.op_type not in FREE and kind_of_node(n) for i in n.input)


Readers = dict[str, list[tuple[onnx.NodeProto, int]]]  # of a tensor: nodes, and as which input


def _readers(model: onnx.ModelProto) -> Readers:
    """Of every tensor; what branches and the graph's own outputs read is no input, number -1."""
    found: Readers = {}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            found.setdefault(name, []).append((node, i))
        for name in node_tensors(node) - {*node.input, *node.output}:  # by branches
            found.setdefault(name, []).append((node, -1))
    for output in model.graph.output:
        found.setdefault(output.name, []).append((onnx.NodeProto(), -1))
    return found


def _of_attention(group: Products, read: Readers, symbolic: Symbolic) -> Products:
    """Those that StofAttention alone reads, where it can read them side by side; none where less than two are left."""
    own = [n for n in group if n.output[0] in read and all(_is_head(*r) for r in read[n.output[0]])]
    widths = []
    for node in own:
        shape = symbolic.shape(node.input[1])
        width = None if shape is None or len(shape) != 2 else shape[1].constant
        if width is None:
            return []
        widths.append(width)
    if len(own) < 2:
        return []
    for i, node in enumerate(own):
        for reader, place in read[node.output[0]]:
            heads = heads_read(reader, place)
            if heads is None or heads.within(sum(widths[:i]), widths[i], sum(widths)) is None:
                return []
    return own


def _is_head(reader: onnx.NodeProto, place: int) -> bool:
    return is_attention(reader) and 0 <= place < INPUTS and heads_read(reader, place) is not None


def _fits(group: Products, symbolic: Symbolic) -> bool:
    if any(symbolic.dtype(n.input[1]) not in HALF for n in group):
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
