# SPDX-License-Identifier: Apache-2.0
"""For each operator, whether a node computes each token by itself, and where the tokens lie in its results."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import onnx

from stof.graph.index import is_standard
from stof.symbolic.algebra.terms import Int, integer
from stof.symbolic.tensor import Shape
from stof.unpadding.product_rules import convolve, gemm, matmul, quantize, scaled, weight, weight_matrix
from stof.unpadding.rule_parts import Rule, along, is_same_before, rank_of
from stof.unpadding.token_axes import Context, RowWise, TokenAxes

_ONE = integer(1)
_POSITION = {"BHSD": 2, "BSHD": 1, "BSN": 1}


def find_row_wise(context: Context) -> RowWise | None:
    """What its rule says of a node; None: its results depend on other tokens, or nothing is known of it."""
    node = context.node
    if not any(context.axes_of(i) is not None for i in range(len(node.input))):
        return None
    domain = "" if is_standard(node) else node.domain
    if any(axes.stays_inside for i in range(len(node.input)) if (axes := context.axes_of(i)) is not None):
        rule = _RULES[domain, node.op_type] if not domain and node.op_type in _INSIDE else None
    else:
        rule = _RULES.get((domain, node.op_type))
    row_wise = None if rule is None else rule(context)
    # Readers of a result that a rule does not name would find it without padding.
    return None if row_wise is None or any(node.output[len(row_wise.outputs) :]) else row_wise


def _align(axes: TokenAxes, rank: int, result: Shape, shape: Shape | None) -> TokenAxes | None:
    """The axes of the tokens in an operand of a broadcast, by the axes in the result; None: it has none, or nothing is known."""
    if shape is None:
        return None
    before = rank - len(shape)

    def place(axis: int | None) -> int | None:
        if axis is None or axis < before or shape[axis - before] == _ONE:
            return None
        return axis - before

    found = TokenAxes(place(axes.batch), place(axes.position), axes.merged)
    if axes.merged and found.position is None:
        return None
    return found if found.axes else None


def _broadcast(context: Context, indices: Iterable[int] | None = None, outputs: int = 1) -> RowWise | None:
    """Elementwise over inputs that broadcast: those of ``indices``, else all."""
    result = context.output_shape()
    chosen = [i for i in (range(len(context.node.input)) if indices is None else indices) if context.has(i)]
    if result is None or any(context.shape(i) is None for i in chosen):
        return None
    axes = _result_axes(context, chosen, len(result))
    if axes is None:
        return None
    inputs: dict[int, TokenAxes] = {}
    for i in chosen:
        shape, own = context.shape(i), context.axes_of(i)
        assert shape is not None
        if own is not None:
            if own.shifted(len(result) - len(shape)) != axes:
                return None
            inputs[i] = own
        elif (found := _align(axes, len(result), result, shape)) is not None:
            if axes.stays_inside:
                return None
            inputs[i] = found
    return RowWise((axes,) * outputs, inputs)


def _broadcast_codes(context: Context) -> RowWise | None:
    """Elementwise over two tensors of codes, each with a scale and a zero point behind it."""
    return _broadcast(context, (0, 3))


def _result_axes(context: Context, chosen: Iterable[int], rank: int) -> TokenAxes | None:
    """The axes that the token tensors among the operands of a broadcast agree on."""
    found = set()
    for i in chosen:
        own, shape = context.axes_of(i), context.shape(i)
        if own is not None and shape is not None:
            found.add(own.shifted(rank - len(shape)))
    return found.pop() if len(found) == 1 else None


def _multiply(context: Context) -> RowWise | None:
    """A product: where one factor is 0 at padding, the other does not matter there."""
    row_wise = _broadcast(context)
    if row_wise is None:
        return None
    zero = [i for i, name in enumerate(context.node.input) if name in context.zero]
    ignored = frozenset(i for i in range(len(context.node.input)) if any(z != i for z in zero))
    return RowWise(row_wise.outputs, row_wise.inputs, None, ignored)


def _select(context: Context) -> RowWise | None:
    """Where: of its two values, the one that it never takes at padding does not matter there."""
    row_wise, condition = _broadcast(context), context.node.input[0]
    if row_wise is None:
        return None
    unread = {1} if condition in context.zero else {2} if condition in context.true else set()
    return RowWise(row_wise.outputs, row_wise.inputs, None, frozenset(unread))


def _same(context: Context) -> RowWise | None:
    """Results of the shape of the first input; each of their elements is from that input's."""
    own = context.axes_of(0)
    if own is None or any(context.axes_of(i) is not None for i in range(1, len(context.node.input))):
        return None
    return RowWise((own,) * len(context.node.output), {0: own})


