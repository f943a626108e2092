# SPDX-License-Identifier: Apache-2.0
"""A model whose attentions round as the kernels with 8-bit operands do, in standard operators. It measures the loss anywhere.

The function body of StofAttention gets the roundings of docs/design/attention-8bit.md around its two matmuls. It differs from
the kernels in three points. A weight's binade follows the row's largest score rather than the running maximum. Sums are fp32.
The mean is of all keys, padded ones too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper

from stof.arguments.precisions import EightBits, Precision
from stof.attention.checks.eight_bit_model import LEAST_SCALE, MOST_FP8
from stof.attention.function_body import OP
from stof.errors import VerifyError
from stof.graph.index import DOMAIN
from stof.graph.node_builder import Builder
from stof.graph.protobuf import copy_model
from stof.thresholds.layers import nodes_by_layer

EMULATED_DOMAIN = "stof.emulated"  # the library has no operators of it: the runtime takes the function bodies
_TILE, _EIGHTS, _PAIRS = 128, 16, 4  # keys of a tile; groups of eight keys in a tile; pairs of keys in a group
_CAST_LIKE = 15  # the first opset with the operator


def emulate_eight_bits(model: onnx.ModelProto, precisions: Mapping[str, Precision]) -> onnx.ModelProto:
    """A copy of an optimized model, for measurements alone.

    Args:
        model: with the functions of stof's operators.
        precisions: of attentions, by the names of StofAttention operators.

    Raises:
        VerifyError: where another operator may compute in 8 bits.
    """
    copy = copy_model(model)
    body = next((f for f in copy.functions if (f.domain, f.name) == (DOMAIN, OP)), None)
    used: dict[str, EightBits] = {}
    for name, nodes in nodes_by_layer(copy).items():
        precision = precisions.get(name)
        if isinstance(precision, EightBits):
            if nodes[0].op_type != OP:
                raise VerifyError(
                    f"the loss cannot be measured: the function body of {nodes[0].op_type} cannot round to 8 bits"
                )
            used[precision.name] = precision
            for node in nodes:
                node.domain, node.op_type = EMULATED_DOMAIN, precision.name
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
    scores = _round_scores(b, *nodes[first].input)
    before_scores = [*b.nodes, helper.make_node("Identity", [scores], nodes[first].output, name="e_scores")]
    b.nodes = []
    weights, values = nodes[last].input
    if precision.has_fp8:
        weights, values = _round_weights(b, weights), _round_values(b, values)
    elif b.opset >= _CAST_LIKE:
        weights = _round_weights_to_inputs(b, weights)
    before_values = [*b.nodes, helper.make_node("MatMul", [weights, values], nodes[last].output, name="e_output")]
    del made.node[:]
    made.node.extend([*nodes[:first], *before_scores, *nodes[first + 1 : last], *before_values, *nodes[last + 1 :]])
    return made


def _number(b: Builder, value: float) -> str:
    return b.constant(value, np.float32)


def _to_int8(b: Builder, tensor: str, largest: str) -> str:
    """The numbers that codes of int8 stand for, by the largest magnitude of those that share a scale."""
    scale = b.add("Max", [b.add("Mul", [largest, _number(b, 1 / 127)]), _number(b, LEAST_SCALE)])
    return b.add("Mul", [b.add("Round", [b.add("Div", [tensor, scale])]), scale])


def _round_scores(b: Builder, query: str, turned_key: str) -> str:
    """Scores of a query [B, H, S, D] and a key [B, H, D, T], both in fp32; those of the mean are exact."""
    rounded_query = _to_int8(b, query, b.reduce_max(b.add("Abs", [query]), 3))
    mean = b.reduce("ReduceMean", turned_key, 3)
    key = b.add("Sub", [turned_key, mean])
    largest = b.reduce_max(b.add("Abs", [key]), 2)  # [B, H, 1, T]
    tiles = _in_tiles(b, largest, [0, 0, -1, _EIGHTS, _PAIRS, 2])
    pairs = b.reduce_max(tiles, 5)
    first, others = (_slice(b, pairs, start, end, 3) for start, end in ((0, 1), (1, _EIGHTS)))
    is_first = b.constant(np.arange(_EIGHTS).reshape(-1, 1, 1) == 0, np.bool_)
    shared = b.add("Where", [is_first, first, b.reduce_max(others, 3)])
    flat = b.add("Reshape", [b.add("Concat", [shared, shared], axis=5), b.constant([0, 0, 1, -1])])
    rounded_key = _to_int8(b, key, _cut_to(b, flat, turned_key, 3))
    return b.add("Add", [b.add("MatMul", [rounded_query, rounded_key]), b.add("MatMul", [query, mean])])


def _round_weights_to_inputs(b: Builder, weights: str) -> str:
    """Weights in the type of the query, where the largest one of a row is 1."""
    top = b.add("Max", [b.reduce_max(weights, 3), _number(b, 1e-30)])
    narrow = b.add("CastLike", [b.add("Div", [weights, top]), "query"])
    return b.add("Mul", [b.add("Cast", [narrow], to=TensorProto.FLOAT), top])


def _round_weights(b: Builder, weights: str) -> str:
    """Weights in e4m3, where the largest one of a row is 2^7."""
    unit = b.add("Mul", [b.add("Max", [b.reduce_max(weights, 3), _number(b, 1e-30)]), _number(b, 2.0**-7)])
    return b.add("Mul", [_to_fp8(b, b.add("Div", [weights, unit])), unit])


def _round_values(b: Builder, values: str) -> str:
    """Values [B, H, T, Dv] in e4m3, with a scale for each tile of keys."""
    largest = b.reduce_max(b.add("Abs", [values]), 3)
    turned = b.add("Transpose", [largest], perm=[0, 1, 3, 2])  # [B, H, 1, T]
    tiles = b.reduce_max(_in_tiles(b, turned, [0, 0, -1, _TILE]), 3)
    every = b.add("Add", [tiles, b.constant(np.zeros(_TILE), np.float32)])
    flat = b.add("Reshape", [every, b.constant([0, 0, -1, 1])])
    scale = b.add("Mul", [_cut_to(b, flat, values, 2), _number(b, 1 / MOST_FP8)])
    scale = b.add("Max", [scale, _number(b, LEAST_SCALE)])
    return b.add("Mul", [_to_fp8(b, b.add("Div", [values, scale])), scale])


def _to_fp8(b: Builder, tensor: str) -> str:
    """The nearest numbers of e4m3. Casts to it need opset 19: here a product and two differences keep four bits."""
    most = _number(b, MOST_FP8)
    tensor = b.add("Max", [b.add("Min", [tensor, most]), b.add("Neg", [most])])
    spread = b.add("Mul", [tensor, _number(b, 2.0**20 + 1)])
    normal = b.add("Sub", [spread, b.add("Sub", [spread, tensor])])
    steps = _number(b, 512.0)
    small = b.add("Div", [b.add("Round", [b.add("Mul", [tensor, steps])]), steps])
    return b.add("Where", [b.add("Less", [b.add("Abs", [tensor]), _number(b, 2.0**-6)]), small, normal])


def _in_tiles(b: Builder, row: str, shape: list[int]) -> str:
    """[B, H, 1, T] with zeros behind it up to whole tiles, in another shape."""
    length = _length(b, row, 3)
    missing = b.add("Mod", [b.add("Neg", [length]), b.constant([_TILE])])
    padded = b.add("Pad", [row, b.add("Concat", [b.constant([0] * 7), missing], axis=0)])
    return b.add("Reshape", [padded, b.constant(shape)])


def _cut_to(b: Builder, tensor: str, other: str, axis: int) -> str:
    """The first elements along an axis, as many as another tensor has."""
    return b.add("Slice", [tensor, b.constant([0]), _length(b, other, axis), b.constant([axis])])


def _slice(b: Builder, tensor: str, start: int, end: int, axis: int) -> str:
    return b.add("Slice", [tensor, b.constant([start]), b.constant([end]), b.constant([axis])])


def _length(b: Builder, tensor: str, axis: int) -> str:
    """A size as a tensor [1]."""
    return b.add("Gather", [b.add("Shape", [tensor]), b.constant([axis])])
