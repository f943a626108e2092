# SPDX-License-Identifier: Apache-2.0
"""One tensor that is a mask plus something else: both are added to the scores, so each can be read by itself.

Position biases and masks of a caller are often added to the model's own mask once, for all layers. Of the sum, nothing could
be said that is known of the mask alone.
"""

from __future__ import annotations

from dataclasses import replace

from stof.graph.index import GraphIndex, is_standard
from stof.site import FORBIDDING_VALUE, MaskTerm, TermKind
from stof.symbolic import Symbolic, var
from stof.symbolic.algebra.piecewise import split_cases
from stof.symbolic.algebra.terms import to_real

_DEEPEST = 4


def parts(index: GraphIndex, symbolic: Symbolic, term: MaskTerm, depth: int = 0) -> tuple[MaskTerm, ...]:
    """The terms, added to scores [B, H, S, T], whose sum a term is, where one is a mask and the other is none; else the term."""
    node = index.producer(term.tensor)
    if depth == _DEEPEST or node is None or node.op_type != "Add" or not is_standard(node):
        return (term,)
    if term.kind is not TermKind.ADD or term.merged or term.windows:
        return (term,)
    shapes = [symbolic.shape(name) for name in node.input]
    if any(s is None or len(s) > (5 if term.groups else 4) for s in shapes):
        return (term,)
    if _is_mask(symbolic, node.input[0], term.scale) == _is_mask(symbolic, node.input[1], term.scale):
        return (term,)
    return tuple(p for name in node.input for p in parts(index, symbolic, replace(term, tensor=name), depth + 1))


def _is_mask(symbolic: Symbolic, tensor: str, scale: float) -> bool:
    """Whether every element is a number that is known under some condition, and some forbid."""
    value = symbolic.value(tensor)
    if value is None or value.kind != "f":
        return False
    found = [x for _, x in split_cases(to_real(value.at(tuple(var(f"any{i}") for i in range(value.rank)))))]
    return all(isinstance(x, float) for x in found) and any(
        isinstance(x, float) and x * scale <= FORBIDDING_VALUE for x in found
    )
