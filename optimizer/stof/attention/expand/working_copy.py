# SPDX-License-Identifier: Apache-2.0
"""The working copy of a model: its fused attention nodes are expanded to primitive nodes, so that one matcher finds all.

A fused node whose site is not replaced stays as it was: the emitted model is made from another copy, in which only the
nodes of replaced sites are expanded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx
from onnx import AttributeProto, TensorProto, helper

from stof.attention.quantized.core_form import NOTHING_ROUNDED, RoundedForms, with_cores
from stof.errors import UnsupportedError
from stof.graph.index import GraphIndex, describe, domain_of, node_tensors, opset_of
from stof.graph.node_builder import Builder
from stof.graph.node_fields import attributes_of, input_of
from stof.graph.protobuf import copy_with_nodes
from stof.mask.site import AttentionSite, Finding
from stof.symbolic import Symbolic

_MARK = "/stof_"  # in the names of tensors of expanded nodes
_PRECISIONS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)


def stands_for_fused(site: AttentionSite) -> bool:
    """Whether one fused node of the original computes the site."""
    return any(_MARK in name for name in site.nodes)


@dataclass
class FusedNode:
    """A fused node that is being expanded: access to its inputs, outputs and attributes, and the nodes made for it."""

    node: onnx.NodeProto
    name: str
    symbolic: Symbolic
    index: GraphIndex
    builder: Builder
    opset: int

    def input(self, i: int) -> str:
        """The name of an input, empty where it is not given."""
        return input_of(self.node, i)

    def output(self, i: int) -> str:
        """The name of an output, empty where the node does not write it."""
        return str(self.node.output[i]) if i < len(self.node.output) else ""

    def check_signature(self, attributes: Collection[str], inputs: int, outputs: int) -> None:
        """Refuses attributes, inputs and outputs that a later version of the operator may have added.

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
        return attributes_of(self.node)

    def integer(self, name: str, default: int) -> int:
        """An attribute that is an integer.

        Raises:
            UnsupportedError: when it is of another type.
        """
        return int(self._typed(name, AttributeProto.INT, "an integer", default))

    def number(self, name: str, default: float) -> float:
        """An attribute that is a finite float.

        Raises:
            UnsupportedError: when it is of another type, NaN or infinite.
        """
        value = float(self._typed(name, AttributeProto.FLOAT, "a float", default))
        if not math.isfinite(value):
            raise UnsupportedError(f"its attribute {name!r} is {value}, expected a finite number")
        return value

    def precision(self, name: str, default: int) -> int:
        """An attribute that names the float type of a softmax.

        Raises:
            UnsupportedError: when it names another type, or is no integer.
        """
        dtype = self.integer(name, default)
        if dtype not in _PRECISIONS:
            named = ", ".join(f"{d} ({TensorProto.DataType.Name(d)})" for d in sorted(_PRECISIONS))
            raise UnsupportedError(f"its attribute {name!r} is {dtype}, expected one of {named}")
        return dtype

    def _typed(self, name: str, kind: int, words: str, default: object) -> Any:
        attribute = next((a for a in self.node.attribute if a.name == name), None)
        if attribute is None:
            return default
        if attribute.type != kind:
            found = AttributeProto.AttributeType.Name(attribute.type)
            raise UnsupportedError(f"its attribute {name!r} is of type {found}, expected {words}")
        return helper.get_attribute_value(attribute)

    def past(self, first: int, second: int) -> tuple[str, str]:
        """The inputs past_key and past_value, empty where there is no past.

        Raises:
            UnsupportedError: when one of them is missing.
        """
        past = self.input(first), self.input(second)
        if bool(past[0]) != bool(past[1]):
            raise UnsupportedError("one of past_key and past_value is missing")
        return past

    def is_used(self, i: int) -> bool:
        """Whether anything reads an output."""
        name, index = self.output(i), self.index
        return name in index.outputs or name in index.captured or bool(index.consumers(name))

    def set_output(self, i: int, tensor: str) -> None:
        """Makes a tensor output ``i``: its node writes that name, or an Identity copies it where no new node writes it."""
        name = self.output(i)
        if not name:
            return
        nodes = self.builder.nodes
        writer = next((n for n in reversed(nodes) if tensor in n.output), None)
        if writer is None:
            nodes.append(helper.make_node("Identity", [tensor], [name], name=f"{self.builder.prefix}out{i}"))
            return
        for node in nodes:
            for field_ in (node.input, node.output):
                for j, other in enumerate(field_):
                    if other == tensor:
                        field_[j] = name


Expander = Callable[[FusedNode], None]


@dataclass(frozen=True)
class ExpandedNode:
    """A fused node and the primitive nodes in its place."""

    node_index: int  # of the fused node in the graph
    nodes: tuple[onnx.NodeProto, ...]
    softmax: str  # output of the softmax among the nodes


