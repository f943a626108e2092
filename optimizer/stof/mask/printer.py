# SPDX-License-Identifier: Apache-2.0
"""Conditions of the interpreter as text of docs/reference/mask-format.md, in a canonical form.

Whatever depends on ``q - k`` alone is a set of integers; it is computed as one and printed as the fewest bands, so that
equal windows of different exporters print equally.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from stof.errors import UnsupportedError
from stof.symbolic.algebra.conditions import all_of, any_of, children, less_equal
from stof.symbolic.algebra.terms import FALSE, TRUE, Atom, Cond, Int, Real, integer, var

_WIDEST = 1 << 20  # largest constant in a band that is recognized as one
_DEGREE = 2  # of a polynomial in q - k: its values stay below 2^63
Q, K, B, H = var("q"), var("k"), var("b"), var("h")
_ROW, _COLUMN = Atom("var", ("q",)), Atom("var", ("k",))


@dataclass
class Names:
    """How sizes and reads of a graph are called in the expression. Filled while printing."""

    sizes: dict[str, str]  # dimension name -> S, T or P
    # (tensor, indices, boolean) -> role, axis of positions
    operand: Callable[[str, tuple[Int, ...], bool], tuple[str, int | None]]
    constant: Callable[[str], np.ndarray]  # array of a constant tensor
    tables: dict[str, np.ndarray] = field(default_factory=dict)  # table name -> array

    def table(self, array: np.ndarray) -> str:
        """The table name of an array; equal arrays share one."""
        for name, known in self.tables.items():
            if known.dtype == array.dtype and known.shape == array.shape and np.array_equal(known, array):
                return name
        name = f"table{len(self.tables)}"
        self.tables[name] = array
        return name


def _difference(value: Int) -> list[int] | None:
    """The coefficients of a polynomial in q - k, the constant first; None where it is none or of a high degree."""
    found = [0] * (_DEGREE + 1)
    others: Counter[tuple[int, int]] = Counter()
    for monomial, coefficient in value.terms:
        rows, columns = monomial.count(_ROW), monomial.count(_COLUMN)
        if rows + columns < len(monomial) or len(monomial) > _DEGREE:
            return None
        for power in range(rows + 1):  # q ** n * k ** m with q = k + d
            times = coefficient * math.comb(rows, power)
            if rows + columns == power:
                found[power] += times
            else:
                others[power, rows + columns - power] += times
    return None if any(others.values()) else found


def _band_values(value: Int, d: np.ndarray) -> np.ndarray | None:
    """An integer over all d = q - k, when it is a function of d."""
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
    found = _difference(Int(tuple(rest)))
    return None if found is None else total + sum(c * d**n for n, c in enumerate(found) if c)


def _band(cond: Cond, d: np.ndarray) -> np.ndarray | None:
    """A condition over all d, when it is a function of d alone."""
    if cond.kind in ("true", "false"):
        return np.full(d.shape, cond.kind == "true")
    if cond.kind in ("and", "or"):
        parts = [_band(c, d) for c in children(cond)]
        if any(p is None for p in parts):
            return None
        known = [p for p in parts if p is not None]
        stacked = np.stack(known)
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


def _bands_text(cond: Cond) -> list[str] | None:
    """The bands of a condition on q - k as texts to be joined by "or"; [] when it always holds."""
    if _band(cond, np.zeros(1, np.int64)) is None:
        return None
    reach = _reach(cond) + 2
    if reach > _WIDEST:
        return None
    d = np.arange(-reach, reach + 1, dtype=np.int64)
    held = _band(cond, d)
    assert held is not None
    edges = np.flatnonzero(np.diff(np.concatenate([[0], held.astype(np.int8), [0]])))
    texts = []
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        low = None if first == 0 else int(d[first])  # q - k >= low
        high = None if last == len(d) else int(d[last - 1])  # q - k <= high
        if low is None and high is None:
            return []
        texts.append(_band_text(low, high))
    return texts or ["False"]


def _band_text(low: int | None, high: int | None) -> str:
    if low is not None and high is not None and low == -high:
        return f"abs(q - k) <= {high}" if high else "q == k"
    parts = []
    if low is not None:
        parts.append("k <= q" if low == 0 else f"k - q <= {-low}" if low < 0 else f"k <= q - {low}")
    if high is not None:
        parts.append("q <= k" if high == 0 else f"q - k <= {high}" if high > 0 else f"q <= k - {-high}")
    return " and ".join(parts)


def print_condition(cond: Cond, names: Names) -> str:
    """The expression's text; empty when it always holds."""
    return "" if cond == TRUE else _Printer(names).condition(cond)[0]


