# SPDX-License-Identifier: Apache-2.0
"""Mask expressions (docs/reference/mask-format.md) as values: which queries attend to which keys.

A text is parsed once, where it enters: from a command line, a plan or an attribute. It is printed where it leaves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from stof.graph.node_builder import Builder
from stof.mask.expression_nodes import (
    TRUE,
    VECTORS,
    B,
    Binary,
    Call,
    Constant,
    H,
    K,
    Lookup,
    Name,
    Node,
    Q,
    Truth,
    Unary,
    fold,
    in_order,
    is_table_name,
    join,
    negative,
    operands_of,
    print_node,
    reads_runtime,
)
from stof.mask.expression_parser import parse_nodes
from stof.mask.to_onnx import ScoreSizes, emit_mask


@dataclass(frozen=True, eq=False, repr=False)
class MaskExpression:
    """A condition on (batch b, head h, query q, key k) that says whether the pair may attend.

    Two expressions are equal when they print the same text.
    """

    root: Node = TRUE

    @classmethod
    def parse(cls, text: str, tables: Mapping[str, np.ndarray] | None = None) -> MaskExpression:
        """An expression from its text; blank text allows every pair.

        ``tables`` are the constants that it may look up. Without them it may look up any, of one rank and type each.

        Raises:
            MaskSyntaxError: with the column at fault.
        """
        return cls(parse_nodes(text, tables))

    @classmethod
    def parse_integer(cls, text: str, tables: Mapping[str, np.ndarray] | None = None) -> MaskExpression:
        """An integer expression from its text, as attribute ``relative_index`` has it.

        Raises:
            MaskSyntaxError: with the column at fault; blank text is none.
        """
        return cls(parse_nodes(text, tables, is_condition=False))

    @cached_property
    def text(self) -> str:
        """The canonical text, as attributes and plans hold it; empty where every pair is allowed."""
        return "" if self.allows_all else print_node(self.root)

    def __str__(self) -> str:
        """The text for people: "True" where every pair is allowed."""
        return self.text or "True"

    def __repr__(self) -> str:
        return f"MaskExpression({self.text!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MaskExpression) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    @property
    def allows_all(self) -> bool:
        """Whether it is ``True``."""
        return self.root == TRUE

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, children before their parents."""
        return tuple(in_order(self.root))

    @property
    def node_count(self) -> int:
        """How many nodes the library has of it."""
        return len(self.nodes)

    @cached_property
    def reads(self) -> frozenset[str]:
        """The names that it reads: indices, sizes, run-time operands and tables."""
        return frozenset(n.name for n in self.nodes if isinstance(n, Name | Lookup))

    @property
    def vectors(self) -> frozenset[str]:
        """The run-time operands that it reads."""
        return self.reads & frozenset(VECTORS)

    @property
    def tables(self) -> frozenset[str]:
        """The tables that it reads."""
        return frozenset(n for n in self.reads if is_table_name(n))

    @cached_property
    def literals(self) -> frozenset[int]:
        """The absolute values of its constants."""
        return frozenset(abs(n.value) for n in self.nodes if isinstance(n, Constant))

    @cached_property
    def conjuncts(self) -> tuple[Node, ...]:
        """The conditions that its top-level ``and`` joins; none where every pair is allowed."""
        return tuple(n for n in operands_of("and", self.root) if n != TRUE)

    @property
    def forbids_padding(self) -> bool:
        """Whether it reads ``not pad[...]``: the padding is true where a key is none."""
        return any(isinstance(n, Unary) and isinstance(n.operand, Lookup) and n.operand.is_padding for n in self.nodes)

    def indexes_table(self, operand: str) -> bool:
        """Whether a run-time operand is part of an index of a table."""
        return any(
            isinstance(n, Lookup)
            and n.is_table
            and any(isinstance(i, Lookup) and i.name == operand for i in in_order(n))
            for n in self.nodes
        )

    def __and__(self, other: MaskExpression) -> MaskExpression:
        """The pairs that both allow."""
        return _all_of((*self.conjuncts, *other.conjuncts))

    def window(self) -> tuple[int, int] | None:
        """(left_window_size, right_window_size) in the terms of ONNX Attention-25, -1 for unbounded; None if no window.

        Padding does not count.
        """
        left: int | None = None
        right: int | None = None
        for condition in self.conjuncts:
            if isinstance(condition, Lookup) and condition.is_padding:
                continue
            reach = _reach(condition)
            if reach is None:
                return None
            left, right = _smaller(left, reach[0]), _smaller(right, reach[1])
        return -1 if left is None else left, -1 if right is None else right

    def static_part(self) -> MaskExpression:
        """A condition without run-time operands that allows whatever this one allows for some values of them."""

        def combine(node: Node, sides: Sequence[Node]) -> Node:
            if isinstance(node, Binary) and not is_leaf(node):
                return _simplify(node.symbol, *sides)
            return TRUE if reads_runtime(node) else node

        def is_leaf(node: Node) -> bool:
            return not (isinstance(node, Binary) and node.symbol in ("and", "or"))

        return MaskExpression(fold(self.root, combine, is_leaf))

    def without_padding(self) -> MaskExpression:
        """The expression without the conjuncts ``pad[...]`` and ``not pad[...]``."""

        def is_padding(node: Node) -> bool:
            read = node.operand if isinstance(node, Unary) else node
            return isinstance(read, Lookup) and read.is_padding

        return _all_of(n for n in self.conjuncts if not is_padding(n))

    def substitute(self, values: Mapping[str, Node]) -> MaskExpression:
        """The expression with integers in the place of indices and sizes, by their names."""

        def combine(node: Node, children: Sequence[Node]) -> Node:
            return values.get(node.name, node) if isinstance(node, Name) else rebuild(node, children)

        return MaskExpression(fold(self.root, combine))

    def with_lengths(self, count: int) -> MaskExpression:
        """The expression with a number in the place of ``lengths[b]``."""

        def combine(node: Node, children: Sequence[Node]) -> Node:
            return Constant(count) if isinstance(node, Lookup) and node.name == "lengths" else rebuild(node, children)

        return MaskExpression(fold(self.root, combine))

    def evaluate(self, values: Mapping[str, Any]) -> Any:
        """The condition for index arrays, sizes and operands by name; the result broadcasts as the arrays do.

        Arrays are NumPy's; ``pad`` and boolean tables hold booleans. Table indices must be in range.
        """
        wide = {n: v.astype(np.int64) if getattr(v, "dtype", np.bool_) != np.bool_ else v for n, v in values.items()}
        return self.as_function(wide)(*(wide.get(n) for n in ("b", "h", "q", "k")))

    def as_function(self, values: Mapping[str, Any]) -> Callable[[Any, Any, Any, Any], Any]:
        """The expression as a function of (b, h, q, k), for sizes and operands by name.

        It uses operators and subscripts only, so the arrays may be those of any library, or traced. ``values`` may also name
        ``abs``, ``min`` and ``max`` of that library; by default they are Python's and NumPy's.
        """
        program = [(len(n.children), _operation(n)) for n in self.nodes]
        namespace = {"abs": abs, "min": np.minimum, "max": np.maximum, **values}

        def allows(b: Any, h: Any, q: Any, k: Any) -> Any:
            names = {**namespace, "b": b, "h": h, "q": q, "k": k}
            stack: list[Any] = []
            for count, operation in program:
                arguments = [stack.pop() for _ in range(count)][::-1]
                stack.append(operation(names, *arguments))
            return stack[0]

        return allows

    def to_onnx(
        self, builder: Builder, sizes: ScoreSizes, operands: Mapping[str, str], *, tables_have_rank: bool = False
    ) -> str:
        """Nodes that compute the mask as booleans that broadcast to [B, H, S, T]; returns the tensor's name.

        ``operands`` maps roles (``pad``, ``table0``, ...) to tensors. ``tables_have_rank``: the tables have as many axes as
        the expression has indices for them, which function bodies do not know. Opset 13 or later.

        Raises:
            ModelError: when an operand is missing.
        """
        return emit_mask(builder, self.root, sizes, operands, tables_have_rank=tables_have_rank)

    def rows_to_onnx(self, builder: Builder, sizes: ScoreSizes, operands: Mapping[str, str]) -> str:
        """Nodes that compute an integer expression of q and k, int64, which broadcasts to [S, T]; else as :meth:`to_onnx`."""
        return emit_mask(builder, self.root, sizes, operands, is_condition=False)


