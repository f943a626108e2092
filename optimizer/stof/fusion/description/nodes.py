# SPDX-License-Identifier: Apache-2.0
"""The values that a chain description is made of: expressions, indices, sizes of axes, outputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AffineIndex:
    """``constant`` + the sum of factor * axis over ``terms``; then ``// by`` or ``% by`` where ``op`` says so."""

    terms: tuple[tuple[str, int], ...]
    constant: int
    op: str = ""
    by: int = 1


@dataclass(frozen=True)
class ExpressionNode:
    """An operator of the grammar with its arguments. ``number``, ``axis``, ``let`` and ``read`` have a value instead."""

    op: str
    arguments: tuple[ExpressionNode, ...] = ()
    value: float | str = ""
    indices: tuple[AffineIndex, ...] = ()


@dataclass(frozen=True)
class AxisSize:
    """An axis's size: ``number``, or dimension ``dim`` of an input divided by ``number``."""

    number: int
    input: int = -1
    dim: int = 0


@dataclass(frozen=True)
class ChainOutput:
    """An output of a chain.

    Attributes:
        dtype: f32, f16 or bf16.
        dims: the axes of each dimension; none is a dimension of 1.
        expression: its value.
    """

    dtype: str
    dims: tuple[tuple[str, ...], ...]
    expression: ExpressionNode


Axes = tuple[tuple[str, AxisSize], ...]  # outermost first; the last one is the row
Lets = tuple[tuple[str, ExpressionNode], ...]


def number_node(value: float) -> ExpressionNode:
    """A number, which may be negative."""
    return ExpressionNode("number", value=value)


def negate(node: ExpressionNode) -> ExpressionNode:
    """The negative of an expression; of a number, a number, as in the library's parser."""
    if node.op == "number":
        return number_node(-float(node.value))
    return ExpressionNode("neg", (node,))
