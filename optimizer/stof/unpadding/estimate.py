# SPDX-License-Identifier: Apache-2.0
"""Estimates what a model gains where padding is left out: by the multiplications inside and outside of its regions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import onnx

from stof.symbolic import Symbolic
from stof.symbolic.algebra.sizes import evaluate_or_none, size_names
from stof.symbolic.tensor import Shape
from stof.unpadding.pad_masks import is_attention
from stof.unpadding.region import UnpaddedRegion
from stof.unpadding.report import PADDING

_BATCH, _LENGTH, _OTHER = 8, 256, 64  # sizes that are assumed for those without a number
_PRODUCTS = frozenset(
    {"MatMul", "Gemm", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulNBits", "FusedGemm"}
)


def estimate_gains(model: onnx.ModelProto, symbolic: Symbolic, regions: Sequence[UnpaddedRegion]) -> tuple[float, ...]:
    """The time with padding over that without at each share of ``PADDING``; empty where nothing is multiplied.

    Time counts as multiplications of matrices: attention, whose padded tiles are skipped today, counts like the others.
    """
    sizes = dict.fromkeys(_names(symbolic, model), _OTHER)
    for region in regions:
        sizes |= dict.fromkeys(size_names(region.shape[1]), _LENGTH) | dict.fromkeys(
            size_names(region.shape[0]), _BATCH
        )
    inside = outside = 0.0
    nodes_inside = {i for region in regions for i in region.nodes}
    for i, node in enumerate(model.graph.node):
        work = _multiplications(node, symbolic, sizes)
        if i in nodes_inside:
            inside += work
        else:
            outside += work
    if not inside:
        return ()
    return tuple((inside + outside) / (inside * (1 - share) + outside) for share in PADDING)


def _names(symbolic: Symbolic, model: onnx.ModelProto) -> set[str]:
    shapes = [symbolic.shape(name) for node in model.graph.node for name in node.output if name]
    return {name for shape in shapes if shape is not None for size in shape for name in size_names(size)}


def _multiplications(node: onnx.NodeProto, symbolic: Symbolic, sizes: Mapping[str, int]) -> float:
    if is_attention(node):
        query, key = (_count(symbolic.shape(node.input[i]), sizes) for i in (0, 1))
        return 2.0 * min(query, key) * _LENGTH
    if node.op_type not in _PRODUCTS:
        return 0.0
    left, result = symbolic.shape(node.input[0]), symbolic.shape(node.output[0])
    if not left:
        return 0.0
    return _count(result, sizes) * _count(left[-1:], sizes)


def _count(shape: Shape | None, sizes: Mapping[str, int]) -> float:
    if shape is None:
        return 0.0
    return float(math.prod(_numbers(shape, sizes)))


def _numbers(shape: Shape, sizes: Mapping[str, int]) -> Iterable[int]:
    for size in shape:
        number = evaluate_or_none(size, sizes)
        yield _OTHER if number is None else number