EVERY_PAIR = MaskExpression()
CAUSAL = MaskExpression(Binary("<=", K, Q))
PADDING = MaskExpression(Lookup("pad", (B, K)))
_FROM_QUERY, _FROM_KEY = Binary("-", Q, K), Binary("-", K, Q)


def causal_window(window: int) -> MaskExpression:
    """Causal attention to the last ``window`` keys; 0: to all."""
    return CAUSAL & MaskExpression(Binary("<", Binary("-", Q, K), Constant(window))) if window else CAUSAL


def find_key_vector(condition: Node) -> str | None:
    """The run-time operand of which a condition reads the element (b, k), and nothing else; None: it reads others."""
    read = {n for n in in_order(condition) if isinstance(n, Lookup)}
    names = {n.name for n in in_order(condition) if isinstance(n, Name)}
    if len(read) != 1 or not names <= {"b", "k"}:
        return None
    (lookup,) = read
    return lookup.name if lookup.name in VECTORS and lookup.indices == (B, K) else None


def allows_number(condition: Node, number: float) -> bool:
    """Whether a condition on one vector of keys (:func:`find_key_vector`) allows a key whose element is a number."""
    element = number != 0 if find_key_vector(condition) == "pad" else int(number)
    zero = np.zeros((1, 1), np.int64)
    values = {name: np.array([[element]]) for name in VECTORS} | {"b": zero, "k": zero}
    return bool(np.all(MaskExpression(condition).evaluate(values)))


