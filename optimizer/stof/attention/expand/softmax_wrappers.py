# SPDX-License-Identifier: Apache-2.0
"""Takes the reshapes away that stand around a softmax and do not change what it computes.

Opsets before 13 have a softmax of matrices. Converters to later ones write ``Flatten, Softmax, Reshape``; other exporters
write ``Reshape, Softmax, Reshape``. Where the last axis stays whole, this is a softmax over the last axis.
"""

from __future__ import annotations

import onnx

from stof.graph.dead_code import remove_dead_code
from stof.graph.index import GraphIndex, is_standard
from stof.graph.protobuf import copy_model
from stof.symbolic import Symbolic

_RESHAPES = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_LONGEST_CHAIN = 8


def unwrap_softmaxes(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a plain softmax in place of each one between reshapes that undo each other.

    A model without such a softmax is returned itself; else a copy is changed.
    """
    index = GraphIndex(model.graph)
    wrapped = [n for n in model.graph.node if n.op_type == "Softmax" and is_standard(n) and _stands_between(index, n)]
    if not wrapped:
        return model
    symbolic = Symbolic(model)
    # Output of the last reshape: input of the first one, name of the softmax.
    replacements: dict[str, tuple[str, str]] = {}
    for node in wrapped:
        ends = _wrapper(index, symbolic, node)
        if ends is not None:
            replacements[ends[1]] = ends[0], node.name
    if not replacements:
        return model
    result = copy_model(model)
    for node in result.graph.node:
        if node.output and node.output[0] in replacements:
            scores, name = replacements[node.output[0]]
            plain = onnx.helper.make_node("Softmax", [scores], [node.output[0]], name=name or node.name, axis=-1)
            node.CopyFrom(plain)
    remove_dead_code(result.graph, model.graph)
    return result


def _stands_between(index: GraphIndex, softmax: onnx.NodeProto) -> bool:
    before, after = index.producer(softmax.input[0]), index.consumers(softmax.output[0])
    return _is_reshape(before) and len(after) == 1 and _is_reshape(after[0])


def _is_reshape(node: onnx.NodeProto | None) -> bool:
    return node is not None and node.op_type in _RESHAPES and is_standard(node)


def _wrapper(index: GraphIndex, symbolic: Symbolic, softmax: onnx.NodeProto) -> tuple[str, str] | None:
    """The tensor in front of the reshapes and the one behind them; None where the axes are not the same."""
    inner = symbolic.shape(softmax.input[0])
    axis = next((a.i for a in softmax.attribute if a.name == "axis"), -1)
    if not inner or axis % len(inner) != len(inner) - 1:
        return None
    scores = softmax.input[0]
    for _ in range(_LONGEST_CHAIN):
        node = index.producer(scores)
        if node is None or not _is_reshape(node):
            break
        scores = node.input[0]
    weights = softmax.output[0]
    shape = symbolic.shape(scores)
    for _ in range(_LONGEST_CHAIN):
        after = index.consumers(weights)
        if weights in index.outputs or weights in index.captured or len(after) != 1 or not _is_reshape(after[0]):
            return None
        weights = after[0].output[0]
        if shape is not None and symbolic.shape(weights) == shape:
            return (scores, weights) if shape and shape[-1] == inner[-1] else None
    return None
