# SPDX-License-Identifier: Apache-2.0
"""Shape rules of StofChain and StofGemm, from their descriptions."""

from __future__ import annotations

import math
from types import MappingProxyType

from stof.errors import StofError
from stof.fusion.description.chain_description import ChainDescription
from stof.fusion.description.nodes import AxisSize
from stof.fusion.element_ops import TYPES
from stof.fusion.emit import GEMM
from stof.fusion.function_body import OP as CHAIN
from stof.symbolic import Int, integer
from stof.symbolic.facts import Fact, Rule, RuleContext

_TYPES = {name: int(dtype) for dtype, name in TYPES.items()}


def _chain(context: RuleContext) -> list[Fact] | None:
    try:
        description = ChainDescription.parse(str(context.attribute("chain", "")))
    except StofError:
        return None
    axes: dict[str, Int] = {}
    for name, size in description.axes:
        length = _size(context, size)
        if length is None:
            return [Fact(_TYPES[out.dtype]) for out in description.outs]
        axes[name] = length
    one = integer(1)
    return [
        Fact(_TYPES[out.dtype], tuple(math.prod((axes[name] for name in dim), start=one) for dim in out.dims))
        for out in description.outs
    ]


def _size(context: RuleContext, size: AxisSize) -> Int | None:
    """The size of an axis: a number, or a dimension of an input divided without rest."""
    if size.input < 0:
        return integer(size.number)
    shape = context.shape(size.input)
    return None if shape is None or size.dim >= len(shape) else shape[size.dim].divide(integer(size.number))


def _gemm(context: RuleContext) -> list[Fact] | None:
    a, b = context.shape(0), context.shape(1)
    if a is None or b is None or len(b) != 2:
        return [Fact(context.fact(0).dtype)]
    columns = b[1].divide(integer(2 if context.number("pair", 0) == 1 else 1))
    return [Fact(context.fact(0).dtype, None if columns is None else (*a[:-1], columns))]


SHAPE_RULES: MappingProxyType[str, Rule] = MappingProxyType({CHAIN: _chain, GEMM: _gemm})