def rebuild(node: Node, children: Sequence[Node]) -> Node:
    """A node with others in the place of its operands."""
    match node:
        case Unary(symbol="-"):
            return negative(children[0])
        case Unary():
            return Unary(node.symbol, children[0])
        case Binary():
            return Binary(node.symbol, children[0], children[1])
        case Call():
            return Call(node.name, tuple(children))
        case Lookup():
            return Lookup(node.name, tuple(children))
    return node


def _all_of(conditions: Iterable[Node]) -> MaskExpression:
    conjuncts = tuple(conditions)
    return MaskExpression(join("and", conjuncts)) if conjuncts else EVERY_PAIR


def _reach(condition: Node) -> tuple[int | None, int | None] | None:
    """How many keys to the left and right of the query a condition allows, None for any; None where it is no window."""
    match condition:
        case Binary(symbol="<=", left=left, right=Constant(value=width)) if width >= 0:
            if left == Call("abs", (_FROM_QUERY,)):
                return width, width
            if left == _FROM_QUERY:
                return width, None
            return (None, width) if left == _FROM_KEY else None
        case Binary(symbol="<=", left=left, right=right):
            return (None, 0) if (left, right) == (K, Q) else (0, None) if (left, right) == (Q, K) else None
    return (0, 0) if condition == Binary("==", Q, K) else None


def _smaller(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)


def _simplify(symbol: str, left: Node, right: Node) -> Node:
    if TRUE in (left, right):
        return TRUE if symbol == "or" else right if left == TRUE else left
    return Binary(symbol, left, right)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "and": operator.and_,
    "or": operator.or_,
}


def _operation(node: Node) -> Callable[..., Any]:
    """A function of the values by name and of the children's values."""
    match node:
        case Constant(value=value) | Truth(value=value):
            return lambda _: value
        case Name(name=name):
            return lambda names: names[name]
        case Unary(symbol="-"):
            return lambda _, inner: -inner
        case Unary():
            return lambda _, inner: not inner if isinstance(inner, bool) else ~inner
        case Binary(symbol=symbol):
            apply = _OPERATORS[symbol]
            return lambda _, left, right: apply(left, right)
        case Call(name=name):
            return lambda names, *arguments: names[name](*arguments)
        case Lookup(name=name):
            # An axis of size 1 serves every batch or head.
            may_share = [index in (B, H) for index in node.indices]
            return lambda names, *indices: _look_up(names[name], indices, may_share)
    raise AssertionError(node)


def _look_up(array: Any, indices: Sequence[Any], may_share: Sequence[bool]) -> Any:
    sizes = array.shape
    return array[tuple(0 if may_share[a] and sizes[a] == 1 else index for a, index in enumerate(indices))]
