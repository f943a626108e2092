# SPDX-License-Identifier: Apache-2.0
"""The parser of mask expressions (docs/reference/mask-format.md): it takes the texts that the library's parser takes.

The text may come from a file or a command line that nobody vouches for. Every limit is checked before memory or stack is spent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from stof.errors import ModelError
from stof.mask.expression_nodes import (
    AND,
    COMPARE,
    COMPARISONS,
    FUNCTIONS,
    INDICES,
    NOT,
    OR,
    PRECEDENCE,
    PRODUCT,
    SIZES,
    SUM,
    TRUE,
    Binary,
    Call,
    Constant,
    Lookup,
    Name,
    Node,
    Truth,
    Unary,
    is_table_name,
    negative,
)

MAX_DEPTH = 64
MAX_NODES = 4096
MAX_TEXT = 65536
MAX_CONSTANT = 1 << 53
MAX_RANK = 4  # of a table

_BLANKS = " \t"
_DIGITS = frozenset("0123456789")
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
_WORD = _LETTERS | _DIGITS | {"_"}
_SYMBOLS = (*COMPARISONS, "//", "%", "*", "+", "-", "and", "or")  # longer ones before their beginnings


class MaskSyntaxError(ModelError):
    """A text that is no mask expression; names the column and what was expected there."""


@dataclass(frozen=True)
class _Operand:
    """The type of what is looked up: a condition or an integer, None while that is not known."""

    rank: int
    is_condition: bool | None


_VECTORS = {
    "pad": _Operand(2, True),
    "segment_q": _Operand(2, False),
    "segment_k": _Operand(2, False),
    "lengths": _Operand(1, False),
}


def parse_nodes(text: str, tables: Mapping[str, np.ndarray] | None = None, *, is_condition: bool = True) -> Node:
    """The root of a condition, or of an integer. Blank text means True, and is no integer.

    ``tables`` are the constants that it may look up. Without them every table is allowed, with one rank and one type throughout.

    Raises:
        MaskSyntaxError: with the column at fault.
    """
    if len(text.encode(errors="replace")) > MAX_TEXT:
        size = len(text.encode(errors="replace"))
        raise MaskSyntaxError(f"mask expression of {size} bytes, expected at most {MAX_TEXT}")
    return _Parser(text, tables).parse(is_condition) if text.strip(_BLANKS) or not is_condition else TRUE


class _Parser:
    """Precedence climbing. It recurses for parentheses, calls, look-ups, ``not`` and ``-`` only, which ``enter`` counts."""

    def __init__(self, text: str, tables: Mapping[str, np.ndarray] | None) -> None:
        self.text = text
        self.at = 0
        self.depth = 0
        self.nodes = 0
        self.operands = dict(_VECTORS)
        self.takes_any_table = tables is None
        for name, table in (tables or {}).items():
            if not is_table_name(name):
                continue
            self.operands[name] = _Operand(table.ndim, table.dtype == np.bool_)

    def parse(self, is_condition: bool) -> Node:
        root = self.expression(OR)
        self.skip()
        if self.at < len(self.text):
            self.fail(f"unexpected {self.text[self.at : self.at + 8]!r}")
        found, wanted = ("an integer", "a condition") if is_condition else ("a condition", "an integer")
        self.expect(root, f"the expression is {found}, expected {wanted}", is_condition=is_condition)
        return root

    def fail(self, message: str) -> NoReturn:
        raise MaskSyntaxError(f"mask expression, column {self.at + 1}: {message}")

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at] in _BLANKS:
            self.at += 1

    def take(self, token: str) -> bool:
        """Reads a token where it is the next one. A word ends where no letter, digit or underscore follows."""
        self.skip()
        end = self.at + len(token)
        if not self.text.startswith(token, self.at):
            return False
        if token[0] in _LETTERS and self.text[end : end + 1] in _WORD:
            return False
        self.at = end
        return True

    def expect_token(self, token: str, after: str = "") -> None:
        if not self.take(token):
            self.fail(f"expected {token!r}{' after ' + after if after else ''}")

    def enter(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"nested deeper than {MAX_DEPTH}")

    def leave(self) -> None:
        self.depth -= 1

    def add(self, node: Node) -> Node:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            self.fail(f"more than {MAX_NODES} nodes")
        return node

    def expect(self, node: Node, message: str, *, is_condition: bool) -> None:
        """Refuses a node of the other type. A table of unknown type gets the type of its first place."""
        node_is_condition = self.is_condition(node)
        if node_is_condition is None and isinstance(node, Lookup):
            self.operands[node.name] = _Operand(self.operands[node.name].rank, is_condition)
        elif node_is_condition is not is_condition:
            self.fail(message)

    def is_condition(self, node: Node) -> bool | None:
        match node:
            case Lookup():
                return self.operands[node.name].is_condition
            case Binary():
                return node.precedence <= COMPARE
            case Unary():
                return node.symbol == "not"
        return isinstance(node, Truth)

    def expression(self, lowest: int) -> Node:
        """What operators of a precedence of at least ``lowest`` make."""
        # The highest operator that may follow: what binds more was read with an operand.
        if lowest <= NOT and self.take("not"):
            self.enter()
            left, highest = self.negation(), AND
            self.leave()
        else:
            left, highest = self.unary(), PRODUCT
        while (symbol := self.operator(lowest, highest)) is not None:
            precedence = PRECEDENCE[symbol]
            right = self.divisor() if symbol in ("//", "%") else self.operand(precedence)
            left = self.binary(symbol, left, right)
            highest = AND if precedence == COMPARE else precedence  # comparisons do not chain
        return left

    def operator(self, lowest: int, highest: int) -> str | None:
        """Reads a binary operator of a precedence in this range."""
        return next((s for s in _SYMBOLS if lowest <= PRECEDENCE[s] <= highest and self.take(s)), None)

    def operand(self, precedence: int) -> Node:
        """The right operand of an operator."""
        return self.unary() if precedence == PRODUCT else self.expression(precedence + 1)

    def binary(self, symbol: str, left: Node, right: Node) -> Node:
        wants_condition = PRECEDENCE[symbol] < COMPARE
        actual_kind, wanted = ("an integer", "a condition") if wants_condition else ("a condition", "an integer")
        for side in (left, right):
            self.expect(side, f"{actual_kind} where {wanted} is expected", is_condition=wants_condition)
        return self.add(Binary(symbol, left, right))

    def divisor(self) -> Node:
        node = self.unary()
        if not isinstance(node, Constant) or node.value == 0:
            self.fail("a divisor must be a non-zero integer constant")
        return node

    def negation(self) -> Node:
        operand = self.expression(NOT)
        self.expect(operand, "'not' of an integer", is_condition=True)
        return self.add(Unary("not", operand))

    def unary(self) -> Node:
        if not self.take("-"):
            return self.atom()
        self.enter()
        operand = self.unary()
        self.leave()
        self.expect(operand, "'-' of a condition", is_condition=False)
        negation = negative(operand)
        return negation if isinstance(negation, Constant) else self.add(negation)

    def atom(self) -> Node:
        self.skip()
        if self.at >= len(self.text):
            self.fail("unexpected end")
        first = self.text[self.at]
        if first in _DIGITS:
            return self.number()
        if self.take("("):
            self.enter()
            node = self.expression(OR)
            self.expect_token(")")
            self.leave()
            return node
        if first not in _LETTERS:
            self.fail(f"unexpected {first!r}")
        return self.named_atom(self.word(_WORD))

    def word(self, characters: frozenset[str]) -> str:
        begin = self.at
        while self.at < len(self.text) and self.text[self.at] in characters:
            self.at += 1
        return self.text[begin : self.at]

    def number(self) -> Node:
        digits = self.word(_DIGITS).lstrip("0") or "0"
        if len(digits) > len(str(MAX_CONSTANT)) or int(digits) > MAX_CONSTANT:
            self.fail("a constant beyond 2^53")
        return self.add(Constant(int(digits)))

    def named_atom(self, name: str) -> Node:
        if name in ("True", "False"):
            return self.add(Truth(name == "True"))
        if name in INDICES or name in SIZES:
            return self.add(Name(name))
        return self.call(name) if name in FUNCTIONS else self.lookup(name)

    def call(self, name: str) -> Node:
        self.enter()
        self.expect_token("(", name)
        arguments = []
        for number in range(FUNCTIONS[name]):
            if number:
                self.expect_token(",")
            arguments.append(self.integer(f"{name} of a condition"))
        self.expect_token(")")
        self.leave()
        return self.add(Call(name, tuple(arguments)))

    def integer(self, message: str) -> Node:
        node = self.expression(SUM)
        self.expect(node, message, is_condition=False)
        return node

    def lookup(self, name: str) -> Node:
        operand = self.operands.get(name)
        if operand is None and not is_table_name(name):
            self.fail(f"unknown name {name[:32]!r}")
        if operand is None and not self.takes_any_table:
            self.fail(f"{name} is not among the given tables")
        self.enter()
        self.expect_token("[", name)
        indices = [self.integer(f"an index of {name} is a condition")]
        while self.take(","):
            if len(indices) == MAX_RANK:
                self.fail(f"{name} has more than {MAX_RANK} indices")
            indices.append(self.integer(f"an index of {name} is a condition"))
        self.expect_token("]")
        self.leave()
        # An index may look the same table up.
        bound_operand = self.operands.setdefault(name, _Operand(len(indices), None))
        if len(indices) != bound_operand.rank:
            self.fail(f"{name} has {len(indices)} indices, expected {bound_operand.rank}")
        return self.add(Lookup(name, tuple(indices)))
