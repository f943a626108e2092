# SPDX-License-Identifier: Apache-2.0
"""The nodes in the place of a quantized attention, while they are made; and a model that has them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.attention.quantized.parameters import QuantizedConstants
from stof.graph.dead_code import remove_dead_code
from stof.graph.index import topological_order
from stof.graph.protobuf import copy_model, copy_node, replace_nodes
from stof.mask.roundings import Quantizer

_MOST_FOLDED = 64  # elements of a quantized constant that becomes a float one


@dataclass(frozen=True)
class QuantizedCore:
    """An attention whose scores or weights are rounded, with nodes that take its place.

    Attributes:
        name: that of its softmax node, or else its output.
        softmax: output of its softmax in the graph.
        new_softmax: output of the softmax among the nodes.
        nodes: in order of execution.
        replaced: outputs of the nodes that they replace.
        unrounded: masks that are added without the rounding that the graph has before.
    """

    name: str
    softmax: str
    new_softmax: str
    nodes: tuple[onnx.NodeProto, ...]
    replaced: frozenset[str]
    unrounded: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RoundedForms:
    """What became of the quantized attentions of a graph.

    Attributes:
        cores: those in one form.
        refused: why others are not, by the output of their softmax.
    """

    cores: tuple[QuantizedCore, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def within(self, tensors: Collection[str]) -> RoundedForms:
        """Those whose softmax and result are among some tensors: those of a subgraph."""
        cores = tuple(c for c in self.cores if c.replaced.issubset(tensors))
        return RoundedForms(cores, {s: reason for s, reason in self.refused.items() if s in tensors})

    @property
    def unrounded_masks(self) -> frozenset[str]:
        """Masks that are added to scores without the rounding that the graph has."""
        return frozenset(t for core in self.cores for t in core.unrounded)


NOTHING_ROUNDED = RoundedForms()


def with_cores(model: onnx.ModelProto, cores: Sequence[QuantizedCore]) -> onnx.ModelProto:
    """A copy of a model with the nodes of these cores."""
    replaced = frozenset(t for core in cores for t in core.replaced)
    kept = [n for n in model.graph.node if not replaced.intersection(n.output)]
    copy = copy_model(model)
    replace_nodes(copy.graph, [*kept, *(n for core in cores for n in core.nodes)])
    replace_nodes(copy.graph, [copy.graph.node[i] for i in topological_order(copy.graph.node)])
    remove_dead_code(copy.graph, model.graph)
    return copy


class NodeNames:
    """Names of new tensors, none of which the graph has."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._count = 0

    def make(self) -> str:
        """A fresh one."""
        self._count += 1
        return f"{self._prefix}{self._count}"


@dataclass
class CoreForm:
    """The nodes of one core so far, and what was passed on the way backwards from the second product.

    Attributes:
        names: of new tensors.
        constants: of the graph.
        nodes: new ones, in order of execution.
        softmaxes: outputs of the softmaxes of the graph that were passed.
        products: how many products of two computed tensors lie behind softmaxes.
        is_rounded: whether scores or weights are rounded.
        known: for a tensor of the graph the one in its place.
        unrounded: masks whose rounding was left out.
        with_products: tensors of the graph that are made of such a product.
    """

    names: NodeNames
    constants: QuantizedConstants
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    softmaxes: list[str] = field(default_factory=list)
    products: int = 0
    is_rounded: bool = False
    known: dict[str, str] = field(default_factory=dict)
    unrounded: set[str] = field(default_factory=set)
    with_products: set[str] = field(default_factory=set)

    def add(self, op: str, inputs: Sequence[str], like: onnx.NodeProto | None = None, **attributes: Any) -> str:
        """Appends a node with one output and returns that; ``like``: it has this node's attributes."""
        output = self.names.make()
        node = helper.make_node(op, list(inputs), [output], name=output, **attributes)
        if like is not None:
            node.attribute.extend(like.attribute)
        self.nodes.append(node)
        return output

    def copy(self, node: onnx.NodeProto, inputs: Sequence[str]) -> str:
        """The output of a node of other inputs: its own, where they are the same."""
        if list(inputs) == list(node.input):
            return str(node.output[0])
        copy = copy_node(node)
        copy.input[:] = inputs
        copy.output[:] = [self.names.make()]
        copy.name = copy.output[0]
        self.nodes.append(copy)
        return str(copy.output[0])

    def quantize(self, tensor: str, quantizer: Quantizer) -> str:
        """The codes of a tensor."""
        return self.add("QuantizeLinear", [tensor, *quantizer.inputs])

    def quantize_by_range(self, tensor: str) -> tuple[str, Quantizer]:
        """The codes of a tensor by the range of all its numbers."""
        codes, scale, point = (self.names.make() for _ in range(3))
        self.nodes.append(helper.make_node("DynamicQuantizeLinear", [tensor], [codes, scale, point], name=codes))
        return codes, Quantizer(scale, point)

    def dequantize(self, codes: str, quantizer: Quantizer) -> str:
        """The numbers of codes."""
        return self.add("DequantizeLinear", [codes, *quantizer.inputs])

    def fold(self, tensor: str, quantizer: Quantizer) -> str:
        """A small quantized constant as a float one; empty where it is none."""
        codes, scale = self.constants.array(tensor), self.constants.array(quantizer.scale)
        point = self.constants.array(quantizer.zero_point) if quantizer.zero_point else np.zeros((), np.int64)
        if codes is None or scale is None or point is None or codes.size > _MOST_FOLDED or scale.size != 1:
            return ""
        numbers = (codes.astype(np.int64) - point.astype(np.int64).reshape(())).astype(scale.dtype) * scale.reshape(())
        output = self.add("Constant", [])
        value = numpy_helper.from_array(np.asarray(numbers, scale.dtype))
        self.nodes[-1].attribute.append(helper.make_attribute("value", value))
        return output
