# SPDX-License-Identifier: Apache-2.0
"""Activations that ONNX Runtime's offline optimizer has fused with what stands before them, as nodes of their own again.

A runtime fuses what is left of them when it creates a session.
"""

from __future__ import annotations

import onnx
from onnx import helper

from stof.graph.index import all_nodes, is_standard, node_tensors
from stof.graph.names import FreshNames
from stof.graph.protobuf import copy_node, copy_with_nodes

_DOMAIN = "com.microsoft"
_WITH_BIAS = {"BiasGelu": "Gelu", "FastGelu": "FastGelu"}
_OF_GEMM = frozenset({"alpha", "beta", "transA", "transB"})


def with_separate_activations(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in which Relu stands behind each FusedGemm with it, and a bias before each GELU that adds one.

    Where there are none, it is the model itself.
    """
    if not any(is_fused_activation(n) for n in model.graph.node):
        return model
    names = FreshNames({t for n in all_nodes(model.graph.node) for t in (*node_tensors(n), n.name)})
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        nodes += _separate(node, names) if is_fused_activation(node) else [node]
    return copy_with_nodes(model, nodes)


def is_fused_activation(node: onnx.NodeProto) -> bool:
    """Whether a node is a FusedGemm with Relu, or a GELU with a bias."""
    if is_standard(node) or node.domain != _DOMAIN:
        return False
    if node.op_type == "FusedGemm":
        return any(a.name == "activation" and a.s == b"Relu" for a in node.attribute)
    return node.op_type in _WITH_BIAS and len(node.input) == 2 and all(node.input)


def _separate(node: onnx.NodeProto, names: FreshNames) -> list[onnx.NodeProto]:
    inner = names.make(f"{node.output[0]}/before")
    first, last = copy_node(node), copy_node(node)
    first.output[0], first.name, last.name = inner, names.make(inner), names.make(f"{node.output[0]}/activated")
    first.domain = ""
    if node.op_type == "FusedGemm":
        first.op_type = "Gemm"
        del first.attribute[:]
        first.attribute.extend(a for a in node.attribute if a.name in _OF_GEMM)
        return [first, helper.make_node("Relu", [inner], [node.output[0]], name=last.name)]
    first.op_type = "Add"
    del first.attribute[:]
    last.op_type = _WITH_BIAS[node.op_type]
    del last.input[:]
    last.input.append(inner)
    return [first, last]
