# SPDX-License-Identifier: Apache-2.0
"""Names of dimensions that are sums of others: exporters write ``past_sequence_length + sequence_length``."""

from __future__ import annotations

import ast

from stof.symbolic.terms import Int, integer, size

_LONGEST = 200


def dimension(name: str) -> Int:
    """The size that a ``dim_param`` states: a polynomial of other names where it reads as one, else a name of its own."""
    if len(name) > _LONGEST or not any(c in name for c in "+-*"):
        return size(name)
    try:
        found = _size(ast.parse(name.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        found = None
    return size(name) if found is None else found


def _size(node: ast.expr) -> Int | None:
    match node:
        case ast.Name(id=name):
            return size(name)
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            return integer(number)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() | ast.Mult() as op, right=right):
            x, y = _size(left), _size(right)
            if x is None or y is None:
                return None
            return x + y if isinstance(op, ast.Add) else x - y if isinstance(op, ast.Sub) else x * y
    return None
