# SPDX-License-Identifier: Apache-2.0
"""Writes StofSparseMLP nodes and their function: the only step that changes a graph."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.graph.dead_code import remove_dead_code
from stof.graph.external_data import is_external, map_array
from stof.graph.index import DOMAIN, all_nodes, node_tensors, opset_of
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_model, replace_nodes
from stof.sparse_mlp.function_body import MlpVariant, make_mlp_function, rounding_level
from stof.sparse_mlp.quantized import regroup_by_neuron
from stof.sparse_mlp.site import INPUT_INDEX, OP, OP_INPUTS, MlpSite, MlpWeight
from stof.sparse_mlp.stored_selector import stored_arrays


def emit_mlps(model: onnx.ModelProto, sites: Sequence[MlpSite], folder: Path) -> onnx.ModelProto:
    """A copy of the model in which a StofSparseMLP computes the output of every site.

    Weights whose rows are not neurons are transposed: in the model where it holds them, and by a node where they are
    external data. Runtimes compute such a node once, when they create a session. Quantized weights are regrouped, and become
    initializers of the model. :mod:`stof.graph.derived_data` moves all of them into a file when the model is written.

    Args:
        model: the model.
        sites: of this model.
        folder: of its external data.

    Raises:
        UnsupportedError: when the model holds the operator already.
    """
    check_absent(model, OP)
    found = copy_model(model)
    if not sites:
        return found
    by_output = {s.output: s for s in sites}
    layouts = _Weights(found, folder)
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
        name = layouts.names.make(f"{site.name.rpartition('/')[0] or site.name}/{OP}")
        call = helper.make_node(OP, inputs, [site.output], name=name, domain=DOMAIN)
        attributes = {"activation": site.activation, "selection": site.selection, "mlp_id": number}
        attributes |= _quantization_attributes(site)
        call.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        nodes.append(call)
    replace_nodes(found.graph, nodes)
    remove_dead_code(found.graph, model.graph)
    contrib = next((int(e.version) for e in found.opset_import if e.domain == "com.microsoft"), 1)
    add_functions(found, [make_mlp_function(list(variants), most, opset_of(model), contrib)])
    return found


def _quantization_attributes(site: MlpSite) -> dict[str, int]:
    q = site.quantization
    return {} if q is None else {"bits": q.bits, "block_size": q.block_size, "accuracy_level": rounding_level(site)}


def without_selection(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model in which every neuron of predicted MLPs is active, so that its outputs are those of the dense ones."""
    index = INPUT_INDEX["threshold"]
    own = {n.input[index] for n in model.graph.node if n.op_type == OP and n.domain == DOMAIN and len(n.input) > index}
    if not own - {""}:
        return model
    found = copy_model(model)
    for tensor in found.graph.initializer:
        if tensor.name in own:
            lowest = np.full([int(d) for d in tensor.dims], -np.inf, np.float32)
            tensor.CopyFrom(numpy_helper.from_array(lowest, tensor.name))
    return found


def _inputs(site: MlpSite, layouts: _Weights) -> list[str]:
    inputs = [""] * len(OP_INPUTS)

    def put(prefix: str, tensors: Sequence[str]) -> None:
        for name, tensor in zip(("weight", "scales", "zero_points"), tensors, strict=False):
            inputs[INPUT_INDEX[f"{prefix}_{name}"]] = tensor

    def put_rows(prefix: str, weight: MlpWeight) -> None:
        """A weight that multiplies tokens."""
        inputs[INPUT_INDEX[f"{prefix}_bias"]] = weight.bias
        put(prefix, layouts.in_rows(weight) if weight.quantization is not None else [layouts.by_neuron(weight)])

    # A runtime selects the kernel by the type of the first input.
    inputs[INPUT_INDEX["input"]] = site.tokens_input or site.gate
    if site.selector is not None:
        for name, array in stored_arrays(site).items():
            inputs[INPUT_INDEX[name]] = layouts.add(f"{site.name}/{name}", array)
    if site.selection == "predictor" and site.gate_weight is not None:
        put_rows("gate", site.gate_weight)
    else:
        inputs[INPUT_INDEX["gate"]] = site.gate
    inputs[INPUT_INDEX["down_bias"]] = site.down.bias
    put("down", layouts.regrouped(site.down) if site.down.quantization is not None else [layouts.by_neuron(site.down)])
    if site.up is not None:
        put_rows("up", site.up)
    while not inputs[-1]:
        inputs.pop()
    return inputs


class _Weights:
    """Gives the weights of a model by neuron. Sites that share a weight share its transpose."""

    def __init__(self, model: onnx.ModelProto, folder: Path) -> None:
        graph = model.graph
        self.names = FreshNames(n.name for n in all_nodes(graph.node))
        self._tensors = FreshNames(
            {t for n in graph.node for t in node_tensors(n)} | {t.name for t in graph.initializer}
        )
        self._tensors.reserve(i.name for i in graph.input)
        self._graph = graph
        self._stored = {t.name: t for t in graph.initializer}
        self._folder = folder
        self._transposed: dict[str, str] = {}
        self._regrouped: dict[MlpWeight, list[str]] = {}
        self._nodes: list[onnx.NodeProto] = []

    def by_neuron(self, weight: MlpWeight) -> str:
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

    def in_rows(self, weight: MlpWeight) -> list[str]:
        """A quantized weight that lies by neuron, its scales and zero points, with the operator's shapes."""
        q = weight.quantization
        assert q is not None
        blocks = weight.inner // q.block_size
        shapes = [
            (weight.tensor, [weight.outer, blocks, q.block_size * q.bits // 8]),
            (q.scales, [weight.outer, blocks]),
            (q.zero_points, [weight.outer, -(-blocks * q.bits // 8)]),
        ]
        return [self._with_shape(name, dims) if name else "" for name, dims in shapes]

    def _with_shape(self, tensor: str, dims: Sequence[int]) -> str:
        """The same elements with another shape; external data stays where it is."""
        stored = self._stored[tensor]
        if list(stored.dims) == list(dims):
            return tensor
        key = f"{tensor}/by_neuron"
        if key not in self._transposed:
            self._transposed[key] = self._tensors.make(key)
            shaped = onnx.TensorProto()
            shaped.CopyFrom(stored)
            shaped.name = self._transposed[key]
            del shaped.dims[:]
            shaped.dims.extend(dims)
            self._graph.initializer.append(shaped)
        return self._transposed[key]

    def regrouped(self, weight: MlpWeight) -> list[str]:
        """A quantized weight in the order of neurons, its scales and zero points."""
        q = weight.quantization
        assert q is not None
        if weight not in self._regrouped:
            names = (weight.tensor, q.scales, q.zero_points)
            given = [map_array(self._stored[n], self._folder) if n else None for n in names]
            values, scales, zeros = given
            assert values is not None
            assert scales is not None
            found = regroup_by_neuron(weight, values, scales, zeros)
            made = []
            for name, array in zip(names, (found.values, found.scales, found.zero_points), strict=True):
                made.append("" if array is None else self._tensors.make(f"{name}/by_neuron"))
                if array is not None:
                    self._graph.initializer.append(numpy_helper.from_array(array, made[-1]))
            self._regrouped[weight] = made
        return self._regrouped[weight]

    def add(self, wanted: str, array: np.ndarray) -> str:
        """A new initializer; returns its name."""
        name = self._tensors.make(wanted)
        self._graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def take_nodes(self) -> list[onnx.NodeProto]:
        """The nodes that were made since the last call."""
        found, self._nodes = self._nodes, []
        return found
