# SPDX-License-Identifier: Apache-2.0
"""Shape rules of domain com.microsoft.nchwc: ONNX Runtime saves convolutions over blocks of channels, made for one processor.

A tensor in blocks has the shape [B, C, H, W] of its numbers, with C rounded up to whole blocks, whose size is not in the graph.
"""

from __future__ import annotations

from stof.symbolic.algebra.terms import dim, integer
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules import shape_only


def _to_blocks(context: RuleContext) -> list[Fact] | None:
    shape = context.shape(0)
    if shape is None or len(shape) != 4:
        return None
    sizes = shape[1:3] if context.number("channels_last", 0) else shape[2:]
    channels = dim(f"{context.node.output[0]}#1")
    return [Fact(context.fact(0).dtype, (shape[0], channels, *sizes))]


def _from_blocks(context: RuleContext) -> list[Fact] | None:
    shape, channels = context.shape(0), integer(context.number("channels", 0))
    if shape is None or len(shape) != 4 or not channels.constant:
        return None
    last = context.number("channels_last", 0)
    return [Fact(context.fact(0).dtype, (shape[0], *shape[2:], channels) if last else (shape[0], channels, *shape[2:]))]


def _upsample(context: RuleContext) -> list[Fact] | None:
    shape, scales = context.shape(0), context.attribute("scales")
    if shape is None or not isinstance(scales, list) or len(scales) != len(shape):
        return None
    return [Fact(context.fact(0).dtype, tuple(d * integer(int(s)) for d, s in zip(shape, scales, strict=True)))]


RULES: dict[str, Rule] = {
    "ReorderInput": _to_blocks,
    "ReorderOutput": _from_blocks,
    "Upsample": _upsample,
    **{
        name: shape_only.RULES[name]
        for name in ("Conv", "MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")
    },
}
