# SPDX-License-Identifier: Apache-2.0
"""Shape rules of compute operators. Their values depend on weights or activations and are not known."""

from __future__ import annotations

import string

from onnx import TensorProto

from stof.graph.einsum import read_equation, split_equation
from stof.symbolic.algebra.divisions import floor_div
from stof.symbolic.algebra.terms import Int, integer
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules.broadcasting import broadcast
from stof.symbolic.tensor import Shape

ONE = integer(1)


def _numbers(context: RuleContext, name: str, default: list[int]) -> list[int]:
    value = context.attribute(name)
    return default if value is None else [int(n) for n in value]  # type: ignore[attr-defined]


def _window(context: RuleContext, sizes: Shape, kernel: list[int]) -> Shape | None:
    """The sizes after a window has moved over them (Conv, pooling)."""
    rank = len(sizes)
    strides, dilations = (_numbers(context, n, [1] * rank) for n in ("strides", "dilations"))
    automatic = context.attribute("auto_pad", "NOTSET")
    if automatic in ("SAME_UPPER", "SAME_LOWER"):
        return tuple(floor_div(d + integer(s - 1), s) for d, s in zip(sizes, strides, strict=True))
    pads = [0] * (2 * rank) if automatic == "VALID" else _numbers(context, "pads", [0] * (2 * rank))
    if context.number("ceil_mode", 0):
        return None
    result = []
    for i, d in enumerate(sizes):
        covered = dilations[i] * (kernel[i] - 1) + 1
        result.append(floor_div(d + integer(pads[i] + pads[i + rank] - covered), strides[i]) + ONE)
    return tuple(result)


def conv_shape(context: RuleContext, weight_place: int = 1) -> Shape | None:
    """The output of a convolution, whose weight is the input of that number."""
    data, weight = context.shape(0), context.shape(weight_place)
    if data is None or weight is None or len(data) < 3:
        return None
    kernel = [d.constant for d in weight[2:]]
    if any(k is None for k in kernel):
        return None
    context.equate(data[1], weight[1] * integer(context.number("group", 1)))
    sizes = _window(context, data[2:], [k for k in kernel if k is not None])
    return None if sizes is None else (data[0], weight[0], *sizes)


def _conv(context: RuleContext) -> list[Fact] | None:
    shape = conv_shape(context)
    return None if shape is None else [Fact(context.fact(0).dtype, shape)]


def _stft(context: RuleContext) -> list[Fact] | None:
    """[B, samples(, 1)] to [B, frames, bins, 2]."""
    signal, step, window = context.shape(0), context.fixed_ints(1), context.shape(2)
    frame_length = context.fixed_ints(3)
    length = frame_length[0] if frame_length else window[0].constant if window else None
    if signal is None or len(signal) < 2 or not step or step[0] < 1 or length is None or length < 1:
        return None
    frames = floor_div(signal[1] + integer(-length), step[0]) + ONE
    bins = length // 2 + 1 if context.number("onesided", 1) else length
    return [Fact(context.fact(0).dtype, (signal[0], frames, integer(bins), integer(2)))]


