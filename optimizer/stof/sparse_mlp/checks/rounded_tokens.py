# SPDX-License-Identifier: Apache-2.0
"""A model whose MatMulNBits multiply tokens that are rounded to int8, as accuracy_level 4 allows.

ONNX Runtime's kernel rounds them where it has packed the weights, and does not in the runs of verification. So one legal run of
the original is made of nodes.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import onnx

from stof.graph.index import all_nodes, node_tensors, opset_of
from stof.graph.names import FreshNames
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_node, copy_with_nodes
from stof.sparse_mlp.quantized import is_quantized_matmul
from stof.sparse_mlp.site import MlpSite, MlpWeight

_MOST = 127.0


def round_tokens(model: onnx.ModelProto, sites: Iterable[MlpSite], dtype: int) -> onnx.ModelProto | None:
    """A copy in which the matmuls of the sites read rounded tokens; None where no site has quantized weights.

    Args:
        model: holds the original's matmuls.
        sites: the sites.
        dtype: element type of the tokens in this model.
    """
    weights: dict[str, MlpWeight] = {}
    for site in sites:
        if site.rounds_tokens:
            weights |= {w.tensor: w for w in site.weights}
    if not weights:
        return None
    taken = FreshNames({t for n in all_nodes(model.graph.node) for t in node_tensors(n)})
    builder = Builder(opset_of(model), taken.make("stof_rounded_"))
    for node in model.graph.node:
        weight = weights.get(node.input[1]) if is_quantized_matmul(node) else None
        changed = node
        if weight is not None:
            changed = copy_node(node)
            changed.input[0] = _round(builder, node.input[0], weight, dtype)
        builder.nodes.append(changed)
    return copy_with_nodes(model, builder.nodes)


def _round(builder: Builder, tensor: str, weight: MlpWeight, dtype: int) -> str:
    """Adds nodes that round blocks of the last axis to int8, each with a scale of its own."""
    q = weight.quantization
    assert q is not None
    shape = builder.add("Shape", [tensor])
    blocks = builder.constant([-1, weight.inner // q.block_size, q.block_size])
    array = builder.add("Reshape", [tensor, blocks])
    largest = builder.reduce_max(builder.add("Abs", [array]), 2)
    most, least = (builder.add("Cast", [builder.constant(x, np.float32)], to=dtype) for x in (_MOST, 1e-30))
    scale = builder.add("Max", [builder.add("Div", [largest, most]), least])
    steps = builder.add("Round", [builder.add("Div", [array, scale])])
    return builder.add("Reshape", [builder.add("Mul", [steps, scale]), shape])
