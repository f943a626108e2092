# SPDX-License-Identifier: Apache-2.0
"""Recognizes a softmax: the operator, or exponentials divided by their sum over the keys.

A mask may make exponentials 0 before they are summed: that is a mask of the scores by -inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx
from onnx import helper

from stof.attention.move_paths import subtracts_row_max
from stof.graph.index import GraphIndex, is_standard
from stof.mask.site import MaskTerm, TermKind
from stof.symbolic import Symbolic, integer, var
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import to_real
from stof.symbolic.tensor import SymTensor


@dataclass(frozen=True)
class SoftmaxForm:
    """A softmax of the graph: its node, or a node made for a softmax that is written out."""

    node: onnx.NodeProto
    mask: MaskTerm | None = None  # of the exponentials; the last mask of the scores
    nodes: tuple[str, ...] = ()  # first outputs of the nodes between the scores and the weights


def match_softmax(index: GraphIndex, symbolic: Symbolic, node: onnx.NodeProto) -> SoftmaxForm | None:
    """The softmax whose weights a node writes; None where it is no softmax."""
    if not is_standard(node):
        return None
    if node.op_type == "Softmax":
        return SoftmaxForm(node)
    terms = _quotient(index, node)
    if terms is None:
        return None
    exponentials, total = terms
    summed = index.producer(total)
    shape, total_shape = symbolic.shape(exponentials), symbolic.shape(total)
    if summed is None or summed.op_type != "ReduceSum" or summed.input[0] != exponentials or not shape:
        return None
    if total_shape != (*shape[:-1], integer(1)):
        return None
    mask, exponential = _find_exponential(index, symbolic, exponentials)
    shifted = None if exponential is None else index.producer(exponential.input[0])
    # Without x - max(x) a fully masked row would be 0 / 0, not the mean that the operator gives.
    if exponential is None or shifted is None or not subtracts_row_max(index, symbolic, shifted):
        return None
    if mask is not None and len(shape) != 4:
        return None
    made = helper.make_node("Softmax", [exponential.input[0]], [node.output[0]], name=node.name, axis=-1)
    return SoftmaxForm(made, mask, (exponential.output[0], exponentials, total))


def _quotient(index: GraphIndex, node: onnx.NodeProto) -> tuple[str, str] | None:
    """(x, y) of x / y, or of x * (1 / y)."""
    if node.op_type == "Div":
        return str(node.input[0]), str(node.input[1])
    if node.op_type != "Mul":
        return None
    for i in (0, 1):
        inverse = index.producer(node.input[i])
        if inverse is not None and inverse.op_type == "Reciprocal" and is_standard(inverse):
            return str(node.input[1 - i]), str(inverse.input[0])
    return None


def _is_zero_or_one(value: SymTensor) -> bool:
    """Whether every element of a tensor is known to be 0 or 1."""
    probe = tuple(var(f"any{i}") for i in range(value.rank))
    return {x for _, x in split_cases(to_real(value.at(probe)))} <= {0.0, 1.0}


def _find_exponential(
    index: GraphIndex, symbolic: Symbolic, tensor: str
) -> tuple[MaskTerm | None, onnx.NodeProto | None]:
    """The mask that makes exponentials 0, and the Exp node; (None, None) where there is no Exp."""
    node = index.producer(tensor)
    if node is None or not is_standard(node):
        return None, None
    if node.op_type == "Exp":
        return None, node
    minus = float("-inf")
    if node.op_type == "Where":
        for kind, kept, filled in ((TermKind.KEEP, 1, 2), (TermKind.DROP, 2, 1)):
            exponential = index.producer(node.input[kept])
            if exponential is not None and exponential.op_type == "Exp" and symbolic.uniform(node.input[filled]) == 0.0:
                return MaskTerm(kind, node.input[0], minus), exponential
    if node.op_type == "Mul":
        for i in (0, 1):
            exponential, value = index.producer(node.input[i]), symbolic.value(node.input[1 - i])
            if (
                exponential is not None
                and exponential.op_type == "Exp"
                and value is not None
                and _is_zero_or_one(value)
            ):
                return MaskTerm(TermKind.KEEP, node.input[1 - i], minus), exponential
    return None, None
