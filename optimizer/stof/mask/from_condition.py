# SPDX-License-Identifier: Apache-2.0
"""Mask expressions from the interpreter's conditions, in a canonical form.

Whatever depends on ``q - k`` alone is a set of integers. It is computed as one and written as the fewest bands, so that
equal windows of different exporters give equal expressions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from stof.errors import UnsupportedError
from stof.mask.expression import MaskExpression
from stof.mask.expression_nodes import (
    FALSE,
    TRUE,
    Binary,
    Call,
    Constant,
    Lookup,
    Name,
    Node,
    Unary,
    join,
    negative,
    print_node,
)
from stof.symbolic.algebra import terms
from stof.symbolic.algebra.conditions import all_of, any_of, children
from stof.symbolic.algebra.terms import Atom, Cond, Int, Real, integer, var

_WIDEST = 1 << 20  # largest constant in a band that is recognized as one
_DEGREE = 2  # of a polynomial in q - k: its values stay below 2^63
Q, K, B, H = var("q"), var("k"), var("b"), var("h")
_ROW, _COLUMN = Atom("var", ("q",)), Atom("var", ("k",))


@dataclass
class GraphNames:
    """The names that an expression has for sizes and tensors of a graph. ``tables`` grows while one is made."""

    sizes: dict[str, str]  # dimension name -> S, T or P
    # (tensor, indices, boolean) -> role, axis of positions or None
    operand: Callable[[str, tuple[Int, ...], bool], tuple[str, int | None]]
    constant: Callable[[str], np.ndarray]  # array of a constant tensor
    tables: dict[str, np.ndarray] = field(default_factory=dict)  # table name -> array

    def table(self, array: np.ndarray) -> str:
        """The table name of an array; equal arrays share one."""
        for name, other in self.tables.items():
            if other.dtype == array.dtype and other.shape == array.shape and np.array_equal(other, array):
                return name
        name = f"table{len(self.tables)}"
        self.tables[name] = array
        return name

    def stored_tables(self) -> tuple[tuple[str, str, tuple[int, ...], bytes], ...]:
        """The tables as ``LiftedMask`` has them."""
        return tuple((n, str(a.dtype), tuple(a.shape), a.tobytes()) for n, a in self.tables.items())


def _difference(value: Int) -> list[int] | None:
    """The coefficients of a polynomial in q - k, the constant first; None where it is none or of a high degree."""
    coefficients = [0] * (_DEGREE + 1)
    others: Counter[tuple[int, int]] = Counter()
    for monomial, coefficient in value.terms:
        rows, columns = monomial.count(_ROW), monomial.count(_COLUMN)
        if rows + columns < len(monomial) or len(monomial) > _DEGREE:
            return None
        for power in range(rows + 1):  # q ** n * k ** m with q = k + d
            times = coefficient * math.comb(rows, power)
            if rows + columns == power:
                coefficients[power] += times
            else:
                others[power, rows + columns - power] += times
    return None if any(others.values()) else coefficients


def _band_values(value: Int, d: np.ndarray) -> np.ndarray | None:
    """An integer over all d = q - k; None where it depends on more than that."""
    rest: list[tuple[tuple[Atom, ...], int]] = []
    total = np.zeros_like(d)
    for monomial, coefficient in value.terms:
        if len(monomial) == 1 and monomial[0].kind == "abs":
            inner = monomial[0].args[0]
            assert isinstance(inner, Int)
            values = _band_values(inner, d)
            if values is None:
                return None
            total = total + coefficient * np.abs(values)
        else:
            rest.append((monomial, coefficient))
    coefficients = _difference(Int(tuple(rest)))
    return None if coefficients is None else total + sum(c * d**n for n, c in enumerate(coefficients) if c)


def _holds_at(cond: Cond, d: np.ndarray) -> np.ndarray | None:
    """Where a condition holds, over all d = q - k; None where it depends on more than that."""
    if cond.kind in ("true", "false"):
        return np.full(d.shape, cond.kind == "true")
    if cond.kind in ("and", "or"):
        child_values = [held for c in children(cond) if (held := _holds_at(c, d)) is not None]
        if len(child_values) < len(children(cond)):
            return None
        stacked = np.stack(child_values)
        return np.asarray(stacked.all(0) if cond.kind == "and" else stacked.any(0))
    if cond.kind in ("le", "eq", "ne"):
        value = cond.args[0]
        assert isinstance(value, Int)
        values = _band_values(value, d)
        if values is None:
            return None
        return values <= 0 if cond.kind == "le" else values == 0 if cond.kind == "eq" else values != 0
    return None


def _reach(cond: Cond) -> int:
    """A bound on |d| beyond which the condition no longer changes."""
    if cond.kind in ("and", "or"):
        return max(_reach(c) for c in children(cond))
    value = cond.args[0] if cond.args else None
    return _int_reach(value) if isinstance(value, Int) else 0


def _int_reach(value: Int) -> int:
    """Beyond the sum of its coefficients, a polynomial has the sign of its leading term."""
    total = 1
    for monomial, coefficient in value.terms:
        size = abs(coefficient)
        for atom in monomial:
            if atom.kind == "abs" and isinstance(atom.args[0], Int):
                size *= _int_reach(atom.args[0])
        total += size
    return total


def _bands(cond: Cond) -> list[Node] | None:
    """The bands of a condition on q - k, to be joined by "or"; [] where it always holds, None where it is no such condition."""
    if _holds_at(cond, np.zeros(1, np.int64)) is None:
        return None
    reach = _reach(cond) + 2
    if reach > _WIDEST:
        return None
    d = np.arange(-reach, reach + 1, dtype=np.int64)
    held = _holds_at(cond, d)
    assert held is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[0], held.astype(np.int8), [0]])))
    bands = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        low = None if first == 0 else int(d[first])  # q - k >= low
        high = None if last == len(d) else int(d[last - 1])  # q - k <= high
        if low is None and high is None:
            return []
        bands.append(_band(low, high))
    return bands or [FALSE]


def _band(low: int | None, high: int | None) -> Node:
    """Low <= q - k <= high, in the spelling that reads best. One of the ends is given."""
    query, key = Name("q"), Name("k")
    if low is not None and high is not None and low == -high:
        return _at_most(Call("abs", (Binary("-", query, key),)), high) if high else Binary("==", query, key)
    sides = []
    if low is not None:
        sides.append(_put_in_order(key, query, low))
    if high is not None:
        sides.append(_put_in_order(query, key, -high))
    return join("and", sides)


def _put_in_order(first: Node, second: Node, distance: int) -> Node:
    """``first`` stands at least so far before ``second``."""
    if distance == 0:
        return Binary("<=", first, second)
    if distance < 0:
        return _at_most(Binary("-", first, second), -distance)
    return Binary("<=", first, Binary("-", second, Constant(distance)))


def _at_most(left: Node, most: int) -> Node:
    return Binary("<=", left, Constant(most))


def to_expression(cond: Cond, names: GraphNames) -> MaskExpression:
    """The expression of a condition on (b, h, q, k).

    Raises:
        UnsupportedError: for what the grammar cannot express, with the operators and inputs that it depends on.
    """
    return MaskExpression(_Translator(names).condition(cond))


def to_integer_expression(value: Int, names: GraphNames) -> MaskExpression:
    """The expression of an integer of (q, k) and sizes.

    Raises:
        UnsupportedError: as :func:`to_expression`.
    """
    return MaskExpression(_Translator(names, positions_first=True).integer(value))


class _Translator:
    def __init__(self, names: GraphNames, *, positions_first: bool = False) -> None:
        self.names = names
        self.positions_first = positions_first  # sums begin with q and k, not with sizes

    def condition(self, cond: Cond) -> Node:
        if cond in (terms.TRUE, terms.FALSE):
            return TRUE if cond == terms.TRUE else FALSE
        bands = _bands(cond)
        if bands is not None:
            return join("or", bands) if bands else TRUE
        match cond.kind:
            case "and" | "or":
                return self.junction(cond)
            case "le":
                return self.comparison(cond, "<=")
            case "eq":
                return self.comparison(cond, "==")
            case "ne":
                return self.not_equal(cond)
            case "read" | "unread":
                return self.truth(cond.args[0], cond.args[1], holds=cond.kind == "read")
            case "table" | "untable":
                lookup = self.table(cond.args[0], cond.args[1])
                return lookup if cond.kind == "table" else Unary("not", lookup)
        raise UnsupportedError(f"the mask depends on {_explain(cond)}")

    def junction(self, cond: Cond) -> Node:
        """An "and" or "or": the bands of all that depends on q - k together, then the rest by text."""
        unite = all_of if cond.kind == "and" else any_of
        d = np.zeros(1, np.int64)
        banded = [c for c in children(cond) if _holds_at(c, d) is not None]
        bands = _bands(unite(banded)) if banded else []
        if bands is None:  # too wide to be computed
            banded = []
        elif banded and not bands and cond.kind == "or":
            return TRUE
        conditions = sorted((self.condition(c) for c in children(cond) if c not in banded), key=print_node)
        if bands and cond.kind == "and":
            conditions.insert(0, join("or", bands))
        elif bands:
            conditions = [b for b in bands if b != FALSE] + conditions
        conditions.sort(key=_begins_with_padding)  # last: it is what a reader looks for least
        return join(cond.kind, conditions)

    def comparison(self, cond: Cond, symbol: str) -> Node:
        """An integer compared with 0, without negative terms: they stand on the other side."""
        value = cond.args[0]
        assert isinstance(value, Int)
        left = Int(tuple((m, c) for m, c in value.terms if c > 0 and m != ()))
        right = Int(tuple((m, -c) for m, c in value.terms if c < 0 and m != ()))
        if value.offset > 0:
            left = left + integer(value.offset)
        else:
            right = right + integer(-value.offset)
        return Binary(symbol, self.integer(left), self.integer(right))

    def not_equal(self, cond: Cond) -> Node:
        value = cond.args[0]
        assert isinstance(value, Int)
        atom = value.atom
        if atom is not None and atom.kind == "read":  # a 0/1 vector
            return self.truth(atom.args[0], atom.args[1], holds=True)
        return self.comparison(cond, "!=")

    def truth(self, tensor: object, indices: object, *, holds: bool) -> Node:
        """Whether an element of a vector is (not) 0."""
        lookup = self.read(tensor, indices, boolean=True)
        if not lookup.is_padding:
            return Binary("!=" if holds else "==", lookup, Constant(0))
        return lookup if holds else Unary("not", lookup)

    def integer(self, value: Int) -> Node:
        """A sum: positive terms first, the constant last."""
        total: Node | None = None
        for monomial, coefficient in sorted(value.terms, key=self.rank):
            factors = [self.atom(a) for a in monomial]
            if abs(coefficient) != 1 or not factors:
                factors.insert(0, Constant(abs(coefficient)))
            if total is None and coefficient < 0:
                factors[0] = negative(factors[0])
            product = reduce(lambda left, right: Binary("*", left, right), factors)
            total = product if total is None else Binary("-" if coefficient < 0 else "+", total, product)
        return Constant(0) if total is None else total

    def rank(self, term: tuple[tuple[Atom, ...], int]) -> tuple[bool, bool, bool, list[str]]:
        """The place of a term in a sum."""
        monomial, coefficient = term
        is_size = self.positions_first and all(a.kind == "size" for a in monomial)
        return not monomial, is_size, coefficient < 0, [a.key for a in monomial]

    def atom(self, atom: Atom) -> Node:
        match atom.kind:
            case "var":
                return Name(str(atom.args[0]))
            case "size":
                name = str(atom.args[0])
                if name not in self.names.sizes:
                    raise UnsupportedError(f"the mask depends on dimension {name!r}, which is neither S, T nor past")
                return Name(self.names.sizes[name])
            case "abs" | "min" | "max":
                return Call(atom.kind, tuple(self.integer(a) for a in atom.args if isinstance(a, Int)))
            case "div" | "mod":
                value, divisor = atom.args
                if isinstance(value, Int) and isinstance(divisor, int):
                    return Binary("//" if atom.kind == "div" else "%", self.integer(value), Constant(divisor))
            case "read":
                return self.read(atom.args[0], atom.args[1], boolean=False)
            case "table":
                return self.table(atom.args[0], atom.args[1])
        raise UnsupportedError(f"the mask depends on {_explain(atom)}")

    def read(self, tensor: object, indices: object, *, boolean: bool) -> Lookup:
        """An element of a run-time vector."""
        assert isinstance(tensor, str)
        assert isinstance(indices, tuple)
        role, axis = self.names.operand(tensor, indices, boolean)
        positions = () if axis is None else (self.integer(indices[axis]),)
        return Lookup(role, (Name("b"), *positions))

    def table(self, tensor: object, indices: object) -> Lookup:
        """An element of a constant, without its axes of size 1."""
        assert isinstance(tensor, str)
        assert isinstance(indices, tuple)
        array = self.names.constant(tensor)
        axes = [a for a, n in enumerate(array.shape) if n != 1]
        name = self.names.table(np.ascontiguousarray(array.reshape([array.shape[a] for a in axes])))
        return Lookup(name, tuple(self.integer(indices[a]) for a in axes))


def _begins_with_padding(node: Node) -> bool:
    """Whether the first word of a condition's text reads the padding."""
    while isinstance(node, Binary) and node.left.precedence >= node.precedence:
        node = node.left
    return isinstance(node, Lookup) and node.is_padding


