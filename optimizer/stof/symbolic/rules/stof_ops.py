# SPDX-License-Identifier: Apache-2.0
"""Shape rules of domain stof, for steps that run after attention was replaced."""

from __future__ import annotations

from stof.symbolic.algebra.terms import integer
from stof.symbolic.facts import Fact, Rule, RuleContext


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


RULES: dict[str, Rule] = {"StofAttention": _attention}
