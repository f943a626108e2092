# SPDX-License-Identifier: Apache-2.0
"""Shape rules of operators of domain com.microsoft that ONNX Runtime's optimizer and its model builders write."""

from __future__ import annotations

from onnx import TensorProto

from stof.symbolic.algebra.terms import integer
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules import shape_only
from stof.symbolic.rules.broadcasting import broadcast
from stof.symbolic.rules.shape_only import as_first


def _skip_norm(context: RuleContext) -> list[Fact] | None:
    fact, skipped = context.fact(0), context.shape(1)
    if fact.shape is not None and skipped is not None:
        broadcast([fact.shape, skipped], context)
    whole = Fact(fact.dtype, fact.shape)
    return [whole, Fact(), Fact(), whole]


def _fused_matmul(context: RuleContext) -> list[Fact] | None:
    a, b = context.shape(0), context.shape(1)
    if a is None or b is None or len(a) < 2 or len(b) < 2:
        return None
    if context.number("transBatchA", 0) or context.number("transBatchB", 0):
        return None
    rows = a[-1] if context.number("transA", 0) else a[-2]
    inner = a[-2] if context.number("transA", 0) else a[-1]
    columns, other = (b[-2], b[-1]) if context.number("transB", 0) else (b[-1], b[-2])
    context.equate(inner, other)
    return [Fact(context.fact(0).dtype, (*broadcast([a[:-2], b[:-2]], context), rows, columns))]


def _matmul_nbits(context: RuleContext) -> list[Fact] | None:
    fact = context.fact(0)
    return None if fact.shape is None else [Fact(fact.dtype, (*fact.shape[:-1], integer(context.number("N", 0))))]


def _embed_norm(context: RuleContext) -> list[Fact] | None:
    ids, words = context.shape(0), context.fact(2)
    if ids is None or words.shape is None:
        return None
    whole = Fact(words.dtype, (*ids, words.shape[-1]))
    return [whole, Fact(TensorProto.INT32, ids[:1]), whole]


RULES: dict[str, Rule] = {
    "AllReduce": as_first,
    "BiasDropout": as_first,
    "BiasGelu": as_first,
    "BiasSoftmax": as_first,
    "EmbedLayerNormalization": _embed_norm,
    "FastGelu": as_first,
    "FusedConv": shape_only.RULES["Conv"],
    "FusedGemm": shape_only.RULES["Gemm"],
    "FusedMatMul": _fused_matmul,
    "Gelu": as_first,
    "MatMulNBits": _matmul_nbits,
    "QuickGelu": as_first,
    "RotaryEmbedding": as_first,
    "SimplifiedLayerNormalization": as_first,
    "SkipLayerNormalization": _skip_norm,
    "SkipSimplifiedLayerNormalization": _skip_norm,
}
