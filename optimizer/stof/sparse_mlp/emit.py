# SPDX-License-Identifier: Apache-2.0
"""Writes StofSparseMLP nodes and their function: the only step that changes a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.graph.dead_code import remove_dead_code
from stof.graph.external_data import is_external
from stof.graph.index import DOMAIN, all_nodes, node_tensors, opset_of
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_model, replace_nodes
from stof.sparse_mlp.function_body import MlpVariant, make_mlp_function
from stof.sparse_mlp.site import INPUT_INDEX, OP, OP_INPUTS, MlpSite, Weight


def emit_mlps(model: onnx.ModelProto, sites: Sequence[MlpSite]) -> onnx.ModelProto:
    """A copy of the model in which a StofSparseMLP computes the output of every site.

    Weights whose rows are not neurons are transposed: in the model where it holds them, and by a node where they are
    external data. Runtimes compute such a node once, when they create a session.

    Raises:
        UnsupportedError: when the model holds the operator already.
    """
    check_absent(model, OP)
    found = copy_model(model)
    if not sites:
        return found
    by_output = {s.output: s for s in sites}
    layouts = _Weights(found)
    variants: dict[MlpVariant, int] = {}
    nodes: list[onnx.NodeProto] = []
    most = 0
    for node in model.graph.node:
        site = by_output.get(node.output[0]) if node.output else None
        if site is None:
            nodes.append(node)
            continue
        number = variants.setdefault(MlpVariant.of(site), len(variants))
        inputs = _inputs(site, layouts)
        most = max(most, len(inputs))
        nodes += layouts.take_nodes()
        nodes.append(
            helper.make_node(
                OP,
                inputs,
                [site.output],
                name=layouts.names.make(f"{site.name.rpartition('/')[0] or site.name}/{OP}"),
                domain=DOMAIN,
                activation=site.activation,
                selection="nonzero",
                mlp_id=number,
            )
        )
    replace_nodes(found.graph, nodes)
    remove_dead_code(found.graph, model.graph)
    add_functions(found, [make_mlp_function(list(variants), most, opset_of(model))])
    return found


def _inputs(site: MlpSite, layouts: _Weights) -> list[str]:
    inputs = [""] * len(OP_INPUTS)
    inputs[INPUT_INDEX["gate"]] = site.gate
    inputs[INPUT_INDEX["input"]] = (
        site.input or site.gate
    )  # a runtime selects the kernel by the type of the first input
    inputs[INPUT_INDEX["down_weight"]] = layouts.by_neuron(site.down)
    inputs[INPUT_INDEX["down_bias"]] = site.down.bias
    if site.up is not None:
        inputs[INPUT_INDEX["up_weight"]] = layouts.by_neuron(site.up)
        inputs[INPUT_INDEX["up_bias"]] = site.up.bias
    while not inputs[-1]:
        inputs.pop()
    return inputs


class _Weights:
    """Gives the weights of a model by neuron. Sites that share a weight share its transpose."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = model.graph
        self.names = FreshNames(n.name for n in all_nodes(graph.node))
        self._tensors = FreshNames(
            {t for n in graph.node for t in node_tensors(n)} | {t.name for t in graph.initializer}
        )
        self._tensors.reserve(i.name for i in graph.input)
        self._graph = graph
        self._stored = {t.name: t for t in graph.initializer}
        self._transposed: dict[str, str] = {}
        self._nodes: list[onnx.NodeProto] = []

    def by_neuron(self, weight: Weight) -> str:
        """The tensor whose rows are neurons."""
        if weight.is_by_neuron:
            return weight.tensor
        if weight.tensor not in self._transposed:
            name = self._transposed[weight.tensor] = self._tensors.make(f"{weight.tensor}/by_neuron")
            stored = self._stored[weight.tensor]
            if is_external(stored):
                node = helper.make_node("Transpose", [stored.name], [name], name=self.names.make(name), perm=[1, 0])
                self._nodes.append(node)
            else:
                array = np.ascontiguousarray(numpy_helper.to_array(stored).T)
                self._graph.initializer.append(numpy_helper.from_array(array, name))
        return self._transposed[weight.tensor]

    def take_nodes(self) -> list[onnx.NodeProto]:
        """The nodes that were made since the last call."""
        found, self._nodes = self._nodes, []
        return found
