# SPDX-License-Identifier: Apache-2.0
"""Shape rules of fused attention operators: of the standard, its preview and domain com.microsoft."""

from __future__ import annotations

from stof.symbolic.algebra.terms import Int, integer
from stof.symbolic.facts import Fact, Rule, RuleContext


def _attention(context: RuleContext) -> list[Fact] | None:
    q, k, v = (context.shape(i) for i in range(3))
    dtype = context.fact(0).dtype
    if q is None or k is None or v is None:
        return [Fact(dtype)]
    past = context.shape(4)
    rank = len(q)
    context.equate_shapes((q[0], k[0]), (k[0], v[0]))
    if len(k) == len(v) == rank:
        context.equate(k[rank - 2], v[rank - 2])
    _equate_caches(context, 4)
    if len(q) == 4:
        heads, groups, size, width, rows, keys = q[1], k[1], k[3], v[3], q[2], k[2]
        output: tuple[Int, ...] = (q[0], heads, rows, width)
    else:
        heads, groups = (integer(context.number(n, 0)) for n in ("q_num_heads", "kv_num_heads"))
        sizes = k[2].divide(groups), v[2].divide(groups)
        if sizes[0] is None or sizes[1] is None:
            return [Fact(dtype)]
        size, width = sizes[0], sizes[1]
        rows, keys = q[1], k[1]
        output = (q[0], rows, heads * width)
    if context.has(4):
        if past is None or len(past) != 4:
            return [Fact(dtype, output)]
        keys = keys + past[2]
    present = [Fact(dtype, (q[0], groups, keys, d)) for d in (size, width)]
    return [Fact(dtype, output), *present, Fact(dtype, (q[0], heads, rows, keys))]


def _equate_caches(context: RuleContext, first: int) -> None:
    """Equates all but the head sizes of past keys and past values, which are inputs ``first`` and ``first + 1``."""
    keys, values = context.shape(first), context.shape(first + 1)
    if keys is not None and values is not None:
        context.equate_shapes(keys[:-1], values[:-1])


def _multi_head(context: RuleContext) -> list[Fact] | None:
    q, k, v = (context.shape(i) for i in range(3))
    heads = context.number("num_heads", 0)
    dtype = context.fact(0).dtype
    if q is None or not heads:
        return [Fact(dtype)]
    if len(q) == 5:  # packed [B, S, H, 3, D]
        width: Int | None = q[2] * q[4]
        keys: Int | None = q[1]
    elif v is not None:
        width = v[2] if len(v) == 3 else v[1] * v[3]
        keys = v[1] if len(v) == 3 else v[2]
    elif k is not None and len(k) == 5:  # packed [B, T, H, 2, D]
        width, keys = k[2] * k[4], k[1]
    else:
        width, keys = None, None
    if width is None or keys is None:
        return [Fact(dtype)]
    output = Fact(dtype, (q[0], q[1], width))
    for other in (k, v):
        context.equate_shapes(q[:1], other[:1] if other is not None else ())
    if k is not None and v is not None and len(k) == len(v):
        context.equate_shapes(k[1:-1], v[1:-1])
    _equate_caches(context, 6)
    past = context.shape(6) if context.has(6) else None
    if context.has(6):
        if past is None or len(past) != 4 or context.has(8):
            return [output]
        keys = keys + past[2]
    size = q[4] if len(q) == 5 else q[2].divide(integer(heads))
    value_size = width.divide(integer(heads))
    if size is None or value_size is None:
        return [output]
    present = [Fact(dtype, (q[0], integer(heads), keys, d)) for d in (size, value_size)]
    return [output, *present]


def _grouped_query(context: RuleContext) -> list[Fact] | None:
    q, k = context.shape(0), context.shape(1)
    heads, groups = context.number("num_heads", 0), context.number("kv_num_heads", 0)
    dtype = context.fact(0).dtype
    if q is None or len(q) != 3 or not heads or not groups:
        return [Fact(dtype)]
    width = q[2] if k is not None else _share(q[2], heads, heads + 2 * groups)
    for other in (k, context.shape(2)):
        context.equate_shapes(q[:2], other[:2] if other is not None else ())
    _equate_caches(context, 3)
    return [Fact(dtype, None if width is None else (q[0], q[1], width))]


def _share(whole: Int, count: int, total: int) -> Int | None:
    one = whole.divide(integer(total))
    return None if one is None else one * integer(count)


def _contrib_attention(context: RuleContext) -> list[Fact] | None:
    x, weight = context.shape(0), context.shape(1)
    dtype = context.fact(0).dtype
    if x is None or len(x) != 3 or weight is None or len(weight) != 2:
        return [Fact(dtype)]
    sizes = context.attribute("qkv_hidden_sizes")
    width = integer(int(sizes[2])) if isinstance(sizes, list) and len(sizes) == 3 else weight[1].divide(integer(3))
    return [Fact(dtype, None if width is None else (x[0], x[1], width))]


def _quantized_attention(context: RuleContext) -> list[Fact] | None:
    """As Attention; the result has the type of the scales."""
    found = _contrib_attention(context)
    return found and [Fact(context.fact(3).dtype, found[0].shape)]


def paged_attention(context: RuleContext) -> list[Fact] | None:
    """Facts of the outputs of StofPagedAttention, and of the PagedAttention that it replaces."""
    query, caches = context.shape(0), [context.fact(i) for i in (3, 4)]
    heads, groups = context.number("num_heads", 0), context.number("kv_num_heads", 0)
    output = Fact(context.fact(0).dtype)
    if query is not None and len(query) == 2 and heads >= 1 and groups >= 1:
        size = query[1].divide(integer(heads if context.has(1) else heads + 2 * groups))
        if size is not None:
            output = Fact(output.dtype, (query[0], size * integer(heads)))
    return [output, *caches]


def _flex_attention(context: RuleContext) -> list[Fact] | None:
    q, k, v = (context.shape(i) for i in range(3))
    dtype = context.fact(0).dtype
    if q is None or k is None or v is None or not len(q) == len(k) == len(v) == 4:
        return [Fact(dtype)]
    context.equate_shapes((q[0], k[0], q[3]), (k[0], v[0], k[3]))
    context.equate_shapes(k[1:3], v[1:3])
    return [Fact(dtype, (*q[:3], v[3]))]


STANDARD: dict[str, Rule] = {"Attention": _attention}
PREVIEW: dict[str, Rule] = {"FlexAttention": _flex_attention}
CONTRIB: dict[str, Rule] = {
    "Attention": _contrib_attention,
    "QAttention": _quantized_attention,
    "GroupQueryAttention": _grouped_query,
    "MultiHeadAttention": _multi_head,
    "PagedAttention": paged_attention,
    "SparseAttention": _grouped_query,
}
