# SPDX-License-Identifier: Apache-2.0
"""Broadcasting: the common shape, an operand's index in it, and the rule of elementwise operators."""

from __future__ import annotations

from collections.abc import Callable

from stof.symbolic.algebra.terms import Scalar, integer
from stof.symbolic.facts import Fact, Rule, RuleContext, dtype_kind
from stof.symbolic.tensor import Index, Shape, SymTensor


def broadcast(shapes: list[Shape], context: RuleContext | None = None) -> Shape:
    """The broadcast shape. Different symbolic sizes count as equal, but for exact facts: one of them may be 1.

    Args:
        shapes: of the operands.
        context: of the node, in which sizes that count as equal are recorded; None: facts are not exact.
    """
    rank = max(len(s) for s in shapes)
    one = integer(1)
    result = []
    for axis in range(rank):
        size = one
        for s in shapes:
            own_axis = axis - rank + len(s)
            d = s[own_axis] if own_axis >= 0 else one
            if one not in (d, size) and context is not None:
                context.equate(size, d, is_forced=False)
            if context is not None and context.is_exact and size.constant is None and d.constant is None and size != d:
                size = context.unknown_size(axis)
            elif d != one and (size == one or (size.constant is None and d.constant is not None)):
                size = d
        result.append(size)
    return tuple(result)


def project(index: Index, shape: Shape) -> Index:
    """The index of a broadcast operand of ``shape``."""
    trailing = index[len(index) - len(shape) :]
    return tuple(integer(0) if d == integer(1) else i for i, d in zip(trailing, shape, strict=True))


def elementwise(
    context: RuleContext, function: Callable[..., Scalar], dtype: int | None, count: int | None = None
) -> list[Fact] | None:
    """The fact of an operator that applies ``function`` to each element of its broadcast inputs.

    Args:
        context: of the node.
        function: of one element of each input.
        dtype: of the result; None: that of the last input.
        count: of the inputs that are read; None: all.
    """
    inputs = [context.fact(i) for i in range(count or len(context.node.input))]
    shapes = [f.shape for f in inputs]
    if any(s is None for s in shapes):
        return None
    known_shapes = [s for s in shapes if s is not None]
    shape = broadcast(known_shapes, context)
    out = dtype if dtype is not None else inputs[-1].dtype or inputs[0].dtype
    kind = dtype_kind(out)
    values = [f.value for f in inputs]
    if kind is None or any(v is None for v in values):
        return [Fact(out, shape)]
    tensors = [v for v in values if v is not None]

    def at(index: Index) -> Scalar:
        return function(*(t.at(project(index, s)) for t, s in zip(tensors, known_shapes, strict=True)))

    return [Fact(out, shape, SymTensor(shape, kind, at))]


def pointwise(function: Callable[..., Scalar], dtype: int | None = None) -> Rule:
    """The rule of an operator that applies ``function`` to each element of its broadcast inputs."""
    return lambda context: elementwise(context, function, dtype)
