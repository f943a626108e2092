# SPDX-License-Identifier: Apache-2.0
"""How much a chain computes beside what it reads and writes: the library bounds it (docs/reference/chain-format.md)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from stof.errors import ModelError, UnsupportedError
from stof.fusion.description_parser import Index, Node, Parsed, parse_chain

MOST_POSITIONS = 4  # for each element
MOST_WORK = 1 << 30  # values


def check_run(parsed: Parsed, sizes: Mapping[str, int], shapes: Sequence[Sequence[int]]) -> None:
    """Whether the library would run a chain.

    Args:
        parsed: the chain.
        sizes: of its axes.
        shapes: of its inputs.

    Raises:
        ModelError: when it computes too much.
    """
    positions, values = math.prod(sizes.values()), len(_values(parsed))
    elements = sum(math.prod(sizes[a] for d in out.dims for a in d) for out in parsed.outs)
    for read in _reads(parsed):
        named = {name for index in read.indices for name, factor in index.terms if factor}
        number = int(float(read.value))
        given = math.prod(shapes[number]) if number < len(shapes) else 0  # that one is missing is told elsewhere
        elements += min(given, math.prod(sizes[a] for a in named))
    if positions > MOST_POSITIONS * elements and positions * values > MOST_WORK:
        raise ModelError(
            f"a chain has {positions} positions with {values} values each, but only {elements} elements to read and write; "
            f"expected at most {MOST_POSITIONS} positions for each element, or {MOST_WORK} values altogether"
        )


def check_any_run(text: str) -> None:
    """Whether a chain stays within the bound whatever the sizes of its inputs are.

    Raises:
        UnsupportedError: when that cannot be shown.
    """
    parsed = parse_chain(text)
    axes = dict(parsed.axes)
    fixed = {name: size.number for name, size in axes.items() if size.input < 0}
    covered = [{a for d in out.dims for a in d} for out in parsed.outs]
    if all(n.op != "select" for n in _values(parsed)):  # which reads some positions only
        covered += [_covered(read.indices, fixed) for read in _reads(parsed)]
    for names in covered:
        rest = [a for a in axes if a not in names]
        if all(a in fixed for a in rest) and math.prod(fixed[a] for a in rest) <= MOST_POSITIONS:
            return
    # Half of what the library takes, which may count values that this parser does not see.
    if len(fixed) < len(axes) or math.prod(fixed.values()) * len(_values(parsed)) > MOST_WORK // 2:
        raise UnsupportedError("it reduces rows that no input has as a whole: their length is not bounded")


def _covered(indices: Sequence[Index], fixed: Mapping[str, int]) -> set[str]:
    """Axes of which a read touches another element at each position."""
    found: set[str] = set()
    for index in indices:
        terms = sorted((t for t in index.terms if t[1]), key=lambda t: abs(t[1]))
        reach = 0  # how far the smaller terms go
        for place, (name, factor) in enumerate(terms):
            if index.op or abs(factor) <= reach or name in found:
                break
            found.add(name)
            if place + 1 < len(terms):
                if name not in fixed:
                    break
                reach += abs(factor) * (fixed[name] - 1)
    return found


def _expressions(parsed: Parsed) -> Iterator[Node]:
    yield from (expression for _, expression in parsed.lets)
    yield from (out.expression for out in parsed.outs)


def _nodes(roots: Iterable[Node]) -> Iterator[Node]:
    pending = list(roots)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.arguments)


def _values(parsed: Parsed) -> set[Node]:
    """The different subexpressions."""
    return {n for n in _nodes(_expressions(parsed)) if n.op != "let"}


def _reads(parsed: Parsed) -> list[Node]:
    return [n for n in _values(parsed) if n.op == "read"]
