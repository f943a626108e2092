# SPDX-License-Identifier: Apache-2.0
"""The nodes of a mask expression, and the two ways to walk them: in order, and folded to one value.

Both walks are iterative. A text of 4096 nodes may be one long sum, deeper than Python's stack.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

T = TypeVar("T")

INDICES = ("b", "h", "q", "k")
SIZES = ("S", "T", "P")
VECTORS = ("pad", "segment_q", "segment_k", "lengths")  # run-time operands
COMPARISONS = ("<=", ">=", "==", "!=", "<", ">")
FUNCTIONS = {"abs": 1, "min": 2, "max": 2}  # name -> number of arguments

# Operator precedence; an operand that binds less than its place asks for stands in parentheses.
OR, AND, NOT, COMPARE, SUM, PRODUCT, UNARY, ATOM = range(8)
PRECEDENCE = {
    **{"or": OR, "and": AND, "+": SUM, "-": SUM, "*": PRODUCT, "//": PRODUCT, "%": PRODUCT},
    **dict.fromkeys(COMPARISONS, COMPARE),
}


@dataclass(frozen=True)
class Node:
    """A part of an expression. ``precedence`` is that of its operator."""

    @property
    def children(self) -> tuple[Node, ...]:
        """The parts that it is made of, left to right."""
        return ()

    @property
    def precedence(self) -> int:
        """The precedence; that of an atom is the highest."""
        return ATOM


@dataclass(frozen=True)
class Constant(Node):
    """An integer."""

    value: int

    @property
    def precedence(self) -> int:
        """That of ``-`` where it is negative."""
        return ATOM if self.value >= 0 else UNARY


@dataclass(frozen=True)
class Truth(Node):
    """``True`` or ``False``."""

    value: bool


@dataclass(frozen=True)
class Name(Node):
    """An index (``b``, ``h``, ``q``, ``k``) or a size (``S``, ``T``, ``P``)."""

    name: str


@dataclass(frozen=True)
class Unary(Node):
    """``not`` of a condition, or ``-`` of an integer that is no constant."""

    symbol: str
    operand: Node

    @property
    def children(self) -> tuple[Node, ...]:
        """The operand."""
        return (self.operand,)

    @property
    def precedence(self) -> int:
        """That of the symbol."""
        return NOT if self.symbol == "not" else UNARY


@dataclass(frozen=True)
class Binary(Node):
    """An arithmetic operator, a comparison, ``and`` or ``or``."""

    symbol: str
    left: Node
    right: Node

    @property
    def children(self) -> tuple[Node, ...]:
        """Both operands."""
        return (self.left, self.right)

    @property
    def precedence(self) -> int:
        """That of the symbol."""
        return PRECEDENCE[self.symbol]


@dataclass(frozen=True)
class Call(Node):
    """``abs``, ``min`` or ``max``."""

    name: str
    arguments: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        """The arguments."""
        return self.arguments


@dataclass(frozen=True)
class Lookup(Node):
    """An element of a run-time vector or of a table."""

    name: str
    indices: tuple[Node, ...]

    @property
    def children(self) -> tuple[Node, ...]:
        """The indices."""
        return self.indices

    @property
    def is_table(self) -> bool:
        """Whether it reads a constant table."""
        return is_table_name(self.name)

    @property
    def is_padding(self) -> bool:
        """Whether it reads the key padding mask."""
        return self.name == "pad"


TRUE, FALSE = Truth(True), Truth(False)
B, H, Q, K = (Name(n) for n in INDICES)


def is_table_name(name: str) -> bool:
    """Whether a name is ``table0``, ``table1``, ..."""
    digits = name.removeprefix("table")
    return digits != name and digits.isascii() and digits.isdigit()


def reads_runtime(node: Node) -> bool:
    """Whether a node reads a run-time operand."""
    return any(isinstance(n, Lookup) and not n.is_table for n in in_order(node))


def negative(node: Node) -> Node:
    """The negative of an integer. Of a constant it is a constant, so that it can be a divisor."""
    return Constant(-node.value) if isinstance(node, Constant) else Unary("-", node)


def join(symbol: str, conditions: Iterable[Node]) -> Node:
    """Conditions joined by ``and`` or ``or``, without nesting of the same symbol. There is at least one."""
    flat = [part for condition in conditions for part in operands_of(symbol, condition)]
    return reduce(lambda left, right: Binary(symbol, left, right), flat)


def operands_of(symbol: str, node: Node) -> list[Node]:
    """What a chain of one binary operator joins, left to right; the node alone where it is no such chain."""
    operands: list[Node] = []
    pending = [node]
    while pending:
        part = pending.pop()
        if isinstance(part, Binary) and part.symbol == symbol:
            pending += (part.right, part.left)
        else:
            operands.append(part)
    return operands


def in_order(root: Node, is_leaf: Callable[[Node], bool] = lambda _: False) -> list[Node]:
    """All nodes, children before their parents. Below nodes that ``is_leaf`` accepts nothing is visited."""
    nodes: list[Node] = []
    pending = [root]
    while pending:
        node = pending.pop()
        nodes.append(node)
        if not is_leaf(node):
            pending += node.children
    return nodes[::-1]


def fold(root: Node, combine: Callable[[Node, Sequence[T]], T], is_leaf: Callable[[Node], bool] = lambda _: False) -> T:
    """The value of the root. ``combine`` makes the value of a node from those of its children.

    Nodes that ``is_leaf`` accepts get no values of children.
    """
    values: list[T] = []
    for node in in_order(root, is_leaf):
        start = len(values) - (0 if is_leaf(node) else len(node.children))
        values[start:] = [combine(node, values[start:])]
    return values[0]


def print_node(root: Node) -> str:
    """The text of a node, with no more parentheses than needed, as the library prints it."""
    return fold(root, _print)


def _print(node: Node, texts: Sequence[str]) -> str:
    match node:
        case Constant() | Truth():
            return str(node.value)
        case Name():
            return node.name
        case Unary(symbol="not"):
            return f"not {_within(node.operand, texts[0], NOT)}"
        case Unary():
            return f"-{_within(node.operand, texts[0], ATOM)}"
        case Binary():
            # Operators associate to the left; comparisons do not chain.
            left = _within(node.left, texts[0], SUM if node.precedence == COMPARE else node.precedence)
            return f"{left} {node.symbol} {_within(node.right, texts[1], node.precedence + 1)}"
        case Call():
            return f"{node.name}({_list(node, texts)})"
        case Lookup():
            return f"{node.name}[{_list(node, texts)}]"
    raise AssertionError(node)


def _within(node: Node, text: str, precedence: int) -> str:
    return text if node.precedence >= precedence else f"({text})"


def _list(node: Call | Lookup, texts: Sequence[str]) -> str:
    return ", ".join(_within(child, text, SUM) for child, text in zip(node.children, texts, strict=True))