def _explain(value: object) -> str:
    """A phrase about a value that no expression has: its operators without a rule, and the model inputs that they read."""
    operators, inputs = list[str](), list[str]()
    _collect(value, operators, inputs)
    what = " and ".join(dict.fromkeys(operators)) or str(value)[:100]
    behind = " and ".join(repr(i) for i in dict.fromkeys(inputs))
    return f"{what}{' of ' + behind if behind else ''}, of which no expression is known"


_OPERATORS = {
    "eq": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
    "test": "a cast to bool",
    "trunc": "a cast to integer",
    "division": "Div",
    "modulo": "Mod",
    "remainder": "Mod",
    "rounded": "a cast to a float type that does not hold every integer",
}


def _collect(value: object, operators: list[str], inputs: list[str]) -> None:
    if isinstance(value, Cond | Atom | Real):
        if value.kind in ("read", "unread") and value.args and isinstance(value.args[0], str):
            inputs.append(value.args[0])
            return
        if value.kind in ("opaque", "unopaque") and value.args and isinstance(value.args[0], str):
            operators.append(_OPERATORS.get(value.args[0], value.args[0]))
        if value.kind in _OPERATORS and not isinstance(value, Cond):
            operators.append(_OPERATORS[value.kind])
        for arg in value.args:
            _collect(arg, operators, inputs)
    elif isinstance(value, Int):
        for atom in sorted(value.atoms(), key=lambda a: a.key):
            _collect(atom, operators, inputs)
    elif isinstance(value, tuple):
        for arg in value:
            _collect(arg, operators, inputs)
