# SPDX-License-Identifier: Apache-2.0
"""Fused attention nodes in a working copy of a model: expanded to primitive nodes, which are matched as any others.

A node whose site is not replaced stays in the emitted model as it was: that is made from a copy in which only the nodes
of replaced sites are expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import onnx

from stof.errors import UnsupportedError
from stof.graph.model_graph import GraphIndex, describe, domain_of, node_tensors, opset_of, with_nodes
from stof.graph.node_builder import Builder
from stof.site import AttentionSite, Finding
from stof.symbolic import Symbolic

_MARK = "/stof_"  # in the names of tensors that stand for a fused node


def stands_for_fused(site: AttentionSite) -> bool:
    """Whether the runtime computes the site by one fused node."""
    return any(_MARK in name for name in site.nodes)


@dataclass
class Request:
    """A fused node to expand: what it reads and is asked for, and the nodes that are appended."""

    node: onnx.NodeProto
    name: str
    symbolic: Symbolic
    index: GraphIndex
    builder: Builder
    opset: int
    given: list[onnx.NodeProto] = field(default_factory=list)

    def input(self, i: int) -> str:
        """The name of an input, empty where it is not given."""
        return str(self.node.input[i]) if i < len(self.node.input) else ""

    def output(self, i: int) -> str:
        """The name of an output, empty where it is not asked for."""
        return str(self.node.output[i]) if i < len(self.node.output) else ""

    def only(self, attributes: Collection[str], inputs: int, outputs: int) -> None:
        """Refuses a node that says more than its operator did when its meaning was written down here.

        Raises:
            UnsupportedError: naming the attribute, input or output.
        """
        unknown = sorted({a.name for a in self.node.attribute} - set(attributes))
        if unknown:
            raise UnsupportedError(f"it has attribute {unknown[0]!r}, whose meaning is not known")
        for names, most, word in ((self.node.input, inputs, "input"), (self.node.output, outputs, "output")):
            if any(names[most:]):
                raise UnsupportedError(f"it has {word} {most}, {names[most]!r}, whose meaning is not known")

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """The node's attributes by name; strings as bytes."""
        return {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}

    def past(self, first: int, second: int) -> tuple[str, str]:
        """The inputs past_key and past_value, empty where there is no past.

        Raises:
            UnsupportedError: when one of them is missing.
        """
        found = self.input(first), self.input(second)
        if bool(found[0]) != bool(found[1]):
            raise UnsupportedError("one of past_key and past_value is missing")
        return found

    def is_used(self, i: int) -> bool:
        """Whether anything reads an output."""
        name, index = self.output(i), self.index
        return name in index.outputs or name in index.captured or bool(index.consumers(name))

    def give(self, i: int, tensor: str) -> None:
        """Lets a tensor be an output that is asked for: its node is made to write it, or an Identity where it is given."""
        name = self.output(i)
        if not name:
            return
        nodes = self.builder.nodes
        writer = next((n for n in reversed(nodes) if tensor in n.output), None)
        if writer is None:
            nodes.append(onnx.helper.make_node("Identity", [tensor], [name], name=f"{self.builder.prefix}out{i}"))
            return
        for node in nodes:
            for field_ in (node.input, node.output):
                for place, other in enumerate(field_):
                    if other == tensor:
                        field_[place] = name


Lowerer = Callable[[Request], None]


@dataclass(frozen=True)
class Group:
    """A fused node and the nodes that stand for it."""

    place: int  # of the node in the graph
    nodes: tuple[onnx.NodeProto, ...]
    softmax: str  # its output among the nodes


@dataclass(frozen=True)
class Lowered:
    """A model and its working copy, in which fused attention is expanded.

    ``base`` is what a rewrite begins with: the original, with functions inlined that hold attention.
    """

    original: onnx.ModelProto
    base: onnx.ModelProto
    model: onnx.ModelProto
    groups: tuple[Group, ...] = ()
    fixed: frozenset[str] = frozenset()  # outputs of expanded nodes: no site reads what is behind them
    findings: tuple[Finding, ...] = ()
    known: Symbolic | None = None

    def written(self) -> dict[str, int]:
        """The tensors that nodes of groups write, each with the place of its fused node."""
        return {o: g.place for g in self.groups for n in g.nodes for o in n.output}

    def symbolic(self) -> Symbolic:
        """Shapes and values of the working copy."""
        return Symbolic(self.model, self.known)

    def partly(self, sites: Iterable[AttentionSite]) -> onnx.ModelProto:
        """The base with the nodes expanded that these sites are of."""
        wanted = {s.softmax for s in sites}
        chosen = [g for g in self.groups if g.softmax in wanted]
        if len(chosen) == len(self.groups):
            return self.model
        return _expanded(self.base, chosen) if chosen else self.base


def lower(
    original: onnx.ModelProto,
    model: onnx.ModelProto,
    lowerers: dict[tuple[str, str], Lowerer],
    known: Symbolic | None = None,
) -> Lowered:
    """Expands every node of an operator (domain, type) that has a lowerer; others are findings with their reason.

    Args:
        original: as it was loaded.
        model: the same with functions inlined.
        lowerers: what expands a node of an operator.
        known: of the model with all functions inlined, where some are left.
    """
    fused = [(i, n) for i, n in enumerate(model.graph.node) if (domain_of(n), n.op_type) in lowerers]
    if not fused:
        return Lowered(original, model, model, known=known)
    symbolic = Symbolic(model, known)
    index = GraphIndex(model.graph)
    taken = {n for node in model.graph.node for n in node_tensors(node)} | {t.name for t in model.graph.initializer}
    taken = {n for n in taken if _MARK in n}  # usually none
    groups: list[Group] = []
    findings: list[Finding] = []
    for place, node in fused:
        name = node.name or f"{node.op_type} of {node.output[0]}"
        builder = Builder(opset_of(model), _prefix(node, taken))
        request = Request(node, name, symbolic, index, builder, opset_of(model))
        try:
            lowerers[domain_of(node), node.op_type](request)
        except UnsupportedError as error:
            findings.append(Finding(name, False, f"{describe(node)}: {error}", {"output": node.output[0]}))
            continue
        softmax = next(n for n in builder.nodes if n.op_type == "Softmax").output[0]
        groups.append(Group(place, tuple(builder.nodes), softmax))
    fixed = {o for g in groups for o in model.graph.node[g.place].output if o}
    return Lowered(original, model, _expanded(model, groups), tuple(groups), frozenset(fixed), tuple(findings), known)


def _prefix(node: onnx.NodeProto, taken: set[str]) -> str:
    base, i = f"{node.output[0]}{_MARK}", 1
    prefix = base
    while any(n.startswith(prefix) for n in taken):
        i += 1
        prefix = f"{base}{i}_"
    return prefix


def expanded(nodes: Iterable[onnx.NodeProto], groups: Iterable[Group]) -> list[onnx.NodeProto]:
    """Nodes with those of some groups in place of their fused ones."""
    by_place = {g.place: g for g in groups}
    found: list[onnx.NodeProto] = []
    for place, node in enumerate(nodes):
        found.extend(by_place[place].nodes if place in by_place else [node])
    return found


def _expanded(model: onnx.ModelProto, groups: Iterable[Group]) -> onnx.ModelProto:
    return with_nodes(model, expanded(model.graph.node, groups))
