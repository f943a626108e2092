# SPDX-License-Identifier: Apache-2.0
"""Writes StofSparseMLP nodes and their function: the only step that changes a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from stof.graph.dead_code import remove_dead_code
from stof.graph.index import DOMAIN, contrib_version_of, opset_of
from stof.graph.local_functions import add_functions, check_absent
from stof.graph.protobuf import copy_model, copy_node, replace_nodes
from stof.sparse_mlp.function_body import MlpVariant, make_mlp_function, rounding_level
from stof.sparse_mlp.site import INPUT_INDEX, OP, OP_INPUTS, MlpSite, MlpWeight
from stof.sparse_mlp.stored_selector import make_ordered_arrays
from stof.sparse_mlp.weight_layouts import WeightLayouts

_BIAS = 5  # the input of MatMulNBits


def emit_mlps(model: onnx.ModelProto, sites: Sequence[MlpSite], folder: Path) -> onnx.ModelProto:
    """A copy of the model in which a StofSparseMLP computes the output of every site.

    Its weights have a row for each neuron (:class:`WeightLayouts`). A gate that is part of a larger matmul, or whose neurons get
    another order, gets a matmul of its own.

    Args:
        model: the model.
        sites: of this model.
        folder: of its external data.

    Raises:
        UnsupportedError: when the model holds the operator already.
    """
    check_absent(model, OP)
    emitted = copy_model(model)
    if not sites:
        return emitted
    by_output = {s.output: s for s in sites}
    gates = {s.projection.tensor: s for s in sites if s.projection is not None and s.rewrites_gate}
    producer = {o: n for n in model.graph.node for o in n.output}
    layouts = WeightLayouts(emitted, folder)
    variants: dict[MlpVariant, int] = {}
    nodes: list[onnx.NodeProto] = []
    most = 0
    for node in model.graph.node:
        site = by_output.get(node.output[0]) if node.output else None
        if site is None:
            gate = next((gates[o] for o in node.output if o in gates), None)
            nodes += [node] if gate is None else _gate_nodes(gate, producer, layouts)
            continue
        number = variants.setdefault(MlpVariant.of(site), len(variants))
        inputs = _inputs(site, layouts)
        most = max(most, len(inputs))
        nodes += layouts.take_nodes()
        name = layouts.names.make(f"{site.name.rpartition('/')[0] or site.name}/{OP}")
        call = helper.make_node(OP, inputs, [site.output], name=name, domain=DOMAIN)
        attributes = {"activation": site.activation, "selection": site.selection, "mlp_id": number}
        if site.selector is not None and site.selector.predictor_activation != "none":
            attributes["predictor_activation"] = site.selector.predictor_activation
        attributes |= _quantization_attributes(site)
        attributes |= {} if site.order is None else {"hot_neurons": site.order.hot}
        call.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        nodes.append(call)
    replace_nodes(emitted.graph, nodes)
    remove_dead_code(emitted.graph, model.graph)
    add_functions(emitted, [make_mlp_function(list(variants), most, opset_of(model), contrib_version_of(model))])
    return emitted


def _quantization_attributes(site: MlpSite) -> dict[str, int]:
    q = site.quantization
    return {} if q is None else {"bits": q.bits, "block_size": q.block_size, "accuracy_level": rounding_level(site)}


def without_selection(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy of a model in which every neuron of predicted MLPs is active, so that its outputs are those of the dense ones."""
    index = INPUT_INDEX["threshold"]
    thresholds = {
        n.input[index] for n in model.graph.node if n.op_type == OP and n.domain == DOMAIN and len(n.input) > index
    }
    if not thresholds - {""}:
        return model
    dense = copy_model(model)
    for tensor in dense.graph.initializer:
        if tensor.name in thresholds:
            lowest = np.full([int(d) for d in tensor.dims], -np.inf, np.float32)
            tensor.CopyFrom(numpy_helper.from_array(lowest, tensor.name))
    return dense


def _inputs(site: MlpSite, layouts: WeightLayouts) -> list[str]:
    inputs = [""] * len(OP_INPUTS)
    order = site.order

    def put(prefix: str, tensors: Sequence[str]) -> None:
        for name, tensor in zip(("weight", "scales", "zero_points"), tensors, strict=False):
            inputs[INPUT_INDEX[f"{prefix}_{name}"]] = tensor

    def put_rows(prefix: str, weight: MlpWeight) -> None:
        """A weight that multiplies tokens."""
        inputs[INPUT_INDEX[f"{prefix}_bias"]] = layouts.bias(weight, order)
        is_dense = weight.quantization is None
        put(prefix, [layouts.by_neuron(weight, order)] if is_dense else layouts.in_rows(weight, order))

    # A runtime selects the kernel by the type of the first input.
    inputs[INPUT_INDEX["input"]] = site.tokens_input or site.gate
    if site.selector is not None:
        for name, array in make_ordered_arrays(site).items():
            inputs[INPUT_INDEX[name]] = layouts.add(f"{site.name}/{name}", array)
    if site.selection == "predictor" and site.gate_weight is not None:
        put_rows("gate", site.gate_weight)
    else:
        inputs[INPUT_INDEX["gate"]] = site.gate
    inputs[INPUT_INDEX["down_bias"]] = site.down.bias
    is_dense = site.down.quantization is None
    put("down", [layouts.by_neuron(site.down, order)] if is_dense else layouts.regroup(site.down, order))
    if site.up is not None:
        put_rows("up", site.up)
    while not inputs[-1]:
        inputs.pop()
    return inputs


def _gate_nodes(site: MlpSite, producer: Mapping[str, onnx.NodeProto], layouts: WeightLayouts) -> list[onnx.NodeProto]:
    """The matmul of a gate alone, with the neurons in their order. It writes the tensor that the original does."""
    gate = site.projection
    assert gate is not None
    weight, order = gate.weight, site.order
    matmul = copy_node(producer[gate.matmul_output])
    bias = layouts.bias(weight, order)
    matmul.name = layouts.names.make(matmul.name or matmul.op_type)
    if weight.quantization is not None:
        tensors = layouts.in_rows(weight, order, is_marked=True)
        for i, tensor in enumerate(tensors, 1):
            if tensor:
                matmul.input[i] = tensor
        for attribute in matmul.attribute:
            if attribute.name == "N":
                attribute.i = weight.outer
    else:
        matmul.input[1] = layouts.as_stored(weight, order)
    is_own = matmul.op_type == "Gemm" and len(matmul.input) > 2 and matmul.input[2]
    is_own = is_own or (weight.quantization is not None and len(matmul.input) > _BIAS and bool(matmul.input[_BIAS]))
    if is_own:
        matmul.input[2 if matmul.op_type == "Gemm" else _BIAS] = bias
    adds = bool(bias) and not is_own
    matmul.output[0] = layouts.new_tensor(f"{gate.tensor}/matmul") if adds else gate.tensor
    nodes = [*layouts.take_nodes(), matmul]
    if adds:
        name = layouts.names.make(f"{matmul.name}/bias")
        nodes.append(helper.make_node("Add", [matmul.output[0], bias], [gate.tensor], name=name))
    return nodes