def _cast_like(context: Context) -> RowWise | None:
    """The second input gives a type alone: none of its rows reaches the result."""
    row_wise = RowWise((None,), {}) if context.axes_of(0) is None else _broadcast(context, (0,))
    return None if row_wise is None else RowWise(row_wise.outputs, row_wise.inputs, None, frozenset({1}))


def _normalize(context: Context) -> RowWise | None:
    first, rank = context.number("axis", -1), rank_of(context)
    if rank is None or not all(is_same_before(context, i, rank - first % rank) for i in (1, 2)):
        return None
    return along(context, first)


def _softmax(context: Context) -> RowWise | None:
    axis, rank, own = context.number("axis", -1 if context.opset >= 13 else 1), rank_of(context), context.axes_of(0)
    if context.opset < 13:
        return along(context, axis)
    if rank is None or own is None or axis % rank in own.axes:
        return None
    return RowWise((own,), {0: own})


def _skip_norm(context: Context) -> RowWise | None:
    """SkipLayerNormalization and its kin: input and skip are added, and the sum may be a result."""
    row_wise = _broadcast(context, (0, 1))
    if row_wise is None or any(context.axes_of(i) is not None for i in range(2, len(context.node.input))):
        return None
    axes = row_wise.outputs[0]
    rank = rank_of(context)
    if axes is None or rank is None or rank - 1 in axes.axes or any(context.node.output[1:3]):
        return None
    return RowWise((axes, None, None, axes)[: len(context.node.output)], row_wise.inputs)


def _reduce(context: Context) -> RowWise | None:
    own, rank = context.axes_of(0), rank_of(context)
    axes = context.numbers("axes", 1)
    if own is None or rank is None or not axes:
        return None
    reduced = {a % rank for a in axes}
    if reduced & own.axes:
        return None
    if context.number("keepdims", 1):
        return RowWise((own,), {0: own})
    kept = [a for a in range(rank) if a not in reduced]
    return _moved(own, {a: i for i, a in enumerate(kept)})


def _moved(own: TokenAxes, places: dict[int, int]) -> RowWise | None:
    axes = own.moved(places)
    return None if axes is None else RowWise((axes,), {0: own})


def _gather(context: Context) -> RowWise | None:
    """Rows of a table by tokens, or parts of each token."""
    data, indices, rank = context.axes_of(0), context.axes_of(1), rank_of(context)
    if rank is None or (data is None) == (indices is None):
        return None
    axis = context.number("axis", 0) % rank
    if indices is not None:
        return RowWise((indices.shifted(axis),), {1: indices})
    index_rank = rank_of(context, 1)
    if data is None or index_rank is None or axis in data.axes:
        return None
    places = {a: a if a < axis else a + index_rank - 1 for a in range(rank) if a != axis}
    return _moved(data, places)


def _gather_parts(context: Context) -> RowWise | None:
    """GatherND of parts of each token, by constant indices of the leading axes."""
    own, rank, indices = context.axes_of(0), rank_of(context), context.shape(1)
    if own is None or rank is None or not indices or context.axes_of(1) is not None or context.number("batch_dims", 0):
        return None
    count = indices[-1].constant
    if count is None or any(a < count for a in own.axes):
        return None
    return _moved(own, {a: a - count + len(indices) - 1 for a in range(count, rank)})


def _tile(context: Context) -> RowWise | None:
    own, repeats = context.axes_of(0), context.ints(1)
    if own is None or repeats is None or any(repeats[a] != 1 for a in own.axes):
        return None
    return RowWise((own,), {0: own})


def _transpose(context: Context) -> RowWise | None:
    own, rank = context.axes_of(0), rank_of(context)
    if own is None or rank is None:
        return None
    found = context.attribute("perm")
    perm = list(found.ints) if found is not None else list(reversed(range(rank)))
    return _moved(own, {a: i for i, a in enumerate(perm)})


def _unsqueeze(context: Context) -> RowWise | None:
    own, result = context.axes_of(0), context.output_shape()
    axes = context.numbers("axes", 1)
    if own is None or result is None or axes is None:
        return None
    new = {a % len(result) for a in axes}
    kept = [a for a in range(len(result)) if a not in new]
    return _moved(own, dict(enumerate(kept)))


def _squeeze(context: Context) -> RowWise | None:
    own, rank = context.axes_of(0), rank_of(context)
    axes = context.numbers("axes", 1)
    if own is None or rank is None or not axes:
        return None
    gone = {a % rank for a in axes}
    return _moved(own, {a: i for i, a in enumerate(a for a in range(rank) if a not in gone)})


