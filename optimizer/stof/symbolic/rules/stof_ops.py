# SPDX-License-Identifier: Apache-2.0
"""Shape rules of domain stof, for steps that run after attention was replaced."""

from __future__ import annotations

from dataclasses import replace

from onnx import TensorProto

from stof.symbolic.algebra.terms import Int, integer
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules.fused_attention import paged_attention
from stof.symbolic.tensor import Shape

_DOWN_SCALES = 15  # of StofSparseMLP's inputs


def _attention(context: RuleContext) -> list[Fact] | None:
    query, value = context.shape(0), context.shape(2)
    dtype = context.fact(0).dtype
    layouts = str(context.attribute("layout", "BHSD")).split()
    layouts = layouts * 4 if len(layouts) == 1 else layouts
    heads, groups = (integer(context.number(n, 0)) for n in ("num_heads", "kv_num_heads"))
    if query is None or value is None or len(layouts) != 4:
        return [Fact(dtype)]
    packed = context.attribute("packed")
    heads_in_value = integer(int(packed[5])) if isinstance(packed, list) and len(packed) == 6 else groups
    width = value[2].divide(heads_in_value) if layouts[2] == "BSN" else value[3]
    rows = query[2] if layouts[0] == "BHSD" else query[1]
    if width is None:
        return [Fact(dtype)]
    shape = {
        "BHSD": (query[0], heads, rows, width),
        "BSHD": (query[0], rows, heads, width),
        "BSN": (query[0], rows, heads * width),
    }[layouts[3]]
    return [Fact(dtype, shape)]


def _quantized_attention(context: RuleContext) -> list[Fact] | None:
    found = _attention(context)
    return found and [replace(found[0], dtype=int(TensorProto.FLOAT))]


def _cached_attention(context: RuleContext) -> list[Fact] | None:
    query, past = context.shape(0), context.shape(3)
    dtype = context.fact(0).dtype
    stored = context.fact(3).dtype if context.has(3) else dtype  # caches may be quantized
    heads, groups = context.number("num_heads", 0), context.number("kv_num_heads", 0)
    if query is None or len(query) != 3 or heads < 1 or groups < 1:
        return [Fact(dtype), Fact(stored), Fact(stored)]
    size = query[2].divide(integer(heads if context.has(1) else heads + 2 * groups))
    if size is None:
        return [Fact(dtype), Fact(stored), Fact(stored)]
    output = Fact(dtype, (query[0], query[1], size * integer(heads)))
    rows = _present_rows(context, past)
    present = Fact(stored, None if rows is None else (query[0], integer(groups), rows, size))
    return [output, present, present]


def _present_rows(context: RuleContext, past: Shape | None) -> Int | None:
    """The rows of a cache after a step: those of the past or, where it may grow, the larger of these and the total."""
    if past is not None and len(past) == 4 and context.number("sliding_window_cache", 0):
        return past[2]
    total = context.ints(6)
    if total is None or len(total) != 1 or total[0].constant is None:
        return None
    if not context.has(3):
        return total[0]
    rows = past[2].constant if past is not None and len(past) == 4 else None
    return None if rows is None else integer(max(rows, total[0].constant))


def _sparse_mlp(context: RuleContext) -> list[Fact] | None:
    tokens, weight = context.shape(1 if context.has(1) else 0), context.shape(4)
    dtype = context.fact(1 if context.has(1) else 0).dtype
    if context.number("bits", 0):
        weight = context.shape(_DOWN_SCALES)  # rows of a quantized weight hold bytes
    if not tokens or weight is None or len(weight) != 2:
        return [Fact(dtype)]
    return [Fact(dtype, (*tokens[:-1], weight[1]))]


RULES: dict[str, Rule] = {
    "StofAttention": _attention,
    "StofQuantizedAttention": _quantized_attention,
    "StofCachedAttention": _cached_attention,
    "StofPagedAttention": paged_attention,
    "StofSparseMLP": _sparse_mlp,
}
