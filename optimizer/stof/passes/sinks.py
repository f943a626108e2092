# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: a learned logit per head beside the scores of each row, whose weight is dropped after the softmax.

As exporters write it (gpt-oss): ``Concat(scores, Expand(sink)) -> Softmax -> Slice(all but the last)``; usually with the
row's maximum subtracted before the softmax, which changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from stof.graph import GraphIndex
from stof.passes.scores import less_maximum
from stof.passes.views import is_float_cast
from stof.symbolic import Symbolic

_SAME = frozenset({"Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten"})
_DEEPEST = 16


@dataclass(frozen=True)
class Sink:
    """``logits`` has H elements in the order of heads, whatever its shape; ``scores`` is [B, H, S, T] without them."""

    scores: str
    logits: str
    nodes: tuple[str, ...]  # first outputs of the nodes from the softmax to the Concat


def find_sink(index: GraphIndex, symbolic: Symbolic, softmax: onnx.NodeProto) -> Sink | None:
    """The sink of a softmax over the last axis; None where it has none."""
    tensor, passed = softmax.input[0], list[str]()
    for _ in range(_DEEPEST):
        node = index.producer(tensor)
        if node is None or node.domain not in ("", "ai.onnx"):
            return None
        if node.op_type == "Concat":
            found = _of_concat(index, symbolic, node)
            return None if found is None else Sink(*found, (*passed, node.output[0]))
        if not (is_float_cast(symbolic, node) or node.op_type == "Identity" or less_maximum(index, symbolic, node)):
            return None
        passed.append(node.output[0])
        tensor = node.input[0]
    return None


def _of_concat(index: GraphIndex, symbolic: Symbolic, concat: onnx.NodeProto) -> tuple[str, str] | None:
    axis = next((a.i for a in concat.attribute if a.name == "axis"), None)
    if len(concat.input) != 2 or axis not in (-1, 3):
        return None
    scores, column = concat.input
    shape, own = symbolic.shape(scores), symbolic.shape(column)
    if shape is None or own is None or len(shape) != 4 or len(own) != 4 or own[3].constant != 1:
        return None
    heads = shape[1].constant
    logits = None if heads is None else _logits(index, symbolic, column, heads)
    return None if logits is None else (scores, logits)


def _logits(index: GraphIndex, symbolic: Symbolic, tensor: str, heads: int) -> str | None:
    """The tensor of ``heads`` elements that is spread to [B, H, S, 1]."""
    spread = True  # whether batches and queries may still be among the axes
    for _ in range(_DEEPEST):
        shape = symbolic.shape(tensor)
        node = index.producer(tensor)
        if shape is None:
            return None
        sizes = [d.constant for d in shape]
        if spread and (len(sizes) < 3 or sizes[-3] != heads or sizes[-1] != 1):
            return None  # heads are not the third axis from the last
        alone = sorted(n or 0 for n in sizes) == [1] * (len(sizes) - 1) + [heads]
        if spread and not alone:
            if node is None or node.op_type != "Expand":
                return None
            tensor = node.input[0]
            continue
        spread = False
        # With one axis that is not 1, no reshape changes the order.
        if not alone:
            return None
        if len(sizes) == 1 or node is None or not (node.op_type in _SAME or is_float_cast(symbolic, node)):
            return tensor
        before = symbolic.shape(node.input[0])
        if before is None or sorted(d.constant or 0 for d in before) != [1] * (len(before) - 1) + [heads]:
            return tensor
        tensor = node.input[0]
    return None
