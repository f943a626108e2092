# SPDX-License-Identifier: Apache-2.0
"""The equation of an Einsum node."""

from __future__ import annotations

import onnx


def read_equation(node: onnx.NodeProto) -> str:
    """A node's equation without spaces; empty where it has none."""
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "")
    return equation.replace(" ", "")


def split_equation(equation: str) -> tuple[list[str], str | None]:
    """The letters of each operand, and those of the result; None where the equation leaves the result out."""
    operands, arrow, result = equation.partition("->")
    return operands.split(","), result if arrow else None
