# SPDX-License-Identifier: Apache-2.0
"""Nodes that find out which sequences of a batch have a key to attend to (``pad_masks.Guard``)."""

from __future__ import annotations

from functools import reduce

import numpy as np
from onnx import TensorProto

from stof.graph.node_builder import Builder
from stof.mask.expression import MaskExpression
from stof.mask.site import FORBIDDING_VALUE
from stof.mask.to_onnx import ScoreSizes
from stof.unpadding.pad_masks import KeyBias, KeyCondition
from stof.unpadding.region import UnpaddedRegion

_ALMOST = np.nextafter(np.float32(-FORBIDDING_VALUE), np.float32(0))  # what is greater is at least the number itself


def add_has_keys(builder: Builder, region: UnpaddedRegion, real: str, sizes: tuple[str, str]) -> str:
    """[B or 1, 1]: whether all guards of a region find keys in a sequence.

    Args:
        builder: gets the nodes.
        region: with guards.
        real: [B, S], which elements of its mask are not padding.
        sizes: B and S, scalars.
    """
    found: list[str] = []
    for guard in region.guards:
        if isinstance(guard, KeyCondition):
            found.append(_has_key_by_condition(builder, guard, sizes))
        else:
            found.append(_has_key_by_bias(builder, guard, real))
    return reduce(lambda one, other: builder.add("And", [one, other]), found)


def _has_key_by_condition(b: Builder, guard: KeyCondition, sizes: tuple[str, str]) -> str:
    """Whether any key fulfils a condition."""
    batch, length = sizes
    one = b.constant(1)
    scores = ScoreSizes(batch, one, one, length, b.constant(0))
    keys = MaskExpression.parse(guard.text).to_onnx(b, scores, {guard.role: guard.tensor})
    count = b.add("ReduceSum", [b.add("Cast", [keys], to=TensorProto.INT64), b.constant([1, 2, 3])], keepdims=0)
    return b.unsqueeze(b.add("Greater", [count, b.constant(0)]), [1])


def _has_key_by_bias(b: Builder, guard: KeyBias, real: str) -> str:
    """Whether a bias is large enough at every query, or at every one that is not padding. What is no number is not."""
    bias = b.add("Cast", [guard.tensor], to=TensorProto.FLOAT)
    above = b.add("Sub", [bias, b.constant(guard.number, np.float32)])
    is_large = b.add("Greater", [above, b.constant(_ALMOST, np.float32)])
    if guard.of_every_key:
        is_large = b.add("Or", [is_large, b.add("Not", [b.unsqueeze(real, [1, 2])])])
        is_none = _count(b, b.add("Not", [is_large]), 3)
        is_enough = b.add("Equal", [is_none, b.constant(0)])
    else:
        is_enough = b.add("Greater", [_count(b, is_large, 3), b.constant(0)])
    if guard.skips_padding:
        is_enough = b.add("Or", [is_enough, b.add("Not", [b.unsqueeze(real, [1, 3])])])
    lacking = b.add("Not", [is_enough])
    count = b.add("ReduceSum", [b.add("Cast", [lacking], to=TensorProto.INT64), b.constant([1, 2, 3])], keepdims=0)
    return b.unsqueeze(b.add("Equal", [count, b.constant(0)]), [1])


def _count(b: Builder, condition: str, axis: int) -> str:
    return b.add("ReduceSum", [b.add("Cast", [condition], to=TensorProto.INT64), b.constant([axis])], keepdims=1)