class _Printer:
    """Texts with their binding strength: 0 or, 1 and, 2 not, 3 comparison, 4 sum, 5 product, 6 unary, 7 atom."""

    def __init__(self, names: Names) -> None:
        self.names = names

    def condition(self, cond: Cond) -> tuple[str, int]:
        if cond == TRUE:
            return "True", 7
        if cond == FALSE:
            return "False", 7
        bands = _bands_text(cond)
        if bands is not None:
            return _join(" or ", 0, [(t, 1 if " and " in t else 3) for t in bands]) if bands else ("True", 7)
        if cond.kind in ("and", "or"):
            return self._junction(cond)
        match cond.kind:
            case "le":
                return self._comparison(cond, "<=")
            case "eq":
                return self._comparison(cond, "==")
            case "ne":
                return self._not_equal(cond)
            case "read" | "unread":
                return self._truth(cond.args[0], cond.args[1], holds=cond.kind == "read")
            case "table" | "untable":
                text = self._table(cond.args[0], cond.args[1])
                return (text, 7) if cond.kind == "table" else (f"not {text}", 2)
        raise UnsupportedError(f"the mask depends on {_words(cond)}")

    def _junction(self, cond: Cond) -> tuple[str, int]:
        join = all_of if cond.kind == "and" else any_of
        d = np.zeros(1, np.int64)
        banded = [c for c in children(cond) if _band(c, d) is not None]
        others = [c for c in children(cond) if _band(c, d) is None]
        texts = sorted(self.condition(c) for c in others)
        if banded:
            merged = join(banded)
            bands = _bands_text(merged)
            if bands is None:
                texts = sorted(self.condition(c) for c in children(cond))
            elif bands == [] and cond.kind == "or":
                return "True", 7
            elif bands and cond.kind == "and":
                texts.insert(0, _join(" or ", 0, [(t, 1 if " and " in t else 3) for t in bands]))
            elif bands:
                texts = [(t, 1 if " and " in t else 3) for t in bands if t != "False"] + texts
        # Padding last: it is what a reader looks for least.
        texts.sort(key=lambda t: t[0].startswith("pad["))
        return _join(f" {cond.kind} ", 1 if cond.kind == "and" else 0, texts)

    def _comparison(self, cond: Cond, symbol: str) -> tuple[str, int]:
        value = cond.args[0]
        assert isinstance(value, Int)
        left = Int(tuple((m, c) for m, c in value.terms if c > 0 and m != ()))
        right = Int(tuple((m, -c) for m, c in value.terms if c < 0 and m != ()))
        if value.offset > 0:
            left = left + integer(value.offset)
        else:
            right = right + integer(-value.offset)
        return f"{self.integer(left)[0]} {symbol} {self.integer(right)[0]}", 3

    def _not_equal(self, cond: Cond) -> tuple[str, int]:
        value = cond.args[0]
        assert isinstance(value, Int)
        atom = value.atom
        if atom is not None and atom.kind == "read":  # a 0/1 vector
            return self._truth(atom.args[0], atom.args[1], holds=True)
        return self._comparison(cond, "!=")

    def _truth(self, tensor: object, indices: object, *, holds: bool) -> tuple[str, int]:
        text = self._read(tensor, indices, boolean=True)
        if not text.startswith("pad"):
            return f"{text} {'!=' if holds else '=='} 0", 3
        return (text, 7) if holds else (f"not {text}", 2)

    def integer(self, value: Int) -> tuple[str, int]:
        if not value.terms:
            return "0", 7
        terms = sorted(value.terms, key=lambda t: (t[0] == (), t[1] < 0, [a.key for a in t[0]]))
        text = ""
        for monomial, coefficient in terms:
            size = abs(coefficient)
            factors = [self.atom(a) for a in monomial]
            if size != 1 or not factors:
                factors.insert(0, (str(size), 7))
            body = " * ".join(t if level >= 6 or len(factors) == 1 else f"({t})" for t, level in factors)
            if len(factors) == 1 and factors[0][1] < 5:
                body = f"({body})"
            sign = "-" if coefficient < 0 else "+"
            text += f" {sign} {body}" if text else (f"-{body}" if sign == "-" else body)
        return text, 4 if len(terms) > 1 or terms[0][1] < 0 else 5 if " " in text else 7

    def atom(self, atom: Atom) -> tuple[str, int]:
        match atom.kind:
            case "var":
                return str(atom.args[0]), 7
            case "size":
                name = str(atom.args[0])
                if name not in self.names.sizes:
                    raise UnsupportedError(f"the mask depends on dimension {name!r}, which is neither S, T nor past")
                return self.names.sizes[name], 7
            case "abs" | "min" | "max":
                inner = ", ".join(self.integer(a)[0] for a in atom.args if isinstance(a, Int))
                return f"{atom.kind}({inner})", 7
            case "div" | "mod":
                value, divisor = atom.args
                assert isinstance(value, Int)
                text, level = self.integer(value)
                symbol = "//" if atom.kind == "div" else "%"
                return f"{text if level >= 5 else f'({text})'} {symbol} {divisor}", 5
            case "read":
                return self._read(atom.args[0], atom.args[1], boolean=False), 7
            case "table":
                return self._table(atom.args[0], atom.args[1]), 7
        raise UnsupportedError(f"the mask depends on {_words(atom)}")

    def _read(self, tensor: object, indices: object, *, boolean: bool) -> str:
        assert isinstance(tensor, str)
        assert isinstance(indices, tuple)
        role, place = self.names.operand(tensor, indices, boolean)
        return f"{role}[b]" if place is None else f"{role}[b, {self.integer(indices[place])[0]}]"

    def _table(self, tensor: object, indices: object) -> str:
        assert isinstance(tensor, str)
        assert isinstance(indices, tuple)
        array = self.names.constant(tensor)
        axes = [a for a, n in enumerate(array.shape) if n != 1]
        name = self.names.table(np.ascontiguousarray(array.reshape([array.shape[a] for a in axes])))
        return f"{name}[{', '.join(self.integer(indices[a])[0] for a in axes)}]"


def _join(joint: str, level: int, texts: Iterable[tuple[str, int]]) -> tuple[str, int]:
    found = list(texts)
    if len(found) == 1:
        return found[0]
    return joint.join(t if own > level or (own == level and level == 1) else f"({t})" for t, own in found), level


def _words(value: object) -> str:
    """What could not be printed, for people: the operators in the way and the model inputs behind them."""
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


def band_condition(low: int | None, high: int | None) -> Cond:
    """Low <= q - k <= high."""
    parts = []
    if low is not None:
        parts.append(less_equal(integer(low), Q - K))
    if high is not None:
        parts.append(less_equal(Q - K, integer(high)))
    return all_of(parts)
