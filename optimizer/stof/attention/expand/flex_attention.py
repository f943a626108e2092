# SPDX-License-Identifier: Apache-2.0
"""Expands ``FlexAttention`` of domain ``ai.onnx.preview`` to primitive nodes (source: the specification in onnx 1.23).

Its ``score_mod`` and ``prob_mod`` are graphs. They are written in place, between the scores, the softmax and the values, where
masks, biases and soft caps are found as in any other graph.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto

from stof.attention.expand.primitives import (
    check_groups,
    repeat_heads,
    require_float_type,
    require_shape,
    require_size,
)
from stof.attention.expand.working_copy import FusedNode
from stof.errors import UnsupportedError
from stof.graph.index import all_nodes
from stof.graph.inline_subgraph import inline_subgraph

PREVIEW = "ai.onnx.preview"
_ATTRIBUTES = ("prob_mod", "scale", "score_mod", "softmax_precision")
_OPERANDS = ("query", "key", "value")


def expand_flex_attention(fused: FusedNode) -> None:
    """Appends primitive nodes that compute the output of a FlexAttention.

    Raises:
        UnsupportedError: when the node cannot be expanded, with the reason.
    """
    fused.check_signature(_ATTRIBUTES, 3, 1)
    b, symbolic = fused.builder, fused.symbolic
    query, key, value = (fused.input(i) for i in range(3))
    shapes = [require_shape(symbolic, t, r, (4,)) for t, r in ((query, "Q"), (key, "K"), (value, "V"))]
    counts = [require_size(s[1], f"the number of {w} heads") for s, w in zip(shapes, _OPERANDS, strict=True)]
    if counts[1] != counts[2]:
        raise UnsupportedError(f"it has {counts[1]} key heads and {counts[2]} value heads, expected as many of both")
    heads, groups = counts[:2]
    check_groups(heads, groups)
    dtype = require_float_type(symbolic, query)
    precision = fused.precision("softmax_precision", TensorProto.FLOAT)
    if precision not in (TensorProto.FLOAT, dtype):
        name = TensorProto.DataType.Name(precision)
        raise UnsupportedError(f"softmax_precision is {name}, expected FLOAT or the type of its operands")
    scale = fused.number("scale", 1.0 / np.sqrt(require_size(shapes[0][3], "the head size")))
    key, value = (repeat_heads(b, t, heads, heads // groups) for t in (key, value))
    scores = b.add("MatMul", [query, b.add("Transpose", [key], perm=[0, 1, 3, 2])])
    if precision != dtype:
        scores = b.add("Cast", [scores], to=precision)
    if scale != 1.0:
        numbers = onnx.helper.tensor_dtype_to_np_dtype(precision)
        scores = b.add("Mul", [scores, b.constant(scale, numbers)])
    scores = _modify(fused, "score_mod", scores)
    weights = b.add("Softmax", [scores], axis=-1)
    b.nodes[-1].name = fused.name
    weights = _modify(fused, "prob_mod", weights)
    if precision != dtype:
        weights = b.add("Cast", [weights], to=dtype)
    fused.set_output(0, b.add("MatMul", [weights, value]))


def _modify(fused: FusedNode, name: str, tensor: str) -> str:
    """The result of a modifier graph for a tensor; the tensor itself where the node has no such graph."""
    graph = fused.attributes.get(name)
    if graph is None:
        return tensor
    if not isinstance(graph, onnx.GraphProto):
        raise UnsupportedError(f"its attribute {name!r} is {graph!r}, expected a graph")
    if len(graph.input) != 1 or len(graph.output) != 1:
        raise UnsupportedError(
            f"its {name} has {len(graph.input)} inputs and {len(graph.output)} outputs, expected one of each"
        )
    if any(n.op_type == "Softmax" for n in all_nodes(graph.node)):
        raise UnsupportedError(f"its {name} has a softmax of its own")
    return inline_subgraph(fused.builder, graph, [tensor])[0]
