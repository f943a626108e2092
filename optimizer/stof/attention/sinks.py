# SPDX-License-Identifier: Apache-2.0
"""Recognizes attention sinks: a logit for each head in the softmax of every row, whose weight is dropped afterwards.

gpt-oss is exported as ``Concat(scores, Expand(sink)) -> Softmax -> Slice(all but the last)``, usually with the row's maximum
subtracted before the softmax. ``softmax1`` pads the scores with a zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import onnx

from stof.attention.move_paths import is_float_cast, subtracts_row_max
from stof.graph.index import GraphIndex, is_standard
from stof.symbolic import Real, Symbolic, integer, var

_KEEPS_ORDER = frozenset({"Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten"})
_MAX_DEPTH = 16


@dataclass(frozen=True)
class Sink:
    """The sink of a softmax."""

    scores: str  # [B, H, S, T], without the sink's column
    logits: str  # a tensor of H elements in the order of heads; empty where no tensor holds them alone
    nodes: tuple[str, ...]  # first outputs of the nodes from the softmax to the Concat
    values: tuple[float, ...] = ()  # the logits, where ``logits`` is empty
    first: bool = False  # the column comes before the keys, not after them


def find_sink(index: GraphIndex, symbolic: Symbolic, softmax: onnx.NodeProto) -> Sink | None:
    """The sink of a softmax over the last axis; None where it has none."""
    tensor, passed = softmax.input[0], list[str]()
    for _ in range(_MAX_DEPTH):
        node = index.producer(tensor)
        if node is None or not is_standard(node):
            return None
        if node.op_type in ("Concat", "Pad"):
            sink = (
                _sink_from_concat(index, symbolic, node) if node.op_type == "Concat" else _sink_from_pad(symbolic, node)
            )
            return None if sink is None else replace(sink, nodes=(*passed, node.output[0]))
        if not (
            is_float_cast(symbolic, node) or node.op_type == "Identity" or subtracts_row_max(index, symbolic, node)
        ):
            return None
        passed.append(node.output[0])
        tensor = node.input[0]
    return None


def _sink_from_pad(symbolic: Symbolic, pad: onnx.NodeProto) -> Sink | None:
    """The sink of a Pad by one column of a number, before or after the keys."""
    shape = symbolic.shape(pad.input[0])
    value = symbolic.value(pad.input[1])
    pads = None if value is None else value.elements()
    number = symbolic.uniform(pad.input[2]) if len(pad.input) > 2 and pad.input[2] else 0.0
    mode = next((a.s for a in pad.attribute if a.name == "mode"), b"constant")
    if shape is None or len(shape) != 4 or number is None or mode != b"constant" or len(pad.input) > 3 or pads is None:
        return None
    heads = shape[1].constant
    for first, padded in ((True, 3), (False, 7)):
        if heads and pads == [integer(int(i == padded)) for i in range(8)] and math.isfinite(number):
            return Sink(pad.input[0], "", (), (number,) * heads, first)
    return None


def _sink_from_concat(index: GraphIndex, symbolic: Symbolic, concat: onnx.NodeProto) -> Sink | None:
    axis = next((a.i for a in concat.attribute if a.name == "axis"), None)
    if len(concat.input) != 2 or axis not in (-1, 3):
        return None
    for first in (False, True):
        scores, column = concat.input[::-1] if first else concat.input
        shape, column_shape = symbolic.shape(scores), symbolic.shape(column)
        if (
            shape is None
            or column_shape is None
            or len(shape) != 4
            or len(column_shape) != 4
            or column_shape[3].constant != 1
        ):
            continue
        heads = shape[1].constant
        if heads is None:
            continue
        logits = _logits_tensor(index, symbolic, column, heads)
        if logits is not None:
            return Sink(scores, logits, (), (), first)
        values = _constant_logits(symbolic, column, heads)
        if values is not None:
            return Sink(scores, "", (), values, first)
    return None


def _constant_logits(symbolic: Symbolic, column: str, heads: int) -> tuple[float, ...] | None:
    """The logits of a constant column [B, H, S, 1] that is the same for all batches and queries."""
    array = symbolic.constant(column)
    if array is not None and array.dtype.kind == "f":
        numbers = np.broadcast_to(array, (array.shape[0], heads, *array.shape[2:])).astype(np.float64)[..., 0]
        same = bool(np.all(numbers == numbers[:1, :, :1])) and bool(np.isfinite(numbers).all())
        return tuple(float(x) for x in numbers[0, :, 0]) if same else None
    value = symbolic.value(column)
    if value is None or value.kind != "f":
        return None
    logits = [value.at((var("b"), integer(h), var("q"), integer(0))) for h in range(heads)]
    numbers_ = [x.args[0] for x in logits if isinstance(x, Real) and x.kind == "const"]
    floats = [x for x in numbers_ if isinstance(x, float) and math.isfinite(x)]
    return tuple(floats) if len(floats) == heads else None


def _logits_tensor(index: GraphIndex, symbolic: Symbolic, tensor: str, heads: int) -> str | None:
    """The tensor of ``heads`` elements that is broadcast to the column [B, H, S, 1]."""
    is_broadcast = True  # batch and queries may still be among the axes
    for _ in range(_MAX_DEPTH):
        shape = symbolic.shape(tensor)
        node = index.producer(tensor)
        if shape is None:
            return None
        sizes = [d.constant for d in shape]
        if is_broadcast and (len(sizes) < 3 or sizes[-3] != heads or sizes[-1] != 1):
            return None  # the heads are not in axis -3
        alone = sorted(n or 0 for n in sizes) == [1] * (len(sizes) - 1) + [heads]
        if is_broadcast and not alone:
            if node is None or node.op_type != "Expand":
                return None
            tensor = node.input[0]
            continue
        is_broadcast = False
        # A reshape keeps the order of elements where only one axis is not 1.
        if not alone:
            return None
        if len(sizes) == 1 or node is None or not (node.op_type in _KEEPS_ORDER or is_float_cast(symbolic, node)):
            return tensor
        before = symbolic.shape(node.input[0])
        if before is None or sorted(d.constant or 0 for d in before) != [1] * (len(before) - 1) + [heads]:
            return tensor
        tensor = node.input[0]
    return None