def _pool(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    kernel = _numbers(context, "kernel_shape", [])
    if data is None or len(data) != len(kernel) + 2:
        return None
    sizes = _window(context, data[2:], kernel)
    if sizes is None:
        return None
    shape = (*data[:2], *sizes)
    return [Fact(context.fact(0).dtype, shape), Fact(TensorProto.INT64, shape)]


def _global_pool(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    return None if data is None else [Fact(context.fact(0).dtype, (*data[:2], *([ONE] * (len(data) - 2))))]


def _conv_transpose(context: RuleContext) -> list[Fact] | None:
    data, weight = context.shape(0), context.shape(1)
    if data is None or weight is None or context.attribute("auto_pad", "NOTSET") != "NOTSET":
        return None
    rank = len(data) - 2
    strides, dilations = (_numbers(context, n, [1] * rank) for n in ("strides", "dilations"))
    pads, extra = _numbers(context, "pads", [0] * (2 * rank)), _numbers(context, "output_padding", [0] * rank)
    if context.attribute("output_shape") is not None:
        return None
    sizes = []
    for i, (d, k) in enumerate(zip(data[2:], weight[2:], strict=True)):
        if k.constant is None:
            return None
        rest = extra[i] + dilations[i] * (k.constant - 1) + 1 - pads[i] - pads[i + rank]
        sizes.append((d - ONE) * integer(strides[i]) + integer(rest))
    channels = weight[1] * integer(context.number("group", 1))
    return [Fact(context.fact(0).dtype, (data[0], channels, *sizes))]


def _einsum(context: RuleContext) -> list[Fact] | None:
    equation = read_equation(context.node)
    ranks = [len(context.shape(i) or ()) for i in range(len(context.node.input))]
    named = [t.replace("...", "") for t in split_equation(equation)[0]]
    dots = max((r - len(t) for r, t in zip(ranks, named, strict=False)), default=0)
    spare = [c for c in string.ascii_letters if c not in equation]
    terms, output = split_equation(equation.replace("...", "".join(spare[: max(0, dots)])))
    sizes: dict[str, Int] = {}
    for i, term in enumerate(terms):
        shape = context.shape(i)
        if shape is None or len(shape) != len(term):
            return None
        for letter, d in zip(term, shape, strict=True):
            if ONE not in (d, sizes.get(letter, ONE)):
                context.equate(sizes[letter], d, is_forced=False)
            if letter not in sizes or sizes[letter] == ONE:
                sizes[letter] = d
    if output is None:
        output = "".join(sorted(c for c in sizes if "".join(terms).count(c) == 1))
    return [Fact(context.fact(0).dtype, tuple(sizes[c] for c in output))]


def _resize(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    if data is None or context.attribute("axes") is not None or context.attribute("keep_aspect_ratio_policy"):
        return None
    if context.has(3):
        sizes = context.ints(3)
        return None if sizes is None else [Fact(context.fact(0).dtype, tuple(sizes))]
    scales = context.value(2)
    if scales is None or scales.constant is None:
        return None
    result = []
    for d, scale in zip(data, scales.constant.tolist(), strict=True):
        if scale == 1.0:
            result.append(d)
        elif d.constant is not None:
            result.append(integer(int(d.constant * scale)))
        elif float(scale).is_integer():
            result.append(d * integer(int(scale)))
        else:
            return None
    return [Fact(context.fact(0).dtype, tuple(result))]


def _top_k(context: RuleContext) -> list[Fact] | None:
    data, count = context.shape(0), context.ints(1)
    if data is None or not count:
        return None
    axis = context.number("axis", -1) % len(data)
    shape = (*data[:axis], count[0], *data[axis + 1 :])
    return [Fact(context.fact(0).dtype, shape), Fact(TensorProto.INT64, shape)]


def _arg(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    if data is None:
        return None
    axis = context.number("axis", 0) % len(data)
    kept = (ONE,) if context.number("keepdims", 1) else ()
    return [Fact(TensorProto.INT64, (*data[:axis], *kept, *data[axis + 1 :]))]


def _one_hot(context: RuleContext) -> list[Fact] | None:
    indices, depth = context.shape(0), context.ints(1)
    if indices is None or not depth:
        return None
    axis = context.number("axis", -1) % (len(indices) + 1)
    return [Fact(context.fact(2).dtype, (*indices[:axis], depth[0], *indices[axis:]))]


def as_first(context: RuleContext) -> list[Fact] | None:
    """The rule of operators whose result has the type and shape of their first input."""
    return [Fact(context.fact(0).dtype, context.shape(0))]


def _norm(context: RuleContext) -> list[Fact]:
    return [Fact(context.fact(0).dtype, context.shape(0)), Fact(), Fact()]


def _matmul(context: RuleContext) -> list[Fact] | None:
    a, b = context.shape(0), context.shape(1)
    dtype = context.fact(0).dtype
    if a is None or b is None or len(a) < 1 or len(b) < 1:
        return None
    context.equate(a[-1], b[-2] if len(b) > 1 else b[0])
    if len(a) == 1 or len(b) == 1:
        return [Fact(dtype, (*a[:-1],) if len(b) == 1 else (*b[:-2], b[-1]))]
    return [Fact(dtype, (*broadcast([a[:-2], b[:-2]], context), a[-2], b[-1]))]


def _gemm(context: RuleContext) -> list[Fact] | None:
    a, b = context.shape(0), context.shape(1)
    if a is None or b is None:
        return None
    rows, inner = a[::-1] if context.number("transA", 0) else a
    other, columns = b[::-1] if context.number("transB", 0) else b
    context.equate(inner, other)
    added = context.shape(2)
    if added is not None:
        broadcast([(rows, columns), added], context)
    return [Fact(context.fact(0).dtype, (rows, columns))]


def _reduce(context: RuleContext) -> list[Fact] | None:
    shape = context.shape(0)
    if shape is None:
        return None
    axes: object = context.attribute("axes")
    if axes is None and context.has(1):
        axes = context.fixed_ints(1)
        if axes is None:
            return None
    keep = context.number("keepdims", 1)
    wanted = [] if axes is None else [int(a) for a in axes]  # type: ignore[attr-defined]
    if not wanted and context.number("noop_with_empty_axes", 0):
        return as_first(context)
    chosen = [a % len(shape) for a in wanted] or list(range(len(shape)))
    result = [integer(1) if a in chosen else d for a, d in enumerate(shape) if keep or a not in chosen]
    return [Fact(context.fact(0).dtype, tuple(result))]


def _broadcast(context: RuleContext) -> list[Fact] | None:
    shapes = [context.shape(i) for i in range(len(context.node.input))]
    known_shapes = [s for s in shapes if s is not None]
    return [Fact(context.fact(0).dtype, broadcast(known_shapes, context) if len(known_shapes) == len(shapes) else None)]


_ACTIVATIONS = (
    "Relu",
    "LeakyRelu",
    "Gelu",
    "Softplus",
    "HardSwish",
    "HardSigmoid",
    "Mish",
    "Elu",
    "Selu",
    "PRelu",
    "Swish",
    "QuickGelu",
    "Softsign",
    "Celu",
    "ThresholdedRelu",
)
_REDUCTIONS = ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "SumSquare", "LogSum", "LogSumExp")
RULES: dict[str, Rule] = {
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Softmax": as_first,
    "LogSoftmax": as_first,
    "LayerNormalization": _norm,
    "RMSNormalization": _norm,
    "BatchNormalization": _norm,
    "Mean": _broadcast,
    "Sum": _broadcast,
    "Conv": _conv,
    "STFT": _stft,
    "ConvTranspose": _conv_transpose,
    "AveragePool": _pool,
    "MaxPool": _pool,
    "LpPool": _pool,
    "GlobalAveragePool": _global_pool,
    "GlobalMaxPool": _global_pool,
    "Einsum": _einsum,
    "Resize": _resize,
    "TopK": _top_k,
    "ArgMax": _arg,
    "ArgMin": _arg,
    "OneHot": _one_hot,
    "InstanceNormalization": as_first,
    "GroupNormalization": as_first,
    "LpNormalization": as_first,
    "MeanVarianceNormalization": as_first,
    "ReverseSequence": as_first,
    "Hardmax": as_first,
    "CumSum": as_first,
    "CumProd": as_first,
    "RotaryEmbedding": as_first,
}
RULES |= dict.fromkeys(_ACTIVATIONS, as_first)
RULES |= {f"Reduce{name}": _reduce for name in _REDUCTIONS}
