# SPDX-License-Identifier: Apache-2.0
"""The matmuls by constant weights in subgraphs (branches of If, bodies of Loop and Scan), which stay as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import onnx
from onnx import AttributeProto, TensorProto

from stof.fusion.gemm import MATMUL_OPS
from stof.gemm_precision.plain_gemms import constant_tensors
from stof.graph.index import describe, domain_of
from stof.graph.node_fields import input_of


@dataclass(frozen=True, eq=False)
class SubgraphMatmul:
    """A matmul of a subgraph by a constant weight.

    Attributes:
        node: the matmul.
        weight: its weight, of the subgraph or of a graph around it.
        subgraph: in words.
    """

    node: onnx.NodeProto
    weight: TensorProto
    subgraph: str


def find_subgraph_matmuls(graph: onnx.GraphProto) -> Iterator[SubgraphMatmul]:
    """Those of all subgraphs of a graph, in its order, whose weights are initializers or outputs of Constant nodes."""
    yield from _find(graph, {}, "")


def _find(graph: onnx.GraphProto, outer: Mapping[str, TensorProto], subgraph: str) -> Iterator[SubgraphMatmul]:
    # What a subgraph declares itself hides outer tensors of the same name.
    hidden = {v.name for v in graph.input} | {o for n in graph.node for o in n.output}
    stored = {name: tensor for name, tensor in outer.items() if name not in hidden}
    stored |= {t.name: t for t in graph.initializer if t.name not in hidden} | constant_tensors(graph.node)
    for node in graph.node:
        if subgraph and node.op_type in MATMUL_OPS and not domain_of(node):
            weight = stored.get(input_of(node, 1))
            if weight is not None and input_of(node, 0) not in stored:
                yield SubgraphMatmul(node, weight, subgraph)
        for attribute in node.attribute:
            graphs = [attribute.g] if attribute.type == AttributeProto.GRAPH else attribute.graphs
            for inner in graphs:
                yield from _find(inner, stored, f"{attribute.name} of {describe(node)}")
