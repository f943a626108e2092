# SPDX-License-Identifier: Apache-2.0
"""The bound on a fused chain's work: positions computed per element read or written (docs/reference/chain-format.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stof.errors import ModelError, UnsupportedError
from stof.fusion.description.parser import AffineIndex, ExpressionNode, ParsedChain, parse_chain

MOST_POSITIONS = 4  # computed for each element that is read or written
MOST_WORK = 1 << 30  # values computed, below which any chain runs


def check_run(parsed: ParsedChain, sizes: Mapping[str, int], shapes: Sequence[Sequence[int]]) -> None:
    """Refuses a chain whose work the library would refuse at these sizes.

    Args:
        parsed: the chain.
        sizes: the sizes of its axes.
        shapes: the shapes of its inputs.

    Raises:
        ModelError: with the counts.
    """
    positions, values = math.prod(sizes.values()), len(_values(parsed))
    elements = sum(math.prod(sizes[a] for d in out.dims for a in d) for out in parsed.outs)
    for read in _reads(parsed):
        named = {name for index in read.indices for name, factor in index.terms if factor}
        number = int(float(read.value))
        given = math.prod(shapes[number]) if number < len(shapes) else 0  # a missing input is reported elsewhere
        elements += min(given, math.prod(sizes[a] for a in named))
    if positions > MOST_POSITIONS * elements and positions * values > MOST_WORK:
        raise ModelError(
            f"a chain has {positions} positions with {values} values each, but only {elements} elements to read and write; "
            f"expected at most {MOST_POSITIONS} positions for each element, or {MOST_WORK} values altogether"
        )


def check_any_run(text: str) -> None:
    """Refuses a chain that may exceed the bound for some sizes of its inputs.

    Raises:
        UnsupportedError: when the bound is not proven.
    """
    parsed = parse_chain(text)
    axes = dict(parsed.axes)
    fixed = {name: size.number for name, size in axes.items() if size.input < 0}
    covered = [{a for d in out.dims for a in d} for out in parsed.outs]
    if all(n.op != "select" for n in _values(parsed)):  # a select may read at some positions only
        covered += [_distinct_axes(read.indices, fixed) for read in _reads(parsed)]
    for names in covered:
        rest = [a for a in axes if a not in names]
        if all(a in fixed for a in rest) and math.prod(fixed[a] for a in rest) <= MOST_POSITIONS:
            return
    # Half of the bound: the library may count values that this parser does not see.
    if len(fixed) < len(axes) or math.prod(fixed.values()) * len(_values(parsed)) > MOST_WORK // 2:
        raise UnsupportedError("it reduces rows that no input has as a whole: their length is not bounded")


def _distinct_axes(indices: Sequence[AffineIndex], fixed: Mapping[str, int]) -> set[str]:
    """Axes along which a read touches a different element at each position."""
    found: set[str] = set()
    for index in indices:
        terms = sorted((t for t in index.terms if t[1]), key=lambda t: abs(t[1]))
        reach = 0  # largest sum of the smaller terms
        for number, (name, factor) in enumerate(terms):
            if index.op or abs(factor) <= reach or name in found:
                break
            found.add(name)
            if number + 1 < len(terms):
                if name not in fixed:
                    break
                reach += abs(factor) * (fixed[name] - 1)
    return found


def _expressions(parsed: ParsedChain) -> Iterator[ExpressionNode]:
    yield from (expression for _, expression in parsed.lets)
    yield from (out.expression for out in parsed.outs)


def _nodes(roots: Iterable[ExpressionNode]) -> Iterator[ExpressionNode]:
    pending = list(roots)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.arguments)


def _values(parsed: ParsedChain) -> set[ExpressionNode]:
    """The different subexpressions."""
    return {n for n in _nodes(_expressions(parsed)) if n.op != "let"}


def _reads(parsed: ParsedChain) -> list[ExpressionNode]:
    return [n for n in _values(parsed) if n.op == "read"]