def _reshape(context: Context) -> RowWise | None:
    """A reshape that keeps batch and positions, merges them into one axis, or divides that axis again."""
    own, before, after = context.axes_of(0), context.shape(0), context.output_shape()
    if own is None or before is None or after is None:
        return None
    axes = _find_reshaped(own, before, after)
    if axes is None:
        return None
    shape: list[int] = []
    for a, size in enumerate(after):
        if a == axes.position:
            shape.append(-1)
        elif a == axes.batch:
            shape.append(axes.heads_per_sequence)
        elif size.constant is not None:
            shape.append(size.constant)
        else:
            return None
    return RowWise((axes,), {0: own}, (1, tuple(shape)))


def _product(sizes: Iterable[Int]) -> Int:
    return math.prod(sizes, start=_ONE)


def _find_reshaped(own: TokenAxes, before: Shape, after: Shape) -> TokenAxes | None:
    """The axes of the tokens in a reshaped tensor: those of the same size with as many elements before them."""

    def same(axis: int, sizes: Int) -> int | None:
        outer = _product(before[:axis])
        return next((a for a, n in enumerate(after) if n == sizes and _product(after[:a]) == outer), None)

    if own.merged:
        assert own.position is not None
        kept = same(own.position, before[own.position])
        if kept is not None:
            return replace(own, position=kept)
        outer = _product(before[: own.position])
        for a in range(len(after) - 1):
            if _product(after[:a]) == outer and after[a] * after[a + 1] == before[own.position]:
                return TokenAxes(a + 1, a) if own.is_position_major else TokenAxes(a, a + 1)
        return None
    if own.batch is None or own.position is None:
        return None
    batch, position = same(own.batch, before[own.batch]), same(own.position, before[own.position])
    if batch is not None and position is not None and batch != position:
        return replace(own, batch=batch, position=position)
    if position is not None and (found := _move_heads(own, before, after)) is not None:
        return replace(found, position=position) if found.batch != position else None
    if own.heads_per_sequence == 1 and abs(own.position - own.batch) == 1:
        first = min(own.position, own.batch)
        merged = same(first, before[own.batch] * before[own.position])
        return None if merged is None else TokenAxes(None, merged, True, is_position_major=first == own.position)
    return None


def _move_heads(own: TokenAxes, before: Shape, after: Shape) -> TokenAxes | None:
    """The axis of sequences where a reshape puts the heads behind it into it, or takes them out."""
    assert own.batch is not None
    outer = _product(before[: own.batch])
    for a, size in enumerate(after):
        if _product(after[:a]) != outer:
            continue
        if own.heads_per_sequence > 1 and a + 1 < len(after) and after[a + 1].constant == own.heads_per_sequence:
            return replace(own, batch=a, heads_per_sequence=1) if size * after[a + 1] == before[own.batch] else None
        quotient = size.divide(before[own.batch])
        if (
            own.heads_per_sequence == 1
            and quotient is not None
            and quotient.constant is not None
            and quotient.constant > 1
        ):
            return replace(own, batch=a, heads_per_sequence=quotient.constant)
    return None


def _flatten(context: Context) -> RowWise | None:
    own, rank = context.axes_of(0), rank_of(context)
    if own is None or rank is None or not own.is_whole or own.merged:
        return None
    axis = context.number("axis", 1)
    axis += rank if axis < 0 else 0
    return RowWise((TokenAxes(None, 0, True),), {0: own}) if (own.batch, own.position, axis) == (0, 1, 2) else None


def _expand(context: Context) -> RowWise | None:
    own, shape, after = context.axes_of(0), context.shape(0), context.output_shape()
    if own is None or shape is None or after is None:
        return None
    axes = own.shifted(len(after) - len(shape))
    target = [1 if a in axes.axes else n.constant for a, n in enumerate(after)]
    known = tuple(n for n in target if n is not None)
    return RowWise((axes,), {0: own}, (1, known)) if len(known) == len(target) else None


def _slice(context: Context) -> RowWise | None:
    own, rank = context.axes_of(0), rank_of(context)
    if own is None or rank is None:
        return None
    found = context.attribute("axes")
    axes = list(found.ints) if found is not None else context.ints(3)
    if axes is None:
        starts = context.numbers("starts", 1)
        axes = None if context.has(3) or starts is None else list(range(len(starts)))
    return None if axes is None or {a % rank for a in axes} & own.axes else RowWise((own,), {0: own})


def _split(context: Context) -> RowWise | None:
    own, rank = context.axes_of(0), rank_of(context)
    if own is None or rank is None or context.number("axis", 0) % rank in own.axes:
        return None
    return RowWise((own,) * len(context.node.output), {0: own})


def _concat(context: Context) -> RowWise | None:
    shapes = [context.shape(i) for i in range(len(context.node.input))]
    known = {a for i in range(len(shapes)) if (a := context.axes_of(i)) is not None}
    if any(s is None for s in shapes) or len(known) != 1:
        return None
    axes, rank = known.pop(), rank_of(context)
    if rank is None or context.number("axis", 0) % rank in axes.axes:
        return None
    return RowWise((axes,), dict.fromkeys(range(len(shapes)), axes))


