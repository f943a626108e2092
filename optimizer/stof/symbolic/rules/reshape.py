# SPDX-License-Identifier: Apache-2.0
"""Rules of the operators that change the shape and keep the order of elements."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from stof.symbolic.algebra.conditions import less_equal, select
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.piecewise import to_int
from stof.symbolic.algebra.terms import Int, Scalar, integer
from stof.symbolic.facts import Fact, Rule, RuleContext
from stof.symbolic.rules.movement_helpers import element_count, moved_fact
from stof.symbolic.tensor import Index, Shape

ZERO, ONE = integer(0), integer(1)


def _axes(context: RuleContext, rank: int) -> list[int] | None:
    axes: object = context.attribute("axes")
    if axes is None:
        axes = context.fixed_ints(1) if context.has(1) else None
    return None if axes is None else [a % rank for a in axes]  # type: ignore[attr-defined]


def _unsqueeze(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    if data is None:
        return None
    extra = context.attribute("axes") or (context.fixed_ints(1) if context.has(1) else None)
    if extra is None:
        return None
    rank = len(data) + len(list(extra))  # type: ignore[call-overload]
    axes = _axes(context, rank)
    assert axes is not None
    rest = iter(data)
    shape = tuple(ONE if a in axes else next(rest) for a in range(rank))

    def at(index: Index) -> Scalar:
        value = context.value(0)
        assert value is not None
        return value.at(tuple(i for a, i in enumerate(index) if a not in axes))

    return [moved_fact(context, shape, at)]


def _squeeze(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    if data is None:
        return None
    axes = _axes(context, len(data)) if len(data) else []
    if axes is None:
        if context.has(1) or any(d.constant is None for d in data):
            return None  # unknown axes: a dynamic size that is 1 in a run is squeezed as well
        axes = [a for a, d in enumerate(data) if d == ONE]
    for a in axes:  # nothing else can be squeezed
        context.equate(data[a], ONE)
    shape = tuple(d for a, d in enumerate(data) if a not in axes)

    def at(index: Index) -> Scalar:
        rest = iter(index)
        value = context.value(0)
        assert value is not None
        return value.at(tuple(ZERO if a in axes else next(rest) for a in range(len(data))))

    return [moved_fact(context, shape, at)]


def _target_shape(context: RuleContext, data: Shape) -> Shape | None:
    wanted = context.ints(1)
    if wanted is None:
        return None
    keep_zero = context.number("allowzero", 0)
    shape = [data[a] if d.constant == 0 and not keep_zero else d for a, d in enumerate(wanted)]
    unknown = [a for a, d in enumerate(shape) if d.constant == -1]
    if unknown:
        rest = tuple(d for d in shape if d.constant != -1)
        quotient = element_count(data).divide(element_count(rest))
        if quotient is None:
            whole, part = (element_count(tuple(context.canonicalize(d) for d in dims)) for dims in (data, rest))
            quotient = whole.divide(part)
        if quotient is None or len(unknown) > 1:
            return None
        shape[unknown[0]] = quotient
    return tuple(shape)


def _reshape(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    shape = None if data is None else _target_shape(context, data)
    if data is None or shape is None:
        return None
    _equate_counts(context, element_count(data), element_count(shape))
    return _reshaped_fact(context, data, shape)


def _equate_counts(context: RuleContext, before: Int, after: Int) -> None:
    """Records that a Reshape keeps the number of elements, without the common factors."""
    for monomial, _ in after.terms[:1]:
        for atom in monomial:
            factor = Int((((atom,), 1),))
            rest = before.divide(factor), after.divide(factor)
            if rest[0] is not None and rest[1] is not None:
                before, after = rest[0], rest[1]
    context.equate(before, after)


def _reshaped_fact(context: RuleContext, data: Shape, shape: Shape) -> list[Fact]:
    value = context.value(0)
    map_index = None
    if value is not None:
        # Equal sizes may be different expressions on the two sides.
        same_data, same_shape = (tuple(context.canonicalize(d) for d in dims) for dims in (data, shape))
        divide = _div_mod if context.domain is None else partial(_div_mod_within, context.domain)
        map_index = _index_map(data, shape, divide) or _index_map(same_data, same_shape, divide)
    if value is None or map_index is None:
        return [Fact(context.fact(0).dtype, shape)]
    return [moved_fact(context, shape, lambda index: value.at(map_index(index)))]


def _index_map(data: Shape, shape: Shape, divide: Callable[[Int, Int], tuple[Int, Int]]):  # type: ignore[no-untyped-def]
    """Maps an index of ``shape`` to one of ``data``, where axes are equal, merged or split; None where it is not known how."""
    source = [a for a, d in enumerate(data) if d != ONE]
    target = [a for a, d in enumerate(shape) if d != ONE]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(source) or j < len(target):
        source_axes, target_axes = [], []
        p, q = ONE, ONE
        if i < len(source):
            source_axes.append(source[i])
            p, i = data[source[i]], i + 1
        if j < len(target):
            target_axes.append(target[j])
            q, j = shape[target[j]], j + 1
        while p != q:
            if i < len(source) and (q.divide(p) is not None or j >= len(target)):
                source_axes.append(source[i])
                p, i = p * data[source[i]], i + 1
            elif j < len(target):
                target_axes.append(target[j])
                q, j = q * shape[target[j]], j + 1
            else:
                return None
        groups.append((source_axes, target_axes))

    def map_index(index: Index) -> Index:
        result = [ZERO] * len(data)
        for source_axes, target_axes in groups:
            flat = ZERO
            for a in target_axes:
                flat = flat * shape[a] + index[a]
            for a in reversed(source_axes[1:]):
                flat, result[a] = divide(flat, data[a])
            if source_axes:
                result[source_axes[0]] = flat
        return tuple(result)

    return map_index


def _div_mod(flat: Int, n: Int) -> tuple[Int, Int]:
    """Quotient and remainder.

    By a symbolic size: the terms that it divides, and the others. A valid graph keeps these below the size (``b * S + k``);
    the mask check by execution finds the exceptions.
    """
    if n.constant is not None:
        return floor_div(flat, n.constant), floor_mod(flat, n.constant)
    return flat.divmod(n)


def _div_mod_within(domain: Domain, flat: Int, n: Int) -> tuple[Int, Int]:
    """Quotient and remainder, with conditions where that by terms may be a row off: ``(q + 1) * n - 1`` lies in row q.

    As by terms where it may be farther off: a later Reshape may put both together again.
    """
    quotient, rest = _div_mod(flat, n)
    low, high = domain.bound(rest + n, upper=False), domain.bound(rest - n - n, upper=True)
    is_exact = domain.bound(rest, upper=False) >= 0 and domain.bound(rest - n, upper=True) < 0
    if n.constant is not None or is_exact or low < 0 or high >= 0:
        return quotient, rest
    is_before, is_behind = less_equal(rest, ZERO - ONE), less_equal(n, rest)
    places = [(quotient - ONE, rest + n), (quotient, rest), (quotient + ONE, rest - n)]
    before, own, behind = (tuple(place) for place in places)
    chosen = [to_int(select(is_before, before[i], to_int(select(is_behind, behind[i], own[i])))) for i in range(2)]
    return chosen[0], chosen[1]


def _flatten(context: RuleContext) -> list[Fact] | None:
    data = context.shape(0)
    if data is None:
        return None
    axis = context.number("axis", 1)
    axis = axis + len(data) if axis < 0 else axis
    return _reshaped_fact(context, data, (element_count(data[:axis]), element_count(data[axis:])))


RULES: dict[str, Rule] = {
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Reshape": _reshape,
    "Flatten": _flatten,
}
