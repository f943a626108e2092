# SPDX-License-Identifier: Apache-2.0
"""Takes RMS norms out of GroupQueryAttention nodes: ONNX Runtime's CPU provider refuses nodes with them."""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnx import helper

from stof.cached_attention.site import INPUT_INDEX, CacheSite
from stof.graph.index import node_tensors, opset_of
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_node, copy_with_nodes


def expand_norms(model: onnx.ModelProto, sites: Sequence[CacheSite]) -> onnx.ModelProto:
    """A copy in which standard nodes normalize the heads of queries and keys; the model itself where no site has norms."""
    wanted = {s.node.output[0]: s for s in sites if s.input("q_norm_weight")}
    if not wanted:
        return model
    taken = {t for node in model.graph.node for t in node_tensors(node)}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        site = wanted.get(node.output[0]) if node.output else None
        if site is None:
            nodes.append(node)
            continue
        prefix = f"{node.output[0]}/stof_norm_"
        while any(t.startswith(prefix) for t in taken):
            prefix += "_"
        builder = Builder(opset_of(model), prefix)
        plain = _without_norms(builder, site, node)
        nodes += [*builder.nodes, plain]
    return copy_with_nodes(model, nodes)


def _without_norms(b: Builder, site: CacheSite, node: onnx.NodeProto) -> onnx.NodeProto:
    """The node on normalized queries and keys, which the builder gets the nodes of."""
    counts = (site.num_heads, site.kv_num_heads, site.kv_num_heads)
    tensors = [site.input(name) for name in ("query", "key", "value")]
    if site.is_packed:
        tensors = [b.name() for _ in counts]
        sizes = b.constant([n * site.head_size for n in counts])
        b.nodes.append(helper.make_node("Split", [site.input("query"), sizes], tensors, name=tensors[0], axis=2))
    for i, weight in enumerate(("q_norm_weight", "k_norm_weight")):
        tensors[i] = _normalize(b, site, tensors[i], site.input(weight), counts[i])
    found = copy_node(node)
    for i, tensor in enumerate(tensors):
        found.input[i] = tensor
    for weight in ("q_norm_weight", "k_norm_weight"):
        found.input[INPUT_INDEX[weight]] = ""
    while not found.input[-1]:
        found.input.pop()
    return found


def _normalize(b: Builder, site: CacheSite, tensor: str, weight: str, heads: int) -> str:
    """The RMS norm of each head of [B, S, heads * D]."""
    x = b.add("Reshape", [tensor, b.constant([0, 0, heads, site.head_size])])
    mean = b.reduce("ReduceMean", b.add("Mul", [x, x]), 3)
    epsilon = b.constant(site.norm_epsilon, helper.tensor_dtype_to_np_dtype(site.dtype))
    root = b.add("Sqrt", [b.add("Add", [mean, epsilon])])
    scaled = b.add("Mul", [b.add("Div", [x, root]), weight])
    return b.add("Reshape", [scaled, b.constant([0, 0, heads * site.head_size])])