def _rotary(context: Context) -> RowWise | None:
    """com.microsoft's RotaryEmbedding with a position for each token."""
    own, positions, rank = context.axes_of(0), context.axes_of(1), rank_of(context)
    shape = context.shape(1)
    if own is None or rank is None or shape is None or len(shape) != 2 or own.merged:
        return None
    if positions is None or not positions.is_whole or (own.batch, own.position) != (0, 1 if rank == 3 else 2):
        return None
    return RowWise((own,), {0: own, 1: positions})


def attention_layouts(node: onnx.NodeProto) -> list[str]:
    """The layouts of query, key, value and output of a StofAttention node."""
    words = next((a.s.decode() for a in node.attribute if a.name == "layout"), "BHSD").split()
    return words * 4 if len(words) == 1 else words


def layout_axes(layout: str) -> TokenAxes:
    """The axes of the tokens in a tensor of attention."""
    return TokenAxes(0, _POSITION[layout])


_ELEMENTWISE = (
    "Abs", "Acos", "Add", "And", "Atan", "BitShift", "Cast", "Ceil", "Celu", "Clip", "Cos", "Div", "Elu",
    "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish", "Identity",
    "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Min", "Mish", "Mod", "Neg", "Not", "Or",
    "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin", "Softplus", "Softsign", "Sqrt",
    "Sub", "Sum", "Tan", "Tanh", "ThresholdedRelu", "Xor",
)  # fmt: skip
# Those whose rules hold for tensors that stay inside of a region, too.
_INSIDE = frozenset(
    {*_ELEMENTWISE, "DynamicQuantizeLinear", "Gemm", "MatMul", "MatMulInteger", "Mul", "Reshape", "Squeeze", "Transpose",
     "Unsqueeze", "Where"}
)  # fmt: skip
_REDUCING = [f"Reduce{n}" for n in ("Max", "Mean", "Min", "Prod", "Sum", "SumSquare", "L1", "L2")]
_MICROSOFT = "com.microsoft"

_RULES: dict[tuple[str, str], Rule] = {
    **dict.fromkeys((("", op) for op in _ELEMENTWISE), _broadcast),
    **dict.fromkeys((("", op) for op in _REDUCING), _reduce),
    ("", "CastLike"): _cast_like,
    ("", "Mul"): _multiply,
    ("", "Where"): _select,
    ("", "Dropout"): _same,
    ("", "LayerNormalization"): _normalize,
    ("", "SimplifiedLayerNormalization"): _normalize,
    ("", "RMSNormalization"): _normalize,
    ("", "LpNormalization"): _softmax,
    ("", "Softmax"): _softmax,
    ("", "LogSoftmax"): _softmax,
    ("", "Gather"): _gather,
    ("", "GatherND"): _gather_parts,
    ("", "Tile"): _tile,
    ("", "Transpose"): _transpose,
    ("", "Unsqueeze"): _unsqueeze,
    ("", "Squeeze"): _squeeze,
    ("", "Reshape"): _reshape,
    ("", "Flatten"): _flatten,
    ("", "Expand"): _expand,
    ("", "Slice"): _slice,
    ("", "Split"): _split,
    ("", "Concat"): _concat,
    ("", "MatMul"): matmul,
    ("", "MatMulInteger"): matmul,
    ("", "Gemm"): gemm,
    ("", "Conv"): convolve,
    ("", "DynamicQuantizeLinear"): quantize,
    ("", "QuantizeLinear"): scaled,
    ("", "DequantizeLinear"): scaled,
    **dict.fromkeys(((_MICROSOFT, op) for op in ("QLinearAdd", "QLinearMul")), _broadcast_codes),
    ("", "QLinearMatMul"): weight_matrix(3, (1, 2, 6, 7)),
    **dict.fromkeys(((_MICROSOFT, op) for op in ("BiasGelu", "FastGelu", "Gelu", "QuickGelu")), _broadcast),
    (_MICROSOFT, "DynamicQuantizeMatMul"): weight_matrix(1),
    (_MICROSOFT, "MatMulIntegerToFloat"): weight_matrix(1, (2, 4)),
    (_MICROSOFT, "MatMulNBits"): weight,
    (_MICROSOFT, "MatMulBnb4"): weight,
    (_MICROSOFT, "FusedGemm"): gemm,
    (_MICROSOFT, "SkipLayerNormalization"): _skip_norm,
    (_MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_norm,
    (_MICROSOFT, "SimplifiedLayerNormalization"): _normalize,
    (_MICROSOFT, "RotaryEmbedding"): _rotary,
}
