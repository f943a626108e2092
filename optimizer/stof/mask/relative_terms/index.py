# SPDX-License-Identifier: Apache-2.0
"""Which row of a table a pair of query and key reads, as an integer expression of attribute ``relative_index``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stof.errors import UnsupportedError
from stof.mask.check.checker import MaskChecker
from stof.mask.expression import MaskExpression
from stof.mask.from_condition import GraphNames, to_integer_expression
from stof.mask.relative_bias.distance_table import shorten, tabulate
from stof.mask.site import AttentionSite, LiftedMask, arrays_of
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.terms import Atom, Cond, Int, Real, dim, integer
from stof.symbolic.trace import replace_atoms, variables_of

_LETTERS = ("S", "T")
_PAIR = frozenset({"q", "k"})


def express_row(site: AttentionSite, domain: Domain, row: Int, rows: Int, names: GraphNames) -> MaskExpression:
    """The row as an expression of q, k, S, T and stored tables of integers.

    Args:
        site: the attention.
        domain: the limits of q and k.
        row: of the pair (q, k).
        rows: of the table; the operator clamps into it.
        names: of tables; those of sizes are this function's own.

    Raises:
        UnsupportedError: for what the grammar cannot express, and what is no function of one difference of q and k.
    """
    row = domain.integer(_join_maxima(domain.integer(strip_clamps(row, rows))))
    if variables_of(row) - _PAIR:
        raise UnsupportedError(f"its row depends on {', '.join(sorted(variables_of(row) - _PAIR))}")
    check_separable(row)
    solved = _solve_sizes(site)
    own = GraphNames({_placeholder(x): x for x in _LETTERS}, names.operand, names.constant, names.tables)
    return to_integer_expression(replace_atoms(row, solved), own)


def index_names(checker: MaskChecker, mask: LiftedMask) -> GraphNames:
    """The names for :func:`express_row`: the tables of a mask, and constants of the graph."""

    def refuse(tensor: str, indices: tuple[Int, ...], boolean: bool) -> tuple[str, int | None]:
        raise UnsupportedError(f"its row is read from {tensor!r}, which is known at run time alone")

    def constant(name: str) -> np.ndarray:
        array = checker.symbolic.constant(name)
        if array is None:
            raise UnsupportedError(f"its row is read from {name!r}, which is no constant")
        return array

    return GraphNames({}, refuse, constant, arrays_of(mask.tables))


def strip_clamps(row: Int, rows: Int) -> Int:
    """The row without what only keeps it inside of the table."""
    while (atom := row.atom) is not None and atom.kind in ("min", "max"):
        limit = rows - integer(1) if atom.kind == "min" else integer(0)
        others = [a for a in atom.args if isinstance(a, Int) and a != limit]
        if len(others) != 1:
            return row
        row = others[0]
    return row


def _join_maxima(row: Int) -> Int:
    """The row with x in the place of max(x, 0) - max(-x, 0).

    The one shortens a table for short inputs, the other pads it for long ones.
    """
    factors = dict(row.terms)
    maxima = [a for a in row.atoms() if a.kind == "max" and integer(0) in a.args and (a,) in factors]
    for atom in maxima:
        inner = next(x for x in atom.args if isinstance(x, Int) and x != integer(0))
        other = next((a for a in maxima if -inner in a.args), None)
        if other is not None and factors[(atom,)] == -factors[(other,)]:
            return _join_maxima(replace_atoms(row, {atom: inner + Int((((other,), 1),))}))
    return row


def check_separable(row: Int) -> None:
    """Refuses a row that is no function of one difference A(k) - C(q).

    Raises:
        UnsupportedError: for such a row.
    """
    sums = list(_differences(row))
    first = sums[0] if sums else integer(0)
    if any(one not in (first, -first) for one in sums):
        raise UnsupportedError("its row is no function of one difference of key and query")


def _differences(value: Int) -> Iterator[Int]:
    """The sums in which queries and keys stand, without what depends on neither."""
    own = integer(0)
    for monomial, coefficient in value.terms:
        read = [(a, variables_of(Int((((a,), 1),))) & _PAIR) for a in monomial]
        dependent = [(a, names) for a, names in read if names]
        if not dependent:
            continue
        if len(dependent) > 1:
            raise UnsupportedError("its row multiplies queries and keys")
        atom, names = dependent[0]
        if names != _PAIR:  # a function of the query, or of the key
            own = own + Int(((monomial, coefficient),))
            continue
        for argument in _integers(atom.args):
            yield from _differences(argument)
    if own.terms:
        yield own


def _integers(args: object) -> Iterator[Int]:
    if isinstance(args, Int):
        yield args
    elif isinstance(args, tuple):
        for one in args:
            yield from _integers(one)
    elif isinstance(args, Cond | Real | Atom):
        yield from _integers(args.args)


def _placeholder(letter: str) -> str:
    return f"\x1f{letter}"  # no graph has a dimension of that name


def _solve_sizes(site: AttentionSite) -> dict[Atom, Int]:
    """The sizes of the graph by S and T of the site, where these are linear in them."""
    solved: dict[Atom, Int] = {}
    for letter, size in zip(_LETTERS, site.dims[2:], strict=True):
        size = replace_atoms(size, solved)
        mine = dim(_placeholder(letter))
        for monomial, coefficient in size.terms:
            if len(monomial) == 1 and abs(coefficient) == 1 and not _is_placeholder(monomial[0]):
                rest = size - Int(((monomial, coefficient),))
                value = mine - rest if coefficient == 1 else rest - mine
                solved = {a: replace_atoms(v, {monomial[0]: value}) for a, v in solved.items()}
                solved[monomial[0]] = value
                break
    return solved


def _is_placeholder(atom: Atom) -> bool:
    return atom.kind == "size" and str(atom.args[0]).startswith("\x1f")


@dataclass(frozen=True)
class RowsRun:
    """Rows [S, T] that a run gave, the pairs that are allowed, and the past length; whether the graph has no longer runs."""

    rows: np.ndarray
    allowed: np.ndarray
    past: int
    is_longest: bool = False


def tabulate_rows(run: RowsRun, radius: int, names: GraphNames) -> MaskExpression:
    """Rows that depend on q - k alone as a stored table of integers by distance.

    Args:
        run: at a length beyond ``radius``, or at the longest that the graph has.
        radius: the distance beyond which the rows are proven to be constant.
        names: of tables.

    Raises:
        UnsupportedError: when pairs of one distance read different rows, or rows change beyond the radius.
    """
    shape = (1, 1, *run.rows.shape)
    table = tabulate(run.rows.reshape(shape).astype(np.float64), run.allowed.reshape(shape), run.past)
    shortened = None if table is None else shorten(table, is_fixed=run.is_longest)
    if shortened is None or shortened.shape[1] // 2 > radius:
        raise UnsupportedError("its row is no function of the distance of key and query")
    entries = shortened[0].astype(np.int32)
    reach = len(entries) // 2
    sides = ("k", "q")
    if entries[0] > entries[-1]:  # rows that rise are read in vectors
        entries, sides = entries[::-1], ("q", "k")
    name = names.table(np.ascontiguousarray(entries))
    return MaskExpression.parse_integer(f"{name}[max(0, min({2 * reach}, {sides[0]} - {sides[1]} + {reach}))]")
