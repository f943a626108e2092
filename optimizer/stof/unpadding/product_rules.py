# SPDX-License-Identifier: Apache-2.0
"""The rules of products of tokens with weights, and of quantization."""

from __future__ import annotations

from stof.symbolic.algebra.terms import integer
from stof.unpadding.rule_parts import Rule, along, is_same_before, rank_of
from stof.unpadding.token_axes import Context, RowWise

_ONE = integer(1)


def matmul(context: Context) -> RowWise | None:
    """Tokens times a weight, or a weight times tokens whose positions are the columns."""
    left, right, result = context.axes_of(0), context.axes_of(1), context.output_shape()
    shapes = context.shape(0), context.shape(1)
    if result is None or shapes[0] is None or shapes[1] is None or (left is None) == (right is None):
        return None
    if any(context.axes_of(i) is not None for i in range(2, len(context.node.input))):
        return None
    if not is_same_before(context, 2, 0):  # the zero point of MatMulInteger's first input: of each row
        return None
    tokens = 0 if left is not None else 1
    own, other, mine = left or right, shapes[1 - tokens], shapes[tokens]
    assert own is not None
    assert other is not None
    assert mine is not None
    if len(mine) < 2 or len(other) < 2:
        return None
    axes = own.shifted(len(result) - len(mine))
    inner = len(result) - 1 if tokens == 0 else len(result) - 2
    before = len(result) - len(other)
    outer = [a for a in axes.axes if a < len(result) - 2]
    if inner in axes.axes or any(a >= before and other[a - before] != _ONE for a in outer):
        return None
    return RowWise((axes,), {tokens: own})


def convolve(context: Context) -> RowWise | None:
    """A convolution with a kernel of one position."""
    own, kernel = context.axes_of(0), context.shape(1)
    if own is None or own.batch != 0 or own.position in (None, 1) or kernel is None:
        return None
    if any(n != _ONE for n in kernel[2:]) or any(context.axes_of(i) is not None for i in (1, 2)):
        return None
    for name in ("strides", "pads"):
        found = context.attribute(name)
        if found is not None and any(n != (1 if name == "strides" else 0) for n in found.ints):
            return None
    return RowWise((own,), {0: own})


def gemm(context: Context) -> RowWise | None:
    """Rows of tokens times a weight, with a bias that all of them share."""
    own = context.axes_of(0)
    if own is None or own.axes != {0} or context.number("transA", 0):
        return None
    if any(context.axes_of(i) is not None for i in (1, 2)):
        return None
    bias = context.shape(2)
    if context.has(2) and (bias is None or (len(bias) == 2 and bias[0] != _ONE)):
        return None
    return RowWise((own,), {0: own})


def weight(context: Context) -> RowWise | None:
    """Tokens times a weight in a form of its own: all inputs but the first are the same for all tokens."""
    rank = rank_of(context)
    return None if rank is None else along(context, rank - 1)


def weight_matrix(at: int, scales: tuple[int, ...] = ()) -> Rule:
    """Tokens times the matrix that input ``at`` is; ``scales`` are inputs that may hold a number for each row of tokens."""

    def rule(context: Context) -> RowWise | None:
        is_same = is_same_before(context, at, 2) and all(is_same_before(context, i, 0) for i in scales)
        return weight(context) if is_same else None

    return rule


def scaled(context: Context) -> RowWise | None:
    """Scale and zero point are numbers, or have one for each place along an axis without tokens."""
    own, rank, scale = context.axes_of(0), rank_of(context), context.shape(1)
    if own is None or rank is None or scale is None or any(context.axes_of(i) is not None for i in (1, 2)):
        return None
    is_same = all(n == _ONE for n in scale) or (len(scale) == 1 and context.number("axis", 1) % rank not in own.axes)
    return RowWise((own,), {0: own}) if is_same and not context.number("block_size", 0) else None


def quantize(context: Context) -> RowWise | None:
    """Scales are from all rows together: from those of real tokens alone where padding is left out."""
    own = context.axes_of(0)
    return None if own is None else RowWise((own, None, None), {0: own})
