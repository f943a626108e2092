# SPDX-License-Identifier: Apache-2.0
"""Parses dimension names that are expressions of others, such as ``past_sequence_length + sequence_length``."""

from __future__ import annotations

import ast

from stof.symbolic.algebra.terms import Int, dim, integer, of_atom

_MAX_LENGTH = 200
_MAX_POWER = 4


def parse_dimension(name: str) -> Int:
    """The size that a ``dim_param`` declares: an expression of other names, or a name itself where it does not parse."""
    if len(name) > _MAX_LENGTH or not any(c in name for c in "+-*/%"):
        return dim(name)
    try:
        size = _size(ast.parse(name.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        size = None
    return dim(name) if size is None else size


def declared_dim(size: Int) -> int | str:
    """A size as ``value_info`` declares it: a number, a name of the model's own, or "" for anything else."""
    if size.constant is not None:
        return size.constant
    atom = size.atom
    # The interpreter made the names "tensor#axis".
    name = str(atom.args[0]) if atom is not None and atom.kind == "size" else ""
    return name if "#" not in name else ""


def _product(factors: list[Int]) -> Int:
    total = integer(1)
    for factor in factors:
        total = total * factor
    return total


def _size(node: ast.expr) -> Int | None:
    match node:
        case ast.Name(id=name):
            return dim(name)
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return integer(number)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            x, y = _size(left), _size(right)
            if x is None or y is None:
                return None
            return x + y if isinstance(op, ast.Add) else x - y if isinstance(op, ast.Sub) else x * y
        case ast.BinOp(left=left, op=ast.FloorDiv() | ast.Mod() as op, right=ast.Constant(value=int(divisor))):
            x = _size(left)
            if x is None or divisor <= 0 or divisor == 1:
                return x if divisor == 1 and isinstance(op, ast.FloorDiv) else None
            return of_atom("div" if isinstance(op, ast.FloorDiv) else "mod", x, divisor)
        case ast.BinOp(left=left, op=ast.FloorDiv(), right=right) if not isinstance(right, ast.Constant):
            x, y = _size(left), _size(right)
            return None if x is None or y is None else x.divide(y) or of_atom("quotient", x, y)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if 1 <= power <= _MAX_POWER:
            x = _size(left)
            return None if x is None else _product([x] * power)
    return None
