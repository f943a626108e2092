# SPDX-License-Identifier: Apache-2.0
"""Nodes of standard ONNX that round the operands of an attention as the kernels with 8-bit operands do."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from stof.attention.checks.eight_bit_model import LEAST_SCALE, MOST_FP8
from stof.graph.node_builder import Builder

_TILE, _EIGHTS, _PAIRS = 128, 16, 4  # keys of a tile; groups of eight keys in a tile; pairs of keys in a group


def _number(b: Builder, value: float) -> str:
    return b.constant(value, np.float32)


def _to_int8(b: Builder, tensor: str, largest: str) -> str:
    """The numbers that codes of int8 stand for, by the largest magnitude of those that share a scale."""
    scale = b.add("Max", [b.add("Mul", [largest, _number(b, 1 / 127)]), _number(b, LEAST_SCALE)])
    return b.add("Mul", [b.add("Round", [b.add("Div", [tensor, scale])]), scale])


def round_scores(b: Builder, query: str, turned_key: str) -> str:
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


def round_weights_to_inputs(b: Builder, weights: str, query: str) -> str:
    """Weights in the type of the query, where the largest one of a row is 1."""
    top = b.add("Max", [b.reduce_max(weights, 3), _number(b, 1e-30)])
    narrow = b.add("CastLike", [b.add("Div", [weights, top]), query])
    return b.add("Mul", [b.add("Cast", [narrow], to=TensorProto.FLOAT), top])


def round_weights(b: Builder, weights: str) -> str:
    """Weights in e4m3, where the largest one of a row is 2^7."""
    unit = b.add("Mul", [b.add("Max", [b.reduce_max(weights, 3), _number(b, 1e-30)]), _number(b, 2.0**-7)])
    return b.add("Mul", [_to_fp8(b, b.add("Div", [weights, unit])), unit])


def round_values(b: Builder, values: str) -> str:
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
