# SPDX-License-Identifier: Apache-2.0
"""Whether a mask leaves every query a key, at every size and whatever is read at run time.

The expression is read with a key in the place of ``k`` that queries usually have: their own position, the first and the last.
It leaves a key where one of these is always allowed. Of fixed sizes it is evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

import numpy as np

from stof.mask.printer import B, H, Q
from stof.runtime.library import LibraryError, Mask
from stof.site import AttentionSite, LiftedMask, tables_of
from stof.symbolic import Cond, Int, integer
from stof.symbolic.algebra.conditions import all_of, any_of, equal, less_equal, negate
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.int_bounds import bound, multiply, rebuild
from stof.symbolic.algebra.terms import ANY, FALSE, TRUE, of_atom

_LARGEST = 1 << 26  # pairs of a mask that is evaluated
_ZERO, _ONE = integer(0), integer(1)


class _Unread(Exception):
    """The expression has a part of which nothing is known here."""


def leaves_a_key(site: AttentionSite, mask: LiftedMask) -> bool:
    """Whether it is proven that a mask's expression allows some key for every query, where there are keys at all."""
    return mask.expression in ("", "True") or _by_keys(site, mask) or _evaluated(site, mask)


def _by_keys(site: AttentionSite, mask: LiftedMask) -> bool:
    batch, heads, rows, keys = site.dims
    past = keys - rows if site.query_offset else _ZERO
    if bound(past, upper=False) < 0:  # queries would stand before the first key
        return False
    last = keys - _ONE
    domain = Domain(
        {"b": (_ZERO, batch - _ONE), "h": (_ZERO, heads - _ONE), "q": (past, past + rows - _ONE), "k": (_ZERO, last)}
    )
    try:
        tree = ast.parse(mask.expression, mode="eval").body
        own, *others = (_Reader(site, mask, past, key).condition(tree) for key in (Q, _ZERO, last))
    except (SyntaxError, RecursionError, _Unread):
        return False
    # The first and the last key are there wherever any is.
    found = [all_of([less_equal(Q, last), own]), *others]
    return domain.simplify(any_of(domain.simplify(c) for c in found)) == TRUE


class _Reader:
    """An expression of docs/reference/mask-format.md with a key for ``k``."""

    def __init__(self, site: AttentionSite, mask: LiftedMask, past: Int, key: Int) -> None:
        self.names = {"b": B, "h": H, "q": Q, "k": key, "S": site.dims[2], "T": site.dims[3], "P": past}
        self.tables = tables_of(mask)
        # A vector of queries and one of keys may be the same tensor.
        self.vectors = {o.role: f"{o.tensor} as {o.view.value}" for o in mask.operands}

    def condition(self, node: ast.expr) -> Cond:
        match node:
            case ast.BoolOp():
                join = all_of if isinstance(node.op, ast.And) else any_of
                return join(self.condition(v) for v in node.values)
            case ast.UnaryOp(op=ast.Not()):
                return negate(self.condition(node.operand))
            case ast.Constant(value=bool()):
                return TRUE if node.value else FALSE
            case ast.Compare(ops=[op], comparators=[right]):
                return _compared(op, self.number(node.left), self.number(right))
            case ast.Subscript(value=ast.Name(id="pad")):
                return Cond("read", ("pad", self.indices(node)))
            case ast.Subscript(value=ast.Name(id=name)) if name in self.tables:
                return self.looked_up(name, self.indices(node))
        raise _Unread

    def number(self, node: ast.expr) -> Int:
        match node:
            case ast.Constant(value=int()) if not isinstance(node.value, bool):
                return integer(node.value)
            case ast.Name(id=name) if name in self.names:
                return self.names[name]
            case ast.UnaryOp(op=ast.USub()):
                return -self.number(node.operand)
            case ast.BinOp():
                return self.binary(node.op, self.number(node.left), self.number(node.right))
            case ast.Call(func=ast.Name(id=name)) if name in ("abs", "min", "max"):
                return rebuild(name, tuple(self.number(a) for a in node.args))
            case ast.Subscript(value=ast.Name(id=name)) if name in self.vectors:
                return of_atom("read", self.vectors[name], self.indices(node), ANY)
            case ast.Subscript(value=ast.Name(id=name)) if name in self.tables:
                return of_atom("table", name, self.indices(node))
        raise _Unread

    def binary(self, op: ast.operator, left: Int, right: Int) -> Int:
        match op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return multiply(left, right)
            case ast.FloorDiv() if right.constant is not None and right.constant > 0:
                return floor_div(left, right.constant)
            case ast.Mod() if right.constant is not None and right.constant > 0:
                return floor_mod(left, right.constant)
        raise _Unread

    def indices(self, node: ast.Subscript) -> tuple[Int, ...]:
        axes: Sequence[ast.expr] = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return tuple(self.number(a) for a in axes)

    def looked_up(self, name: str, indices: tuple[Int, ...]) -> Cond:
        """An entry of a table; True where all are that these indices may read."""
        return TRUE if _all_true(self.tables[name], indices) else Cond("table", (name, indices))


def _compared(op: ast.cmpop, left: Int, right: Int) -> Cond:
    match op:
        case ast.LtE():
            return less_equal(left, right)
        case ast.Lt():
            return less_equal(left + _ONE, right)
        case ast.GtE():
            return less_equal(right, left)
        case ast.Gt():
            return less_equal(right + _ONE, left)
        case ast.Eq():
            return equal(left, right)
        case ast.NotEq():
            return negate(equal(left, right))
    raise _Unread


def _all_true(table: np.ndarray, indices: tuple[Int, ...]) -> bool:
    """Whether a boolean table is true wherever indices may read it: on the diagonal where two of them are equal."""
    if table.dtype != np.bool_ or table.ndim != len(indices):
        return False
    read = table
    left: list[Int] = []
    for size, index in zip(table.shape, indices, strict=True):
        place = 0 if size == 1 else index.constant  # an axis of size 1 serves every batch and head
        if place is None:
            left.append(index)
        elif 0 <= place < size:
            read = np.take(read, place, axis=len(left))
        else:
            return False
    for index in dict.fromkeys(left):
        while left.count(index) > 1:
            first = left.index(index)
            second = left.index(index, first + 1)
            read = np.diagonal(read, axis1=first, axis2=second)
            left = [x for i, x in enumerate(left) if i not in (first, second)] + [index]
    return bool(read.all())


def _evaluated(site: AttentionSite, mask: LiftedMask) -> bool:
    """The same of a mask of fixed sizes that reads nothing at run time."""
    batch, heads, rows, keys = (d.constant for d in site.dims)
    read = set(re.findall(r"\w+", mask.expression))
    batch, heads = (batch if "b" in read else 1), (heads if "h" in read else 1)
    if mask.operands or batch is None or heads is None or rows is None or keys is None:
        return False
    past = keys - rows if site.query_offset else 0
    if past < 0 or batch * heads * rows * keys > _LARGEST:
        return False
    try:
        allowed = Mask(mask.expression, tables_of(mask)).evaluate(batch, heads, rows, keys, past)
    except LibraryError:
        return False
    return bool(allowed.any(axis=-1).all())
