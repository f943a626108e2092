# SPDX-License-Identifier: Apache-2.0
"""Prints chain descriptions as text (docs/reference/chain-format.md); parser.py reads it."""

from __future__ import annotations

import math

from stof.fusion.description.format import ARITY
from stof.fusion.description.nodes import AffineIndex, Axes, AxisSize, ChainOutput, ExpressionNode, Lets

_COMPARISON, _SUM, _PRODUCT, _UNARY = range(4)  # levels of the grammar, lowest precedence first
_LEVELS = {
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), _COMPARISON),
    **dict.fromkeys("+-", _SUM),
    **dict.fromkeys("*/", _PRODUCT),
    "neg": _UNARY,
}
_LARGEST_INTEGER = 1e6  # from it on, a number has a point or an exponent, as a negative one has


def print_chain(axes: Axes, lets: Lets, outs: tuple[ChainOutput, ...]) -> str:
    """The text of a description, from which the parser makes equal parts again."""
    lines = ["axes " + ", ".join(f"{name} = {_size(size)}" for name, size in axes)]
    lines += [f"let {name} = {_expression(value, _COMPARISON)}" for name, value in lets]
    for i, out in enumerate(outs):
        dims = ", ".join("1" if not d else d[0] if len(d) == 1 else f"({' '.join(d)})" for d in out.dims)
        lines.append(f"out y{i} {out.dtype} [{dims}] = {_expression(out.expression, _COMPARISON)}")
    return "\n".join(lines)


def _size(size: AxisSize) -> str:
    if size.input < 0:
        return str(size.number)
    return f"x{size.input}.{size.dim}" + (f" / {size.number}" if size.number != 1 else "")


def _expression(node: ExpressionNode, level: int) -> str:
    """A node as an operand of an operator of this level; in parentheses where its own level is lower."""
    if node.op == "number":
        return _number(node)
    if node.op in ("axis", "let"):
        return str(node.value)
    if node.op == "read":
        return f"x{node.value:.0f}[{', '.join(_index(i) for i in node.indices)}]"
    if node.op in ARITY:
        return f"{node.op}({', '.join(_expression(a, _COMPARISON) for a in node.arguments)})"
    node_level = _LEVELS[node.op]
    text = f"-{_expression(node.arguments[0], _UNARY)}" if node.op == "neg" else _binary(node, node_level)
    return f"({text})" if node_level < level else text


def _number(node: ExpressionNode) -> str:
    assert isinstance(node.value, float)
    is_short = node.value.is_integer() and node.value < _LARGEST_INTEGER and math.copysign(1.0, node.value) > 0
    return str(int(node.value)) if is_short else repr(node.value)


def _binary(node: ExpressionNode, level: int) -> str:
    left, right = node.arguments
    # Operators of one level join from the left; a comparison takes sums on both sides.
    left_text = _expression(left, max(level, _SUM))
    if level == _COMPARISON and left.op == "axis" and right.op == "number":  # positions are integers of any size
        assert isinstance(right.value, float)
        return f"{left_text} {node.op} {int(right.value) if right.value.is_integer() else right.value!r}"
    return f"{left_text} {node.op} {_expression(right, level + 1)}"


def _index(index: AffineIndex) -> str:
    text = ""
    for name, factor in (*index.terms, ("", index.constant)):
        if not name and not factor and text:
            continue
        part = str(abs(factor)) if not name else name if abs(factor) == 1 else f"{abs(factor)} * {name}"
        sign = "-" if factor < 0 else "+"
        text = f"{text} {sign} {part}" if text else part if factor >= 0 else f"-{part}"
    return f"({text}) {index.op} {index.by}" if index.op else text
