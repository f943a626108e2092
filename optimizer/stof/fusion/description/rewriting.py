# SPDX-License-Identifier: Apache-2.0
"""Descriptions of chains with other types or sizes: parsed, changed and printed again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from onnx import TensorProto

from stof.execution.upcast import FORBIDS, FP16_FORBIDS
from stof.fusion.description.format import ARITY
from stof.fusion.description.parser import (
    AffineIndex,
    AxisSize,
    ExpressionNode,
    ParsedChain,
    parse_chain,
)

_TYPE_NAMES = {int(TensorProto.FLOAT16): "f16", int(TensorProto.BFLOAT16): "bf16"}
_COMPARISON, _SUM, _PRODUCT, _UNARY = range(4)  # levels of the grammar, lowest precedence first
_LEVELS = {
    **dict.fromkeys(("<", "<=", ">", ">=", "==", "!="), _COMPARISON),
    **dict.fromkeys("+-", _SUM),
    **dict.fromkeys("*/", _PRODUCT),
    "neg": _UNARY,
}


def widen_description(text: str, kinds: Collection[int]) -> str:
    """The description of a chain (docs/reference/chain-format.md) with fp32 in place of the given types.

    A number of fp16 that forbids stands there as ``f16(-65504)``. It becomes what a widened model has in its place (upcast.py);
    any other number is of fp32, and stays.
    """
    names = {_TYPE_NAMES[kind] for kind in kinds if kind in _TYPE_NAMES}
    chain = parse_chain(text)
    if not names & {*called_functions(chain), *(out.dtype for out in chain.outs)}:
        return text
    widened = map_expressions(chain, lambda node: _widen_node(node, names))
    outs = (replace(out, dtype="f32" if out.dtype in names else out.dtype) for out in widened.outs)
    return print_chain(replace(widened, outs=tuple(outs)))


def _widen_node(node: ExpressionNode, names: Collection[str]) -> ExpressionNode:
    if node.op not in names:
        return node
    number = _negative_number(node.arguments[0]) if node.op == "f16" else None
    if number is not None and number <= FP16_FORBIDS:
        return ExpressionNode("neg", (ExpressionNode("number", value=-FORBIDS),))
    return replace(node, op="f32")


def _negative_number(node: ExpressionNode) -> float | None:
    """The number -x of a node ``-x``."""
    if node.op != "neg" or node.arguments[0].op != "number":
        return None
    return -float(node.arguments[0].value)


def with_axis_sizes(chain: ParsedChain, sizes: Mapping[int, int]) -> ParsedChain:
    """The chain with other sizes in place of fixed sizes of axes."""
    axes = ((n, s if s.input >= 0 else AxisSize(sizes.get(s.number, s.number))) for n, s in chain.axes)
    return replace(chain, axes=tuple(axes))


def has_only_plain_indices(chain: ParsedChain, axes: Collection[str]) -> bool:
    """Whether each of some axes is used as an index by itself only, so that no value depends on its size."""
    if any(set(dim) & set(axes) for out in chain.outs for dim in out.dims if len(dim) > 1):
        return False
    for node in expression_nodes(chain):
        if node.op == "axis" and node.value in axes:
            return False
        for index in node.indices:
            own = {name for name, _ in index.terms}
            if own & set(axes) and index != AffineIndex(((next(iter(own)), 1),), 0):
                return False
    return True


def called_functions(chain: ParsedChain) -> frozenset[str]:
    """The functions of the grammar that a chain calls."""
    return frozenset(node.op for node in expression_nodes(chain) if node.op in ARITY)


def expression_nodes(chain: ParsedChain) -> Iterator[ExpressionNode]:
    """Every node of a chain's expressions."""
    pending = [*(value for _, value in chain.lets), *(out.expression for out in chain.outs)]
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.arguments)


def map_expressions(chain: ParsedChain, change: Callable[[ExpressionNode], ExpressionNode]) -> ParsedChain:
    """The chain with every node of its expressions changed, outermost first."""

    def mapped(node: ExpressionNode) -> ExpressionNode:
        changed = change(node)
        return replace(changed, arguments=tuple(mapped(a) for a in changed.arguments))

    lets = tuple((name, mapped(value)) for name, value in chain.lets)
    return replace(chain, lets=lets, outs=tuple(replace(out, expression=mapped(out.expression)) for out in chain.outs))


def print_chain(chain: ParsedChain) -> str:
    """The text of a parsed chain: :func:`parse_chain` gives the same chain back."""
    lines = ["axes " + ", ".join(f"{name} = {_size(size)}" for name, size in chain.axes)]
    lines += [f"let {name} = {_expression(value, _COMPARISON)}" for name, value in chain.lets]
    for i, out in enumerate(chain.outs):
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
        assert isinstance(node.value, float)
        is_short = node.value.is_integer() and node.value < 1e6
        return str(int(node.value)) if is_short else repr(node.value)
    if node.op in ("axis", "let"):
        return str(node.value)
    if node.op == "read":
        return f"x{int(node.value)}[{', '.join(_index(i) for i in node.indices)}]"
    if node.op in ARITY:
        return f"{node.op}({', '.join(_expression(a, _COMPARISON) for a in node.arguments)})"
    own = _LEVELS[node.op]
    if node.op == "neg":
        text = f"-{_expression(node.arguments[0], _UNARY)}"
    else:
        left, right = node.arguments
        # Operators of one level join from the left; a comparison takes sums on both sides.
        text = f"{_expression(left, max(own, _SUM))} {node.op} {_expression(right, own + 1)}"
    return f"({text})" if own < level else text


def _index(index: AffineIndex) -> str:
    text = ""
    for name, factor in (*index.terms, ("", index.constant)):
        if not name and not factor and text:
            continue
        part = str(abs(factor)) if not name else name if abs(factor) == 1 else f"{abs(factor)} * {name}"
        sign = "-" if factor < 0 else "+"
        text = f"{text} {sign} {part}" if text else part if factor >= 0 else f"-{part}"
    return f"({text}) {index.op} {index.by}" if index.op else text
