# SPDX-License-Identifier: Apache-2.0
"""Merges matmuls of one tensor into one wide matmul and a Split.

Two kinds of groups are merged: three matmuls (query, key and value), whose Split a chain fuses with its epilogue, and any
number of keys and values that StofAttention reads inside of the wide output. For few rows, the wide matmul takes as long as
each of the narrow ones. The weights are concatenated in the graph; runtimes fold that when they create a session.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import onnx
from onnx import helper

from stof.execution.upcast import HALF
from stof.fusion.element_ops import FREE, kind_of_node
from stof.fusion.packed_qkv import INPUTS, has_head_counts, heads_of_input, is_attention
from stof.fusion.policy import Matmuls, MergeDecider
from stof.graph.index import domain_of, node_tensors
from stof.graph.protobuf import copy_with_nodes
from stof.symbolic import Symbolic

QKV = 3  # matmuls of a group that a chain may split again


class MergeScope(Enum):
    """Which groups of matmuls may be merged."""

    QKV_AND_ATTENTION = "three of one tensor, whatever reads them, and those that StofAttention alone reads"
    ATTENTION_ONLY = "those that StofAttention alone reads"


@dataclass(frozen=True)
class MergedMatmuls:
    """A model with merged matmuls; the model that was given where nothing was merged.

    Attributes:
        model: the result.
        splits: names of the Split nodes that a chain has to fuse for a gain: other operators than attention compute with
            their outputs.
    """

    model: onnx.ModelProto
    splits: frozenset[str] = frozenset()


def merge_matmuls(
    model: onnx.ModelProto,
    symbolic: Symbolic,
    decider: MergeDecider,
    scope: MergeScope = MergeScope.QKV_AND_ATTENTION,
    reads_packed_heads: bool = False,
) -> MergedMatmuls:
    """Merges the groups of matmuls of one tensor that the decider accepts.

    Args:
        model: a model with attention replaced already.
        symbolic: its shapes.
        decider: decides about each group.
        scope: which groups it is asked about.
        reads_packed_heads: whether StofAttention can read heads inside of the wide output; else no group is for it.
    """
    constant = {t.name for t in model.graph.initializer} - {i.name for i in model.graph.input}
    by_operand: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and not domain_of(node) and node.input[1] in constant:
            by_operand.setdefault(node.input[0], []).append(node)
    taken = {n for node in model.graph.node for n in node_tensors(node)} | constant
    groups: dict[str, Matmuls] = {}
    read = _readers(model) if reads_packed_heads and has_head_counts(model) else {}
    for matmuls in by_operand.values():
        is_qkv = len(matmuls) == QKV
        group: Matmuls = matmuls if is_qkv else _find_attention_matmuls(matmuls, read, symbolic)
        in_scope = scope is MergeScope.QKV_AND_ATTENTION if is_qkv else bool(group)
        is_candidate = in_scope and _has_half_weights(group, symbolic) and not _new_names(group) & taken
        if is_candidate and decider(model, symbolic, group, is_qkv):
            groups[group[0].output[0]] = group
    inside = {n.output[0] for g in groups.values() for n in g}
    nodes: list[onnx.NodeProto] = []
    splits: set[str] = set()
    computed = find_computed_tensors(model) if groups else frozenset()
    for node in model.graph.node:
        name = node.output[0] if node.output else ""
        if name in groups:
            nodes += _wide_matmul(groups[name], symbolic)
            if not computed.isdisjoint(nodes[-1].output):
                splits.add(nodes[-1].name)
        elif name not in inside:
            nodes.append(node)
    if not groups:
        return MergedMatmuls(model)
    return MergedMatmuls(copy_with_nodes(model, nodes), frozenset(splits))


def find_computed_tensors(model: onnx.ModelProto) -> frozenset[str]:
    """The tensors that memory-bound operators read, those left out that only rename or reshape."""
    return frozenset(i for n in model.graph.node if n.op_type not in FREE and kind_of_node(n) for i in n.input)


Readers = dict[str, list[tuple[onnx.NodeProto, int]]]  # of a tensor: nodes, and the number of the input


def _readers(model: onnx.ModelProto) -> Readers:
    """The readers of every tensor. Branches and graph outputs count with input number -1."""
    readers: Readers = {}
    for node in model.graph.node:
        for i, name in enumerate(node.input):
            readers.setdefault(name, []).append((node, i))
        for name in node_tensors(node) - {*node.input, *node.output}:  # by branches
            readers.setdefault(name, []).append((node, -1))
    for output in model.graph.output:
        readers.setdefault(output.name, []).append((onnx.NodeProto(), -1))
    return readers


def _find_attention_matmuls(group: Matmuls, read: Readers, symbolic: Symbolic) -> Matmuls:
    """The matmuls that StofAttention alone reads, where it can read all of them side by side; none where fewer than two."""
    members = [n for n in group if n.output[0] in read and all(_reads_heads(*r) for r in read[n.output[0]])]
    widths = []
    for node in members:
        shape = symbolic.shape(node.input[1])
        width = None if shape is None or len(shape) != 2 else shape[1].constant
        if width is None:
            return []
        widths.append(width)
    if len(members) < 2:
        return []
    for i, node in enumerate(members):
        for reader, number in read[node.output[0]]:
            heads = heads_of_input(reader, number)
            if heads is None or heads.within(sum(widths[:i]), widths[i], sum(widths)) is None:
                return []
    return members


def _reads_heads(reader: onnx.NodeProto, number: int) -> bool:
    return is_attention(reader) and 0 <= number < INPUTS and heads_of_input(reader, number) is not None


def _has_half_weights(group: Matmuls, symbolic: Symbolic) -> bool:
    if any(symbolic.dtype(n.input[1]) not in HALF for n in group):
        return False
    shapes = [symbolic.shape(n.input[1]) for n in group]
    return all(s is not None and len(s) == 2 and s[1].constant is not None for s in shapes)


def _new_names(group: Matmuls) -> set[str]:
    first = f"{group[0].output[0]}/shared"
    return {first, f"{first}/factor", f"{first}/widths"}


def _wide_matmul(group: Matmuls, symbolic: Symbolic) -> list[onnx.NodeProto]:
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
