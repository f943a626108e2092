# SPDX-License-Identifier: Apache-2.0
"""A model whose attentions round as the kernels with 8-bit operands do, in standard operators. It measures the loss anywhere.

The function body of StofAttention gets the roundings of docs/design/attention-8bit.md around its two matmuls. Steps over KV
caches get them in nodes beside the operator (eight_bit_cache_emulation.py). Both differ from the kernels in three points. A
weight's binade follows the row's largest score rather than the running maximum. Sums are fp32. The mean is of all keys, padded
ones too.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx
from onnx import helper

from stof.arguments.precisions import EightBits, Precision
from stof.attention.function_body import OP
from stof.attention_precision.eight_bit_cache_emulation import put_roundings_over_caches
from stof.attention_precision.eight_bit_roundings import (
    round_scores,
    round_values,
    round_weights,
    round_weights_to_inputs,
)
from stof.graph.index import DOMAIN
from stof.graph.node_builder import CAST_LIKE_OPSET, Builder
from stof.graph.protobuf import copy_model
from stof.thresholds.layers import nodes_by_layer

EMULATED_DOMAIN = "stof.emulated"  # the library has no operators of it: the runtime takes the function bodies


def emulate_eight_bits(model: onnx.ModelProto, precisions: Mapping[str, Precision]) -> onnx.ModelProto:
    """A copy of an optimized model, for measurements alone.

    Args:
        model: with the functions of stof's operators.
        precisions: of attentions, by the names of operators.

    Raises:
        VerifyError: where a step over a cache cannot be computed so.
    """
    copy = copy_model(model)
    body = next((f for f in copy.functions if (f.domain, f.name) == (DOMAIN, OP)), None)
    used: dict[str, EightBits] = {}
    over_caches: list[tuple[onnx.NodeProto, EightBits]] = []
    for name, nodes in nodes_by_layer(copy).items():
        precision = precisions.get(name)
        if isinstance(precision, EightBits):
            if nodes[0].op_type != OP:
                over_caches += [(node, precision) for node in nodes]
                continue
            used[precision.name] = precision
            for node in nodes:
                node.domain, node.op_type = EMULATED_DOMAIN, precision.name
    if over_caches:
        put_roundings_over_caches(copy, over_caches)
    if not used:
        return copy
    if body is None:
        raise ValueError(f"the model has no function {DOMAIN}.{OP}")
    copy.functions.extend(_emulating_body(body, precision) for precision in used.values())
    copy.opset_import.append(helper.make_opsetid(EMULATED_DOMAIN, 1))
    return copy


def _emulating_body(body: onnx.FunctionProto, precision: EightBits) -> onnx.FunctionProto:
    """The function of StofAttention with roundings around its matmuls: the first of queries and keys, the last with values."""
    made = onnx.FunctionProto()
    made.CopyFrom(body)
    made.domain, made.name = EMULATED_DOMAIN, precision.name
    nodes = list(made.node)
    matmuls = [i for i, node in enumerate(nodes) if node.op_type == "MatMul"]
    first, last = matmuls[0], matmuls[-1]
    b = Builder(next(e.version for e in body.opset_import if not e.domain), "e_")
    scores = round_scores(b, *nodes[first].input)
    before_scores = [*b.nodes, helper.make_node("Identity", [scores], nodes[first].output, name="e_scores")]
    b.nodes = []
    weights, values = nodes[last].input
    if precision.has_fp8:
        weights, values = round_weights(b, weights), round_values(b, values)
    elif b.opset >= CAST_LIKE_OPSET:
        weights = round_weights_to_inputs(b, weights, "query")
    before_values = [*b.nodes, helper.make_node("MatMul", [weights, values], nodes[last].output, name="e_output")]
    del made.node[:]
    made.node.extend([*nodes[:first], *before_scores, *nodes[first + 1 : last], *before_values, *nodes[last + 1 :]])
    return made