@dataclass(frozen=True)
class WorkingCopy:
    """A model for the search of sites, in which fused attention nodes are expanded."""

    original: onnx.ModelProto
    base: onnx.ModelProto  # the original with the functions inlined that contain attention; rewrites start from it
    model: onnx.ModelProto  # the base with fused nodes expanded
    expanded: tuple[ExpandedNode, ...] = ()
    materialized: frozenset[str] = frozenset()  # outputs of expanded nodes: no site reads from behind them
    findings: tuple[Finding, ...] = ()  # the fused nodes that could not be expanded, with the reason
    inlined: Symbolic | None = None  # of the model with all functions inlined, where some are left
    rounded: RoundedForms = NOTHING_ROUNDED  # quantized attention, which is in one form in ``model``

    def fused_nodes(self) -> dict[str, int]:
        """For each tensor that an expanded node's primitive nodes write, the index of the fused node."""
        return {o: e.node_index for e in self.expanded for n in e.nodes for o in n.output}

    def symbolic(self) -> Symbolic:
        """Shapes and values of the working copy."""
        return Symbolic(self.model, self.inlined)

    def expand_for(self, sites: Iterable[AttentionSite]) -> onnx.ModelProto:
        """The base with those fused nodes expanded that hold one of the sites."""
        wanted = {s.softmax for s in sites}
        chosen = [e for e in self.expanded if e.softmax in wanted]
        cores = [c for c in self.rounded.cores if c.new_softmax in wanted]
        if len(chosen) == len(self.expanded) and len(cores) == len(self.rounded.cores):
            return self.model
        model = _copy_with_expanded(self.base, chosen) if chosen else self.base
        return with_cores(model, cores) if cores else model


def expand_nodes(
    original: onnx.ModelProto,
    model: onnx.ModelProto,
    expanders: dict[tuple[str, str], Expander],
    inlined: Symbolic | None = None,
) -> WorkingCopy:
    """Expands every node whose operator has an expander. A node that cannot be expanded becomes a finding.

    Args:
        original: the model as it was loaded.
        model: the original with the functions inlined that contain attention.
        expanders: by operator (domain, type); each appends the primitive nodes to its FusedNode's builder.
        inlined: shapes of the model with all functions inlined, where some are left.
    """
    fused = [(i, n) for i, n in enumerate(model.graph.node) if (domain_of(n), n.op_type) in expanders]
    if not fused:
        return WorkingCopy(original, model, model, inlined=inlined)
    symbolic = Symbolic(model, inlined)
    index = GraphIndex(model.graph)
    taken = {n for node in model.graph.node for n in node_tensors(node)} | {t.name for t in model.graph.initializer}
    taken = {n for n in taken if _MARK in n}  # usually none
    expanded: list[ExpandedNode] = []
    findings: list[Finding] = []
    for i, node in fused:
        name = node.name or f"{node.op_type} of {node.output[0]}"
        builder = Builder(opset_of(model), _fresh_prefix(node, taken))
        fused_node = FusedNode(node, name, symbolic, index, builder, opset_of(model))
        try:
            expanders[domain_of(node), node.op_type](fused_node)
        except UnsupportedError as error:
            findings.append(Finding(name, False, f"{describe(node)}: {error}", {"output": node.output[0]}))
            continue
        softmax = next(n for n in builder.nodes if n.op_type == "Softmax").output[0]
        expanded.append(ExpandedNode(i, tuple(builder.nodes), softmax))
    materialized = frozenset(o for e in expanded for o in model.graph.node[e.node_index].output if o)
    copy = _copy_with_expanded(model, expanded)
    return WorkingCopy(original, model, copy, tuple(expanded), materialized, tuple(findings), inlined)


def _fresh_prefix(node: onnx.NodeProto, taken: set[str]) -> str:
    """A prefix for the names of a fused node's tensors that no other tensor has."""
    base, i = f"{node.output[0]}{_MARK}", 1
    prefix = base
    while any(n.startswith(prefix) for n in taken):
        i += 1
        prefix = f"{base}{i}_"
    return prefix


def with_expanded(nodes: Iterable[onnx.NodeProto], expanded: Iterable[ExpandedNode]) -> list[onnx.NodeProto]:
    """The nodes of a graph with primitive nodes in place of the fused ones."""
    by_index = {e.node_index: e for e in expanded}
    expanded_nodes: list[onnx.NodeProto] = []
    for i, node in enumerate(nodes):
        expanded_nodes.extend(by_index[i].nodes if i in by_index else [node])
    return expanded_nodes


def _copy_with_expanded(model: onnx.ModelProto, expanded: Iterable[ExpandedNode]) -> onnx.ModelProto:
    return copy_with_nodes(model, with_expanded(model.graph.node, expanded))
