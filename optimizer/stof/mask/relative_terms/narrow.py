# SPDX-License-Identifier: Apache-2.0
"""Relative tables under a static window: its pairs read some rows around one, however long the inputs are.

A table of a row per distance has as many rows as queries and keys together, and all of them are computed. Under a window of
l keys to the left and r to the right, l + r + 1 rows are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from stof.mask.expression import MaskExpression
from stof.mask.expression_nodes import Binary, Constant, Name, Node, Unary, fold
from stof.mask.lift import domain_of
from stof.mask.relative_roles import RELATIVE_VALUE
from stof.mask.site import AttentionSite, EmptyRows, LiftedMask, RelativeTerm, RowRange
from stof.symbolic import Symbolic, integer

_Sum = Mapping[str, int]  # the factor of each name; that of 1 is ""
_NAMES = frozenset({"", "q", "k", "S", "T"})
_NO_SUM: _Sum = MappingProxyType({"?": 1})


def narrow_tables(symbolic: Symbolic, site: AttentionSite, mask: LiftedMask) -> LiftedMask:
    """The mask with those of its relative tables that a static window reads in part as that part.

    The mask as it is where fully masked rows attend by scores of pairs that it forbids.
    """
    window = _static_window(mask.expression)
    if window is None or mask.weaker is not None or mask.empty_rows is EmptyRows.ALL:
        return mask
    all_keys = mask.empty_rows not in (EmptyRows.ZERO, EmptyRows.NAN)  # fully masked rows weigh the rows of all keys
    terms = tuple(
        t if all_keys and t.role == RELATIVE_VALUE else _narrow(symbolic, site, t, window) for t in mask.relative_terms
    )
    return mask if terms == mask.relative_terms else replace(mask, relative_terms=terms)


def _static_window(expression: MaskExpression) -> tuple[int, int] | None:
    """The most keys to the left and to the right that a pair may be apart; None where one side has no limit."""
    lefts, rights = [], []
    for condition in expression.conjuncts:
        left, right = MaskExpression(condition).window() or (-1, -1)
        lefts += [left] if left >= 0 else []
        rights += [right] if right >= 0 else []
    return (min(lefts), min(rights)) if lefts and rights else None


def _narrow(symbolic: Symbolic, site: AttentionSite, term: RelativeTerm, window: tuple[int, int]) -> RelativeTerm:
    """A term whose table has the rows of a window alone; the term as it is where that spares none."""
    index = _linear(term.index)
    shape = symbolic.shape(term.table.tensor) if term.table.tensor else None
    factor = index.get("k", 0)
    if (
        shape is None
        or term.table.is_padded
        or not index.keys() <= _NAMES
        or abs(factor) != 1
        or index.get("q", 0) != -factor
    ):
        return term
    before, after = window if factor == 1 else window[::-1]
    of_queries, of_keys, offset = (index.get(name, 0) for name in ("S", "T", ""))
    rows = shape[term.table.row_axis]
    if rows.constant is not None and rows.constant <= before + after + 1:
        return term
    domain = domain_of(site)
    _, _, queries, keys = site.dims
    middle = integer(of_queries) * queries + integer(of_keys) * keys + integer(offset)
    # No key lies as far behind a query, or in front of it: the queries are the last positions, or all begin at 0.
    farthest = keys if (factor == 1) != bool(site.query_offset) else queries
    if domain.bound(middle, upper=False) < -1 or domain.bound(rows - middle - farthest, upper=False) < 0:
        return term  # what the operator clamps would read other rows
    chosen = RowRange(of_queries, of_keys, offset, before, after)
    sizes = "".join(f" + {n} * {x}" for n, x in ((of_queries, "S"), (of_keys, "T")) if n)
    distance = "k - q" if factor == 1 else "q - k"
    text = f"{distance} + min({offset}{sizes}, {before})"
    return replace(
        term, table=replace(term.table, rows=chosen), index=MaskExpression.parse_integer(_plain(text, chosen, distance))
    )


def _plain(text: str, rows: RowRange, distance: str) -> str:
    """An index as people write it."""
    if not rows.of_queries and not rows.of_keys:
        return f"{distance} + {min(rows.offset, rows.before)}"
    if (rows.of_queries, rows.of_keys) in ((0, 1), (1, 0)):
        size = "S" if rows.of_queries else "T"
        number = f" {'-' if rows.offset < 0 else '+'} {abs(rows.offset)}" if rows.offset else ""
        return f"{distance} + min({size}{number}, {rows.before})"
    return text


def _linear(index: MaskExpression) -> _Sum:
    """An index as a sum of names with factors; one of an unknown name where it is none."""

    def combine(node: Node, parts: Sequence[_Sum]) -> _Sum:
        match node:
            case Constant(value=value):
                return {"": value}
            case Name(name=name):
                return {name: 1}
            case Unary(symbol="-"):
                return _add({}, parts[0], -1)
            case Binary(symbol="+" | "-" as symbol):
                return _add(parts[0], parts[1], 1 if symbol == "+" else -1)
            case Binary(symbol="*") if any(p.keys() <= {""} for p in parts):
                number, other = parts if parts[0].keys() <= {""} else parts[::-1]
                return _add({}, other, number.get("", 0))
        return _NO_SUM

    return {name: factor for name, factor in fold(index.root, combine).items() if factor}


def _add(one: _Sum, other: _Sum, factor: int) -> _Sum:
    return {name: one.get(name, 0) + factor * other.get(name, 0) for name in {*one, *other}}
