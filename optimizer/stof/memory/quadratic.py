# SPDX-License-Identifier: Apache-2.0
"""Tensors whose size grows with the square of a length."""

from __future__ import annotations

from collections.abc import Collection

import onnx

from stof.symbolic import Int, Symbolic


def find_quadratic(graph: onnx.GraphProto, symbolic: Symbolic, lengths: Collection[str]) -> list[str]:
    """The computed tensors of a graph whose size has a product of two lengths, in the order of the graph.

    Args:
        graph: the graph.
        symbolic: shapes of its tensors.
        lengths: names of dimensions that are lengths.
    """
    degrees: dict[Int, int] = {}
    found = []
    for name in (o for node in graph.node for o in node.output if o):
        shape = symbolic.shape(name) or ()
        for dim in shape:
            if dim not in degrees:
                degrees[dim] = _degree(dim, lengths)
        if sum(degrees[dim] for dim in shape) > 1:
            found.append(name)
    return found


def _degree(size: Int, lengths: Collection[str]) -> int:
    """How many lengths are multiplied in a size, at most. A quotient of a length counts as one."""
    degrees = [0]
    for monomial, _ in size.terms:
        total = 0
        for atom in monomial:
            if atom.kind == "size":
                total += str(atom.args[0]) in lengths
            else:
                total += max((_degree(a, lengths) for a in atom.args if isinstance(a, Int)), default=0)
        degrees.append(total)
    return max(degrees)
