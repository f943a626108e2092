# SPDX-License-Identifier: Apache-2.0
"""Recognizes a Where that makes weights zero again where the scores were masked, as in ESPnet and DeBERTa.

It changes fully masked rows only: in other rows masked weights are zero already.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx

from stof.attention.move_paths import CASTS
from stof.graph.index import GraphIndex, is_standard
from stof.mask.site import FORBIDDING_VALUE, MaskTerm, TermKind
from stof.symbolic import Symbolic

_MAX_DEPTH = 16


def zeroes_masked_weights(
    index: GraphIndex, symbolic: Symbolic, where: onnx.NodeProto, weights: str, terms: Sequence[MaskTerm]
) -> bool:
    """Whether a Where makes weights zero exactly where the only mask among the terms forbids.

    Additive terms without a symbolic value are computed from activations: they are biases, not masks.
    """
    masks = [t for t in terms if t.kind is not TermKind.ADD or symbolic.value(t.tensor) is not None]
    if where.op_type != "Where" or len(masks) != 1:
        return False
    if where.input[2] == weights and symbolic.uniform(where.input[1]) == 0.0:
        condition = _condition_root(index, symbolic, where.input[0], True)
    elif where.input[1] == weights and symbolic.uniform(where.input[2]) == 0.0:
        condition = _condition_root(index, symbolic, where.input[0], False)
    else:
        return False
    keeps_shape = symbolic.shape(where.output[0]) == symbolic.shape(weights)
    return keeps_shape and condition is not None and condition == _forbidding_condition(index, symbolic, masks[0])


def _forbidding_condition(index: GraphIndex, symbolic: Symbolic, term: MaskTerm) -> tuple[str, bool] | None:
    """The condition under which a mask forbids, as ``_condition_root`` gives it; None where it is no single condition."""
    if (term.view is not None and not term.view.splits_heads_alone) or term.zeroes:
        return None
    if term.kind is not TermKind.ADD:
        return _condition_root(index, symbolic, term.tensor, term.kind is TermKind.DROP)
    node = index.producer(term.tensor)
    if node is None or node.op_type != "Where" or term.scale != 1.0:
        return None
    numbers = [symbolic.uniform(node.input[i]) for i in (1, 2)]
    for i, holds in ((0, True), (1, False)):
        number, other = numbers[i], numbers[1 - i]
        if other == 0.0 and number is not None and number <= FORBIDDING_VALUE:
            return _condition_root(index, symbolic, node.input[0], holds)
    return None


def _condition_root(index: GraphIndex, symbolic: Symbolic, tensor: str, holds: bool) -> tuple[str, bool] | None:
    """The tensor of a condition without its casts and Nots, and whether the condition holds where that is not zero."""
    for _ in range(_MAX_DEPTH):
        node = index.producer(tensor)
        if node is None or not is_standard(node):
            break
        if node.op_type == "Not":
            holds = not holds
        elif node.op_type != "Identity" and not (
            node.op_type in CASTS and symbolic.dtype(node.output[0]) == onnx.TensorProto.BOOL
        ):
            break
        tensor = node.input[0]
    return tensor, holds
