# SPDX-License-Identifier: Apache-2.0
"""Proofs that a mask leaves every query a key, at every size and whatever is read at run time.

The mask is read at a key that queries usually have: their own position, the first and the last key. It leaves a key where one of
these is always allowed. A mask of fixed sizes is evaluated.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stof.mask import expression_nodes as nodes
from stof.mask.expression_nodes import Binary, Call, Constant, Lookup, Name, Node, Truth, Unary, fold, operands_of
from stof.mask.from_condition import B, H, Q
from stof.mask.site import AttentionSite, LiftedMask, tables_of
from stof.runtime.library import LibraryError, Mask
from stof.symbolic import Cond, Int, integer
from stof.symbolic.algebra.conditions import all_of, any_of, equal, less_equal, negate
from stof.symbolic.algebra.divisions import floor_div, floor_mod
from stof.symbolic.algebra.domain import Domain
from stof.symbolic.algebra.int_bounds import bound, multiply, rebuild
from stof.symbolic.algebra.terms import ANY, FALSE, TRUE, of_atom

_LARGEST = 1 << 26  # pairs of a mask that is evaluated
_ZERO, _ONE = integer(0), integer(1)


class _UnprovenError(Exception):
    """The mask has a part of which nothing is known here."""


def leaves_a_key(site: AttentionSite, mask: LiftedMask) -> bool:
    """Whether it is proven that a mask's expression allows some key for every query, where there are keys at all."""
    return mask.expression.allows_all or _allows_usual_keys(site, mask) or _allows_when_evaluated(site, mask)


def _allows_usual_keys(site: AttentionSite, mask: LiftedMask) -> bool:
    batch, heads, rows, keys = site.dims
    past = keys - rows if site.query_offset else _ZERO
    if bound(past, upper=False) < 0:  # queries would stand before the first key
        return False
    last = keys - _ONE
    domain = Domain(
        {"b": (_ZERO, batch - _ONE), "h": (_ZERO, heads - _ONE), "q": (past, past + rows - _ONE), "k": (_ZERO, last)}
    )
    interpreter = _Interpreter(site, mask, past)
    usual = (nodes.Q, Constant(0), Binary("-", Name("T"), Constant(1)))
    try:
        at_own, *at_ends = (interpreter.condition(mask.expression.substitute({"k": key}).root) for key in usual)
    except _UnprovenError:
        return False
    # The first and the last key are there wherever any is.
    conditions = [all_of([less_equal(Q, last), at_own]), *at_ends]
    return domain.simplify(any_of(domain.simplify(c) for c in conditions)) == TRUE


class _Interpreter:
    """Makes conditions and integers of the symbolic algebra from an expression that does not read ``k``."""

    def __init__(self, site: AttentionSite, mask: LiftedMask, past: Int) -> None:
        self.names = {"b": B, "h": H, "q": Q, "S": site.dims[2], "T": site.dims[3], "P": past}
        self.tables = tables_of(mask)
        # A vector of queries and one of keys may be the same tensor.
        self.vectors = {o.role: f"{o.tensor} as {o.view.value}" for o in mask.operands}

    def condition(self, node: Node) -> Cond:
        """The condition of a node.

        Raises:
            _UnprovenError: for what has no counterpart.
        """
        match node:
            case Binary(symbol="and" | "or"):
                unite = all_of if node.symbol == "and" else any_of
                return unite(self.condition(n) for n in operands_of(node.symbol, node))
            case Unary(symbol="not"):
                return negate(self.condition(node.operand))
        return _as_condition(fold(node, self.value))

    def value(self, node: Node, values: Sequence[Cond | Int]) -> Cond | Int:
        """The value of a node without ``and``, ``or`` and ``not``, from those of its children."""
        match node:
            case Truth():
                return TRUE if node.value else FALSE
            case Constant():
                return integer(node.value)
            case Name() if node.name in self.names:
                return self.names[node.name]
            case Unary():
                return -_as_integer(values[0])
            case Binary():
                left, right = (_as_integer(v) for v in values)
                return _compute(node.symbol, left, right)
            case Call():
                return rebuild(node.name, tuple(_as_integer(v) for v in values))
            case Lookup():
                return self.look_up(node, tuple(_as_integer(v) for v in values))
        raise _UnprovenError

    def look_up(self, node: Lookup, indices: tuple[Int, ...]) -> Cond | Int:
        """An element of a vector or of a table; True where a table is true wherever these indices may read it."""
        if node.is_padding:
            return Cond("read", ("pad", indices))
        if node.name in self.vectors:
            return of_atom("read", self.vectors[node.name], indices, ANY)
        if node.name not in self.tables:
            raise _UnprovenError
        table = self.tables[node.name]
        if table.dtype != np.bool_:
            return of_atom("table", node.name, indices)
        return TRUE if _is_true_at(table, indices) else Cond("table", (node.name, indices))


def _as_condition(value: Cond | Int) -> Cond:
    if not isinstance(value, Cond):
        raise _UnprovenError
    return value


def _as_integer(value: Cond | Int) -> Int:
    if not isinstance(value, Int):
        raise _UnprovenError
    return value


def _compute(symbol: str, left: Int, right: Int) -> Cond | Int:
    match symbol:
        case "+":
            return left + right
        case "-":
            return left - right
        case "*":
            return multiply(left, right)
        case "//" if right.constant is not None and right.constant > 0:
            return floor_div(left, right.constant)
        case "%" if right.constant is not None and right.constant > 0:
            return floor_mod(left, right.constant)
        case "<=":
            return less_equal(left, right)
        case "<":
            return less_equal(left + _ONE, right)
        case ">=":
            return less_equal(right, left)
        case ">":
            return less_equal(right + _ONE, left)
        case "==":
            return equal(left, right)
        case "!=":
            return negate(equal(left, right))
    raise _UnprovenError


def _is_true_at(table: np.ndarray, indices: tuple[Int, ...]) -> bool:
    """Whether a boolean table is true wherever indices may read it: on the diagonal where two of them are equal."""
    if table.ndim != len(indices):
        return False
    read = table
    variable: list[Int] = []  # the indices of the axes that remain
    for size, index in zip(table.shape, indices, strict=True):
        element = 0 if size == 1 else index.constant  # an axis of size 1 serves every batch and head
        if element is None:
            variable.append(index)
        elif 0 <= element < size:
            read = np.take(read, element, axis=len(variable))
        else:
            return False
    for index in dict.fromkeys(variable):
        while variable.count(index) > 1:
            first = variable.index(index)
            second = variable.index(index, first + 1)
            read = np.diagonal(read, axis1=first, axis2=second)
            variable = [x for i, x in enumerate(variable) if i not in (first, second)] + [index]
    return bool(read.all())


def _allows_when_evaluated(site: AttentionSite, mask: LiftedMask) -> bool:
    """Whether a mask of fixed sizes, which reads nothing at run time, leaves every query a key."""
    batch, heads, rows, keys = (d.constant for d in site.dims)
    read = mask.expression.reads
    batch, heads = (batch if "b" in read else 1), (heads if "h" in read else 1)
    if mask.operands or batch is None or heads is None or rows is None or keys is None:
        return False
    past = keys - rows if site.query_offset else 0
    if past < 0 or batch * heads * rows * keys > _LARGEST:
        return False
    try:
        allowed = Mask(mask.expression.text, tables_of(mask)).evaluate(batch, heads, rows, keys, past)
    except LibraryError:
        return False
    return bool(allowed.any(axis=-1).all())
