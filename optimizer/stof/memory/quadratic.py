# SPDX-License-Identifier: Apache-2.0
"""Tensors whose size grows with the square of a length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import onnx

from stof.symbolic import Int, Symbolic


def find_quadratic(graph: onnx.GraphProto, symbolic: Symbolic, lengths: Collection[str]) -> list[str]:
    """The computed tensors of a graph whose size has the square of a length, in the order of the graph.

    Two different lengths count where a softmax reads or writes the tensor, as of queries and keys: sides of an image do not.

    Args:
        graph: the graph.
        symbolic: shapes of its tensors.
        lengths: names of dimensions that are lengths.
    """
    degrees: dict[Int, Counter[str]] = {}
    scores = {n for node in graph.node if node.op_type == "Softmax" for n in (*node.input, *node.output)}
    found = []
    for name in (o for node in graph.node for o in node.output if o):
        total: Counter[str] = Counter()
        for dim in symbolic.shape(name) or ():
            if dim not in degrees:
                degrees[dim] = _degrees(dim, lengths)
            total += degrees[dim]
        if max(total.values(), default=0) > 1 or (name in scores and total.total() > 1):
            found.append(name)
    return found


def _degrees(size: Int, lengths: Collection[str]) -> Counter[str]:
    """How often each length is multiplied in a size, at most. A quotient of a length counts as the length."""
    degrees: Counter[str] = Counter()
    for monomial, _ in size.terms:
        total: Counter[str] = Counter()
        for atom in monomial:
            if atom.kind == "size":
                total += Counter({str(atom.args[0])} & set(lengths))
            else:
                inner: Counter[str] = Counter()
                for part in (a for a in atom.args if isinstance(a, Int)):
                    inner |= _degrees(part, lengths)
                total += inner
        degrees |= total
    return degrees
