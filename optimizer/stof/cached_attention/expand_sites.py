# SPDX-License-Identifier: Apache-2.0
"""Replaces nodes over a KV cache by others, for the models that a verification runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import onnx
from onnx import helper

from stof.cached_attention.node_site import NodeSite
from stof.graph.index import node_tensors, opset_of
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_with_nodes

Site = TypeVar("Site", bound=NodeSite)


def expand_sites(
    model: onnx.ModelProto,
    sites: Sequence[Site],
    stem: str,
    expand: Callable[[Builder, Site, onnx.NodeProto], None],
) -> onnx.ModelProto:
    """A copy of a model in which other nodes stand in place of the node of each site.

    Args:
        model: the model.
        sites: of this model.
        stem: of the names of new tensors, behind the node's first output.
        expand: gives the builder the nodes that write the outputs of a site's node.
    """
    wanted = {s.node.output[0]: s for s in sites}
    taken = {t for node in model.graph.node for t in node_tensors(node)}
    nodes: list[onnx.NodeProto] = []
    for node in model.graph.node:
        site = wanted.get(node.output[0]) if node.output else None
        if site is None:
            nodes.append(node)
            continue
        prefix = f"{node.output[0]}/{stem}_"
        while any(t.startswith(prefix) for t in taken):
            prefix += "_"
        builder = Builder(opset_of(model), prefix)
        expand(builder, site, node)
        nodes += builder.nodes
    return copy_with_nodes(model, nodes)


def split_packed(b: Builder, site: NodeSite, axis: int) -> list[str]:
    """The tensors of query, key and value; where they lie in one, nodes split it along an axis."""
    tensors = [site.input(name) for name in ("query", "key", "value")]
    if site.is_packed:
        tensors = [b.name() for _ in tensors]
        counts = (site.num_heads, site.kv_num_heads, site.kv_num_heads)
        sizes = b.constant([n * site.head_size for n in counts])
        b.nodes.append(helper.make_node("Split", [site.input("query"), sizes], tensors, name=tensors[0], axis=axis))
    return tensors


def add_rms_norm(b: Builder, x: str, axis: int, weight: str, epsilon: str) -> str:
    """Nodes for the RMS norm along the last axis, whose number is given."""
    mean = b.reduce("ReduceMean", b.add("Mul", [x, x]), axis)
    root = b.add("Sqrt", [b.add("Add", [mean, epsilon])])
    return b.add("Mul", [b.add("Div", [x, root]), weight])
