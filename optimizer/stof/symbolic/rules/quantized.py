# SPDX-License-Identifier: Apache-2.0
"""Shape rules of quantized operators and others that ONNX Runtime's tools write; masks are not made of them."""

from __future__ import annotations

from onnx import TensorProto

from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules.broadcasting import broadcast
from stof.symbolic.rules.shape_only import as_first, conv_shape
from stof.symbolic.tensor import Shape

_FLOAT, _UINT8, _INT32 = int(TensorProto.FLOAT), int(TensorProto.UINT8), int(TensorProto.INT32)


def _matmul_shape(context: RuleContext, a: Shape | None, b: Shape | None) -> Shape | None:
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    return (*broadcast([a[:-2], b[:-2]], context), a[-2], b[-1])


def _dynamic_quantize(context: RuleContext) -> list[Fact]:
    return [Fact(_UINT8, context.shape(0)), Fact(_FLOAT, ()), Fact(_UINT8, ())]


def _quantize(context: RuleContext) -> list[Fact]:
    dtype = context.fact(2).dtype or context.number("output_dtype", 0) or _UINT8
    return [Fact(dtype, context.shape(0))]


def _dequantize(context: RuleContext) -> list[Fact]:
    return [Fact(context.fact(1).dtype or _FLOAT, context.shape(0))]


def _matmul_integer(context: RuleContext) -> list[Fact]:
    return [Fact(_INT32, _matmul_shape(context, context.shape(0), context.shape(1)))]


def _matmul_float(context: RuleContext) -> list[Fact]:
    return [Fact(_FLOAT, _matmul_shape(context, context.shape(0), context.shape(1)))]


def _matmul_scaled(context: RuleContext) -> list[Fact]:
    return [Fact(context.fact(2).dtype or _FLOAT, _matmul_shape(context, context.shape(0), context.shape(1)))]


def _qlinear_matmul(context: RuleContext) -> list[Fact]:
    return [Fact(context.fact(7).dtype or _UINT8, _matmul_shape(context, context.shape(0), context.shape(3)))]


def _conv_integer(context: RuleContext) -> list[Fact] | None:
    shape = conv_shape(context)
    return None if shape is None else [Fact(_INT32, shape)]


def _qlinear_conv(context: RuleContext) -> list[Fact] | None:
    shape = conv_shape(context, 3)
    return None if shape is None else [Fact(context.fact(7).dtype or _UINT8, shape)]


def _qlinear_binary(context: RuleContext) -> list[Fact]:
    a, b = context.shape(0), context.shape(3)
    return [
        Fact(
            context.fact(7).dtype or context.fact(0).dtype,
            None if a is None or b is None else broadcast([a, b], context),
        )
    ]


def _qlinear_where(context: RuleContext) -> list[Fact]:
    shapes = [context.shape(i) for i in (0, 1, 4)]
    known = [s for s in shapes if s is not None]
    return [Fact(context.fact(1).dtype, broadcast(known, context) if len(known) == len(shapes) else None)]


def _qlinear_concat(context: RuleContext) -> list[Fact] | None:
    """QLinearConcat: scale and zero point of the result, then each part with its own."""
    shapes = [context.shape(i) for i in range(2, len(context.node.input), 3)]
    dtype = context.fact(1).dtype
    if not shapes or shapes[0] is None or any(s is None or len(s) != len(shapes[0]) for s in shapes):
        return [Fact(dtype)]
    axis = context.number("axis", 0) % len(shapes[0])
    known = [s for s in shapes if s is not None]
    joined = sum((s[axis] for s in known[1:]), known[0][axis])
    return [Fact(dtype, (*known[0][:axis], joined, *known[0][axis + 1 :]))]


def _embed(context: RuleContext) -> list[Fact] | None:
    """EmbedLayerNormalization: ids [B, S], tables [.., N]."""
    ids, table = context.shape(0), context.shape(2)
    if ids is None or table is None:
        return None
    whole = Fact(context.fact(2).dtype, (*ids, table[-1]))
    return [whole, Fact(_INT32, (ids[0],)), whole]


STANDARD: dict[str, Rule] = {
    "DynamicQuantizeLinear": _dynamic_quantize,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "MatMulInteger": _matmul_integer,
    "ConvInteger": _conv_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
    # ONNX Runtime's optimizer writes it in the standard domain.
    "SimplifiedLayerNormalization": as_first,
}
CONTRIB: dict[str, Rule] = {
    "BiasAdd": as_first,
    "DequantizeLinear": _dequantize,
    "DynamicQuantizeMatMul": _matmul_float,
    "EmbedLayerNormalization": _embed,
    "MatMulIntegerToFloat": _matmul_scaled,
    "QLinearAdd": _qlinear_binary,
    "QLinearConcat": _qlinear_concat,
    "QLinearLeakyRelu": as_first,
    "QLinearMul": _qlinear_binary,
    "QLinearSigmoid": as_first,
    "QLinearSoftmax": as_first,
    "QLinearWhere": _qlinear_where,
    "QuantizeLinear": _quantize,
}
